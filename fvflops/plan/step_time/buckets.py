"""Buckets in which DistributedDataParallel averages gradients, and when they are ready in a backward pass."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from fvflops.plan.rank_step import Call, Gradient, Pass
from fvflops.plan.sharding.replicas import average_gradients
from fvflops.trace import ModuleTree, Value
from fvflops.trace.module_tree import innermost, modules_above

_MIB = 2**20
# torch's _DEFAULT_FIRST_BUCKET_BYTES and _DEFAULT_BUCKET_CAP_MB.
_DEFAULT_LIMITS = (1 * _MIB, 25 * _MIB)


def check_bucket_cap(bucket_cap_mb: float | None, name: str = "bucket_cap_mb") -> None:
    """Raise ValueError for a size of buckets that DistributedDataParallel cannot have."""
    if bucket_cap_mb is None:
        return
    is_number = isinstance(bucket_cap_mb, (int, float)) and not isinstance(bucket_cap_mb, bool)
    if not is_number or not math.isfinite(bucket_cap_mb) or bucket_cap_mb < 0:
        raise ValueError(
            f"{name} is the MiB of a bucket of gradients, or 0 to reduce them after the backward pass; got "
            f"{bucket_cap_mb!r}"
        )


def describe_buckets(bucket_cap_mb: float | None) -> str:
    """Return when DistributedDataParallel is assumed to reduce gradients."""
    if bucket_cap_mb == 0:
        return "DDP reduces gradients after the backward pass of the last microbatch, not beside it"
    size = "25 MiB (the first: 1 MiB)" if bucket_cap_mb is None else f"{bucket_cap_mb:g} MiB"
    return f"DDP reduces buckets of {size} beside the backward pass of the last microbatch"


def assign_buckets(gradients: Sequence[Gradient], bucket_cap_mb: float | None = None) -> list[list[Gradient]]:
    """Divide gradients, in the order in which they are ready, into buckets in the order of their all-reduces.

    A bucket has gradients of one group and dtype, and is full when it has `bucket_cap_mb` MiB; by default the first of
    each dtype when it has 1 MiB and the others when they have 25 MiB. Source: compute_bucket_assignment_by_size and
    rebuild_buckets in torch/csrc/distributed/c10d/reducer.cpp.

    >>> from fvflops.trace import TensorSpec
    >>> layers = [Gradient(f"{index}.weight", TensorSpec((2**17,), "float32"), "dp", 2) for index in range(5)]
    >>> [len(bucket) for bucket in assign_buckets(layers)], [len(bucket) for bucket in assign_buckets(layers, 0.6)]
    ([2, 3], [2, 2, 1])
    """
    first, others = _DEFAULT_LIMITS if bucket_cap_mb is None else (bucket_cap_mb * _MIB,) * 2
    limits: dict[tuple[Value, str], float] = {}
    filling: dict[tuple[Value, str], list[Gradient]] = {}
    sizes = Counter[tuple[Value, str]]()
    buckets = []
    for gradient in gradients:
        key = gradient.group, gradient.spec.dtype
        filling.setdefault(key, []).append(gradient)
        sizes[key] += gradient.spec.nbytes
        if sizes[key] >= limits.get(key, first):
            buckets.append(filling.pop(key))
            sizes[key], limits[key] = 0, others
    return [*buckets, *filling.values()]


def overlap_buckets(
    recorded: Pass, gradients: Sequence[Gradient], bucket_cap_mb: float | None = None
) -> dict[int, list[Call]]:
    """Return number of events of a backward pass → DistributedDataParallel's calls that follow these.

    A gradient is scaled when it is ready: after the last op of the backward pass in a module that has its parameter, or
    if that has none, in the next one above it; without such an op at the end. A bucket's all-reduce follows its
    last gradient, and the all-reduces of the buckets before it.
    """
    ready = _find_ready(recorded, gradients)
    # Gradients that are ready at once arrive in reverse order of the parameters.
    arriving = list(reversed(gradients))
    arriving.sort(key=lambda gradient: ready[gradient.parameter])
    calls: dict[int, list[Call]] = {}
    started: dict[Value, int] = {}
    for bucket in assign_buckets(arriving, bucket_cap_mb):
        group = bucket[0].group
        *scaled, reduced = average_gradients(bucket)
        for gradient, call in zip(bucket, scaled, strict=True):
            calls.setdefault(ready[gradient.parameter], []).append(call)
        started[group] = max(started.get(group, 0), *(ready[gradient.parameter] for gradient in bucket))
        calls.setdefault(started[group], []).append(reduced)
    return calls


def _find_ready(recorded: Pass, gradients: Sequence[Gradient]) -> dict[str, int]:
    """Return name of a parameter → the number of events after which its gradient is ready."""
    trace = recorded.trace
    owners = [innermost(scope) for scope in trace.scopes()]
    events = (trace.events or ())[recorded.begin : recorded.end]
    last: dict[str, int] = {}
    for position, event in enumerate(events, start=1):
        if event.kind == "op" and event.phase == "backward":
            last[owners[event.stack]] = position
    modules = _find_modules(trace.modules)
    return {
        name: max(_last_of(module, last, len(events)) for module in modules[name])
        for name in (gradient.parameter for gradient in gradients)
    }


def _last_of(module: str, last: Mapping[str, int], end: int) -> int:
    names = (module, *reversed(modules_above(module)))
    return next((last[name] for name in names if name and name in last), end)


def _find_modules(modules: ModuleTree) -> dict[str, list[str]]:
    """Return name of a parameter → the modules that have it: several if it is tied, or its module is shared."""
    owned = [(parameter, module.name) for module in modules.by_name.values() for parameter in module.parameters]
    by_identity: dict[int, list[str]] = {}
    for parameter, module_name in owned:
        by_identity.setdefault(parameter.identity, []).append(module_name)
    return {parameter.name: by_identity[parameter.identity] for parameter, _ in owned}
