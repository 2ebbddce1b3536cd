"""A fake process group, in which one process plans one of many ranks, and its device mesh."""

from __future__ import annotations

import logging
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from fvflops.capture.instrument.patching import Patch
from fvflops.plan.parallel_axes import AXES
from fvflops.plan.plan_options import PlanError
from fvflops.torch_internals import default_process_group, too_old_message


@contextmanager
def torch_warnings_ignored() -> Iterator[None]:
    """Ignore the warnings of torch's own modules: a plan has no values, so that their advice does not apply."""
    from fvflops.torch_internals import redistribution_logger

    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", module=r"torch\b")
        if redistribution_logger is not None:
            stack.callback(redistribution_logger.setLevel, redistribution_logger.level)
            redistribution_logger.setLevel(logging.ERROR)
        yield


@contextmanager
def fake_process_group(size: int, rank: int) -> Iterator[None]:
    """Run as one rank of a fake process group, in which nothing is sent."""
    if not dist.is_available():
        raise PlanError("this torch is built without torch.distributed, which a plan needs")
    if message := too_old_message("plan and sharded memory"):
        raise PlanError(message)
    if dist.is_initialized():
        raise PlanError(
            "this program has a process group, and a plan needs a fake one: "
            "plan in another program, or after torch.distributed.destroy_process_group()"
        )
    from fvflops.torch_internals import FakeStore, uncached_propagation

    _clear_sharding_cache()
    show_exception = sys.excepthook
    try:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        with Patch(*uncached_propagation).wrapped(_propagate_distinct):
            yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        sys.excepthook = show_exception  # torch's hook prefixes each line with the rank
        _clear_sharding_cache()


def _propagate_distinct(propagate: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Wrap DTensor's slow propagation of shardings: in an optimizer's op, once for equal shapes and placements."""

    def propagate_distinct(propagator: Any, schema: Any) -> Any:
        lists = [arg for arg in schema.args_schema if _is_list_of_specs(arg)]
        if not lists or not schema.op.name().startswith(("aten::_foreach_", "aten::_fused_")):
            return propagate(propagator, schema)
        columns = list(zip(*lists, strict=False))
        distinct = {column: index for index, column in reversed(list(enumerate(columns)))}
        kept = sorted(distinct.values())
        if len(kept) == len(columns) or any(len(specs) != len(columns) for specs in lists):
            return propagate(propagator, schema)
        args = [type(arg)([arg[i] for i in kept]) if _is_list_of_specs(arg) else arg for arg in schema.args_schema]
        found = propagate(propagator, replace(schema, args_schema=tuple(args)))
        if found.needs_redistribute:
            return propagate(propagator, schema)
        if found.output_spec is not None:
            places = [kept.index(distinct[column]) for column in columns]
            found.output_spec = tuple(found.output_spec[place] for place in places)
        return found

    return propagate_distinct


def _is_list_of_specs(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(hasattr(item, "placements") for item in value)


def _clear_sharding_cache() -> None:
    """Clear DTensor's sharding caches: their entries name process groups, which are destroyed with the fake one."""
    from fvflops.torch_internals import clear_native_shardings, find_redistribution, propagate_sharding

    propagate_sharding.cache_clear()
    find_redistribution.cache_clear()  # torch 2.10 reuses a sharded embedding's mask from an equal earlier plan
    clear_native_shardings()


def make_device_mesh(mesh: Mapping[str, int]) -> Any:
    """Return torch's DeviceMesh for a mesh; the process group must have as many ranks."""
    parallel = [axis for axis, size in mesh.items() if size > 1]
    if len(parallel) == 1:
        _name_default_group(parallel[0])
    return dist.device_mesh.init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))


def _name_default_group(axis: str) -> None:
    """Name the default group after the axis that consists of all ranks, as torch names the groups of other axes."""
    default_process_group()._set_group_desc(f"mesh_{axis}")


def join_averaging(device_mesh: Any, mesh: Mapping[str, int], without: str = "") -> Any:
    """Return the axes whose ranks average gradients, flattened to one dimension; None if none has several ranks."""
    parallel = tuple(axis for axis, size in mesh.items() if AXES[axis].tokens and axis != without and size > 1)
    if not parallel:
        return None
    if len(parallel) == 1:
        return device_mesh[parallel[0]]
    name = "+".join(parallel)
    flattened = device_mesh[parallel]._flatten(name)
    if flattened.size() == math.prod(mesh.values()):
        _name_default_group(name)
    return flattened
