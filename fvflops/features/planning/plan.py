"""Plan one rank of a distributed training step on a single machine."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fvflops.analysis.model_counts import FlopCountAnalysis
from fvflops.capture.recorder.signature import describe, tensors_of
from fvflops.capture.restore.interrupts import deferred
from fvflops.capture.restore.torch_state import model_runs
from fvflops.capture.run import Loss, record_call
from fvflops.features.communication.compute import read_communication
from fvflops.features.communication.model import Communication
from fvflops.features.planning.context_parallel import ShardedSequence
from fvflops.features.planning.derived_calls import (
    Call,
    StageLinks,
    accumulate,
    add_calls,
    gradient_allreduce,
    local_spec,
    repeat,
    send_recv,
)
from fvflops.features.planning.pipeline import Inputs, find_hidden, find_stages, receive, split_stage
from fvflops.features.planning.sharding import find_sharding, shard
from fvflops.formulas import FormulaTable, resolve_table
from fvflops.torch_internals import default_process_group
from fvflops.trace import Trace

# Pipeline stages, replicas (DistributedDataParallel, or with fsdp hybrid sharding), fully sharded data parallelism
# (FSDP2), context parallelism, tensor parallelism.
AXES = ("pp", "dp", "fsdp", "cp", "tp")
Shard = Callable[[nn.Module, Any], nn.Module | None]


class PlanError(ValueError):
    """An invalid mesh, rank or program state for a plan."""


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One rank's work in one training step.

    `mesh` is axis → size, outermost first, `coordinates` axis → the rank's index. `parameters` and `parameter_bytes`
    are those of the rank's shard, `model_parameters` the whole model's. `trace` is the step; `derived` describes its
    calls that are estimated, not run, and `left_out` the work of a real step that is not included.
    """

    mesh: Mapping[str, int]
    rank: int
    coordinates: Mapping[str, int]
    parameters: int
    parameter_bytes: int
    model_parameters: int
    trace: Trace
    derived: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def world(self) -> int:
        """The number of ranks."""
        return math.prod(self.mesh.values())

    def flops(self, table: str | FormulaTable = "default") -> FlopCountAnalysis:
        """Return the FLOPs of the step in a convention, by module, operator and phase."""
        return FlopCountAnalysis.from_trace(self.trace, table=table, warn=False)

    def communication(self) -> Communication:
        """Return the communication of the rank in the step."""
        return read_communication(self.trace)


def plan_rank(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    mesh: Mapping[str, int],
    rank: int = 0,
    shard_by: Shard | None = None,
    sequence_parallel: bool = False,
    microbatches: int = 1,
    loss: Loss | None = None,
    device: str | torch.device | None = None,
    assume: Mapping[str, Any] | None = None,
    table: str | FormulaTable = "default",
) -> RankPlan:
    """Return one rank's work in a training step, forward and backward, by shape execution without weights.

    `mesh` is axis → size, outermost first; ranks along the last axis are adjacent. The rank runs in torch's fake
    process group, so that torch's own DTensor and FSDP2 decide what each rank computes and sends; `derived` describes
    what is estimated instead. The axes:

        dp      replicas, as DistributedDataParallel makes them (derived); with fsdp, hybrid sharding
        fsdp    FSDP2 of each member of the model's outermost module lists, and of the root
        tp      tensor parallelism: zoo and transformers models by a known plan, others by `shard_by`, a function of
                (model, DeviceMesh of tp); `sequence_parallel` shards the sequence between the layers too
        cp      context parallelism: each rank has a part of the sequence, and attention gathers keys and values
        pp      pipeline stages, of models with a known split; their sends and receives are derived

    `args` and `kwargs` are the inputs of one rank, with cp its part of the sequence, and of one of the `microbatches`,
    whose gradients are accumulated. `loss` is a function of the model's result, by default the sum of its first tensor
    that requires a gradient; `device` is the kind of device whose kernels are shown, `assume` is that of `record_call`,
    and composite ops that `table` counts are not decomposed.

    A program with an initialised process group, an unknown axis and a rank out of range raise PlanError, a model that
    cannot be split ShardingError. The model is not changed.

    >>> from fvflops.zoo import build
    >>> tokens = torch.ones(1, 16, dtype=torch.int64)
    >>> plan = plan_rank(build("llama_tiny", device="meta"), (tokens,), mesh={"dp": 512, "tp": 2})
    >>> plan.parameters, {axis: volume.payload for axis, volume in plan.communication().by_axis().items()}
    (62784, {'tp': 57344, 'dp': 251136})
    """
    _check(mesh, rank, microbatches, sequence_parallel, device)
    coordinates = _coordinates(mesh, rank)
    inputs: Inputs = args, dict(kwargs or {})
    twin, pipe = _copy_to_meta(model), None
    if mesh.get("pp", 1) > 1:
        twin, inputs, pipe = _keep_stage(model, inputs, coordinates["pp"], mesh["pp"])
        loss = _touch_result if pipe.sends else loss
    with deferred(), pretended_world(math.prod(mesh.values()), rank), model_runs():
        device_mesh = _make_mesh(mesh)
        twin = _split(twin, device_mesh, mesh, shard_by, sequence_parallel)
        held = [local_spec(parameter) for parameter in twin.parameters()]
        with ShardedSequence(device_mesh.get_group("cp")) if mesh.get("cp", 1) > 1 else nullcontext():
            trace = record_call(
                twin,
                *inputs,
                loss=loss or sum_of_result,
                execution="shapes",
                device=device,
                assume=assume,
                stops_at=resolve_table(table).stops_at,
            )
        trace, derived = _derive(trace, twin, device_mesh, mesh, pipe, microbatches)
    return RankPlan(
        mesh=dict(mesh),
        rank=rank,
        coordinates=coordinates,
        parameters=sum(spec.numel for spec in held),
        parameter_bytes=sum(spec.nbytes for spec in held),
        model_parameters=sum(parameter.numel() for parameter in model.parameters()),
        trace=trace,
        derived=derived,
        left_out=_left_out(mesh, sequence_parallel),
    )


@contextmanager
def pretended_world(size: int, rank: int) -> Iterator[None]:
    """Run as one rank of a fake process group of any size, in which nothing is sent."""
    if not dist.is_available():
        raise PlanError("this torch is built without torch.distributed, which a plan needs")
    if dist.is_initialized():
        raise PlanError(
            "this program has a process group, and a plan needs a fake one of its own: "
            "plan in another program, or after torch.distributed.destroy_process_group()"
        )
    from fvflops.torch_internals import FakeStore

    _forget_meshes()
    try:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        _forget_meshes()


def _forget_meshes() -> None:
    """Clear DTensor's sharding cache: its entries name process groups, which are destroyed with the fake one."""
    from fvflops.torch_internals import clear_sharding_cache

    clear_sharding_cache()


def sum_of_result(result: Any) -> torch.Tensor:
    """Return the sum of the first differentiable tensor in a model's result, as its loss."""
    for tensor in tensors_of(result):
        if tensor.requires_grad:
            return tensor.sum()
    raise PlanError(f"the model returns {type(result).__name__} without a tensor that requires a gradient: give a loss")


def _touch_result(result: Any) -> torch.Tensor:
    """Return one element of a result: a loss that starts the backward pass without arithmetic of its own."""
    return next(tensor for tensor in tensors_of(result) if tensor.requires_grad).flatten()[0]


def _left_out(mesh: Mapping[str, int], sequence_parallel: bool) -> tuple[str, ...]:
    step = "the optimizer step"
    if sequence_parallel and mesh.get("tp", 1) > 1 and mesh.get("fsdp", 1) == 1:
        step += ", in which DTensor reduces the gradients of the norms over tp"
    return (step,)


def _check(
    mesh: Mapping[str, int],
    rank: int,
    microbatches: int,
    sequence_parallel: bool,
    device: str | torch.device | None,
) -> None:
    if not mesh or any(axis not in AXES for axis in mesh):
        raise PlanError(f"a mesh has axes from {', '.join(AXES)}, not {', '.join(mesh) or 'none'}")
    for axis, size in mesh.items():
        if size < 1:
            raise PlanError(f"axis {axis} of the mesh has {size} ranks: it takes 1 at least")
    world = math.prod(mesh.values())
    if not 0 <= rank < world:
        raise PlanError(f"rank {rank} is none of the mesh's {world:,}: they are 0 to {world - 1:,}")
    if microbatches < 1:
        raise PlanError(f"a step has 1 microbatch at least, not {microbatches}")
    if mesh.get("fsdp", 1) > 1 and (microbatches > 1 or mesh.get("pp", 1) > 1):
        raise PlanError(
            "with microbatches or stages the schedule decides when FSDP2 gathers and reduces: plan fsdp without them"
        )
    if mesh.get("fsdp", 1) > 1 and device is not None and torch.device(device).type != "cpu":
        raise PlanError(f"FSDP2 is planned with the CPU's kernels, not with those of {device}: omit the device")
    if sequence_parallel and mesh.get("pp", 1) > 1:
        raise PlanError("pipeline stages send whole sequences: plan pp without sequence_parallel")


def _coordinates(mesh: Mapping[str, int], rank: int) -> dict[str, int]:
    """Return axis → the rank's index; the last axis varies fastest."""
    places = {}
    for axis, size in reversed(list(mesh.items())):
        rank, places[axis] = divmod(rank, size)
    return {axis: places[axis] for axis in mesh}


def _make_mesh(mesh: Mapping[str, int]) -> Any:
    long = [axis for axis, size in mesh.items() if size > 1]
    if len(long) == 1:  # its group is that of all ranks, for which torch reports no axis
        default_process_group()._set_group_desc(f"mesh_{long[0]}")
    return dist.device_mesh.init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))


def _derive(
    trace: Trace,
    model: nn.Module,
    device_mesh: Any,
    mesh: Mapping[str, int],
    pipe: StageLinks | None,
    microbatches: int,
) -> tuple[Trace, tuple[str, ...]]:
    """Return a Trace with the estimated calls of a rank's step, and their descriptions."""
    added: list[Call] = []
    derived = []
    if pipe is not None:
        added += send_recv(pipe, describe(device_mesh.get_group("pp")), microbatches)
        derived.append("pipeline sends and receives over pp, once per microbatch")
    if microbatches > 1:
        trace = repeat(trace, microbatches)
        added += accumulate(trace, model, microbatches)
        derived.append(f"{microbatches} microbatches with gradient accumulation, of which one was run")
    replicas = _join(device_mesh, mesh, "dp", "cp")
    if replicas is not None and mesh.get("fsdp", 1) == 1:
        added += gradient_allreduce(trace, model, describe(replicas.get_group()), replicas.size())
        derived.append(
            f"DDP gradient averaging over {replicas.mesh_dim_names[0]} (all-reduce of each trainable parameter once, "
            "regardless of bucketing)"
        )
    return add_calls(trace, added), tuple(derived)


def _join(device_mesh: Any, mesh: Mapping[str, int], *axes: str) -> Any:
    """Return some axes flattened to a mesh of one dimension, or None where none of them has two ranks."""
    long = tuple(axis for axis in axes if mesh.get(axis, 1) > 1)
    if not long:
        return None
    return device_mesh[long[0]] if len(long) == 1 else device_mesh[long]._flatten("_".join(long))


def _keep_stage(model: nn.Module, inputs: Inputs, stage: int, count: int) -> tuple[nn.Module, Inputs, StageLinks]:
    stages = find_stages(model)
    mine, one = _copy_to_meta(model), _copy_to_meta(model)
    split_stage(mine, stages, stage, count)
    blocks: Any = one.get_submodule(stages.blocks)
    split_stage(one, stages, 0, len(blocks))
    hidden = find_hidden(one, inputs)
    if stage > 0:
        inputs = receive(model, inputs, stages, hidden)
    return mine, inputs, StageLinks(hidden, stage > 0, stage < count - 1)


def _copy_to_meta(model: nn.Module) -> nn.Module:
    """Return a copy of a model with its parameters on the meta device and its buffers' values kept."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        twin = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
        memo[id(parameter)] = twin
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach().clone()
    return copy.deepcopy(model, memo)


def _split(
    model: nn.Module, device_mesh: Any, mesh: Mapping[str, int], shard_by: Shard | None, sequence_parallel: bool
) -> nn.Module:
    if shard_by is not None:
        model = shard_by(model, device_mesh["tp"]) or model
    elif mesh.get("tp", 1) > 1:
        shard(model, device_mesh["tp"], find_sharding(model, sequence=sequence_parallel))
    if mesh.get("fsdp", 1) > 1:
        from torch.distributed.fsdp import fully_shard

        over = _join(device_mesh, mesh, "fsdp", "cp")
        if mesh.get("dp", 1) > 1:
            over = device_mesh["dp", over.mesh_dim_names[0]]
        for block in _blocks(model):
            fully_shard(block, mesh=over)
        fully_shard(model, mesh=over)
        _materialise(model)
    return model


def _blocks(model: nn.Module) -> list[nn.Module]:
    """Return the members of a model's outermost module lists, the units of FSDP2."""
    found: list[nn.Module] = []
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            found += child
        else:
            found += _blocks(child)
    return list(dict.fromkeys(found))


def _materialise(model: nn.Module) -> None:
    """Give a model's parameters uninitialised memory: FSDP2 refuses the meta device.

    The memory is never written to, so the system never allocates its pages.
    """
    model._apply(
        lambda tensor: (torch.empty_like if isinstance(tensor, nn.Parameter) else _zeros)(tensor, device="cpu")
    )


def _zeros(buffer: torch.Tensor, device: str) -> torch.Tensor:
    return torch.zeros_like(buffer, device=device) if buffer.device.type == "meta" else buffer
