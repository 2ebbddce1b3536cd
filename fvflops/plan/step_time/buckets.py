"""Buckets in which replicas average gradients and gather parameters, and when they are ready or needed in a pass."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fvflops.plan.rank_step import Call, Gradient, Pass
from fvflops.plan.sharding.replicas import GATHERING, calls_of
from fvflops.trace import ModuleTree, Value
from fvflops.trace.module_tree import innermost, modules_above

_MIB = 2**20
# torch's _DEFAULT_FIRST_BUCKET_BYTES and _DEFAULT_BUCKET_CAP_MB.
_DEFAULT_LIMITS = (1 * _MIB, 25 * _MIB)
# Elements of a bucket of Megatron-Core's distributed optimizer: the larger of these, the second for each replica.
# Source: DistributedDataParallel's bucket_size in megatron/core/distributed/distributed_data_parallel.py.
_SHARDED_LIMITS = (40_000_000, 1_000_000)


def check_bucket_cap(bucket_cap_mb: float | None, name: str = "bucket_cap_mb") -> None:
    """Raise ValueError for an invalid bucket size."""
    if bucket_cap_mb is None:
        return
    is_number = isinstance(bucket_cap_mb, (int, float)) and not isinstance(bucket_cap_mb, bool)
    if not is_number or not math.isfinite(bucket_cap_mb) or bucket_cap_mb < 0:
        raise ValueError(
            f"{name} is the MiB of a bucket of gradients, or 0 to reduce them after the backward pass; got "
            f"{bucket_cap_mb!r}"
        )


def describe_buckets(bucket_cap_mb: float | None, *, is_sharded: bool = False) -> str:
    """Return when DistributedDataParallel, or a sharded optimizer, is assumed to reduce gradients."""
    if is_sharded:
        if bucket_cap_mb == 0:
            return "gradients are reduce-scattered after the last backward pass, parameters gathered before the first"
        size = (
            "40 million elements, or 1 million for each replica" if bucket_cap_mb is None else f"{bucket_cap_mb:g} MiB"
        )
        return (
            f"buckets of {size} are reduce-scattered during the backward pass of the last microbatch, and gathered "
            "during the forward pass of the first"
        )
    if bucket_cap_mb == 0:
        return "DDP reduces gradients after the backward pass of the last microbatch, not during it"
    size = "25 MiB (the first: 1 MiB)" if bucket_cap_mb is None else f"{bucket_cap_mb:g} MiB"
    return f"DDP reduces buckets of {size} during the backward pass of the last microbatch"


def assign_buckets(
    gradients: Sequence[Gradient], bucket_cap_mb: float | None = None, *, is_sharded: bool = False
) -> list[list[Gradient]]:
    """Divide gradients, in the order in which they are ready, into buckets in the order of their all-reduces.

    A bucket has gradients of one group and dtype, and is full when it has `bucket_cap_mb` MiB; by default the first of
    each dtype when it has 1 MiB and the others when they have 25 MiB. Source: compute_bucket_assignment_by_size and
    rebuild_buckets in torch/csrc/distributed/c10d/reducer.cpp. Buckets of a sharded optimizer are by default
    Megatron-Core's.

    >>> from fvflops.trace import TensorSpec
    >>> layers = [Gradient(f"{index}.weight", TensorSpec((2**17,), "float32"), "dp", 2) for index in range(5)]
    >>> [len(bucket) for bucket in assign_buckets(layers)], [len(bucket) for bucket in assign_buckets(layers, 0.6)]
    ([2, 3], [2, 2, 1])
    """
    limits: dict[tuple[Value, str], float] = {}
    filling: dict[tuple[Value, str], list[Gradient]] = {}
    sizes = Counter[tuple[Value, str]]()
    buckets = []
    for gradient in gradients:
        key = gradient.group, gradient.spec.dtype
        filling.setdefault(key, []).append(gradient)
        sizes[key] += gradient.spec.nbytes
        first, others = _limits_of(gradient, bucket_cap_mb, is_sharded)
        if sizes[key] >= limits.get(key, first):
            buckets.append(filling.pop(key))
            sizes[key], limits[key] = 0, others
    return [*buckets, *filling.values()]


def _limits_of(gradient: Gradient, bucket_cap_mb: float | None, is_sharded: bool) -> tuple[float, float]:
    if bucket_cap_mb is not None:
        return (bucket_cap_mb * _MIB,) * 2
    if not is_sharded:
        return _DEFAULT_LIMITS
    least, each = _SHARDED_LIMITS
    return (max(least, each * gradient.replicas) * replace(gradient.spec, shape=(1,)).nbytes,) * 2


def overlap_buckets(
    recorded: Pass, kind: str, gradients: Sequence[Gradient], bucket_cap_mb: float | None = None
) -> dict[int, list[Call]]:
    """Return number of events of a backward pass → the calls of an averaging action of some kind that follow these.

    A gradient is ready after the last op of the backward pass in a module that has its parameter, or if that has none,
    in the next one above it; without such an op at the end. DistributedDataParallel scales it then, a sharded optimizer
    scales the whole bucket. A bucket's collective follows its last gradient, and the collectives of the buckets before
    it.
    """
    ready = _find_positions(recorded, gradients, is_backward=True)
    calls: dict[int, list[Call]] = {}
    started: dict[Value, int] = {}
    # Gradients that are ready at once arrive in reverse order of the parameters.
    arriving = list(reversed(gradients))
    arriving.sort(key=lambda gradient: ready[gradient.parameter])
    for bucket in assign_buckets(arriving, bucket_cap_mb, is_sharded=kind != "allreduce"):
        group = bucket[0].group
        *scaled, reduced = calls_of(kind, bucket)
        started[group] = max(started.get(group, 0), *(ready[gradient.parameter] for gradient in bucket))
        own = len(scaled) == len(bucket)  # else the bucket's
        for index, call in enumerate(scaled):
            calls.setdefault(ready[bucket[index].parameter] if own else started[group], []).append(call)
        calls.setdefault(started[group], []).append(reduced)
    return calls


def gather_buckets(
    recorded: Pass, parameters: Sequence[Gradient], bucket_cap_mb: float | None = None
) -> dict[int, list[Call]]:
    """Return position in a forward pass → the gathering calls of a sharded optimizer that its op waits for, in order.

    A bucket is needed by the first op in a module that has one of its parameters.
    """
    needed = _find_positions(recorded, parameters, is_backward=False)
    calls: dict[int, list[Call]] = {}
    for bucket in reversed(assign_buckets(tuple(reversed(parameters)), bucket_cap_mb, is_sharded=True)):
        position = min(needed[parameter.parameter] for parameter in bucket)
        calls.setdefault(position, []).extend(calls_of(GATHERING, bucket))
    return calls


def _find_positions(recorded: Pass, gradients: Sequence[Gradient], *, is_backward: bool) -> dict[str, int]:
    """Return parameter → the first op of a pass in a module that has it or is above it, or the event after the last.

    The last op of a backward pass makes its gradient, so that this is ready.
    """
    trace = recorded.trace
    owners = [innermost(scope) for scope in trace.scopes()]
    events = (trace.events or ())[recorded.begin : recorded.end]
    found: dict[str, int] = {}
    for position, event in enumerate(events):
        if event.kind == "op" and not is_backward:
            found.setdefault(owners[event.stack], position)
        elif event.kind == "op" and event.phase == "backward":
            found[owners[event.stack]] = position + 1
    modules, names = _find_modules(trace.modules), [gradient.parameter for gradient in gradients]
    choose, otherwise = (max, len(events)) if is_backward else (min, 0)
    return {name: choose(_of_module(module, found, otherwise) for module in modules[name]) for name in names}


def _of_module(module: str, known: Mapping[str, int], otherwise: int) -> int:
    names = (module, *reversed(modules_above(module)))
    return next((known[name] for name in names if name and name in known), otherwise)


def _find_modules(modules: ModuleTree) -> dict[str, list[str]]:
    """Return name of a parameter → the modules that have it: several if it is tied, or its module is shared."""
    owned = [(parameter, module.name) for module in modules.by_name.values() for parameter in module.parameters]
    by_identity: dict[int, list[str]] = {}
    for parameter, module_name in owned:
        by_identity.setdefault(parameter.identity, []).append(module_name)
    return {parameter.name: by_identity[parameter.identity] for parameter, _ in owned}
