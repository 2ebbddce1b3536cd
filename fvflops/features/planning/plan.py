"""The plan of a distributed training step: what one rank of any world would do, found out on one machine."""

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

# A mesh's axes: stages of a pipeline, replicas (DistributedDataParallel, or together with fsdp hybrid sharding), fully
# sharded data parallelism (FSDP2), context parallelism, tensor parallelism.
AXES = ("pp", "dp", "fsdp", "cp", "tp")
Shard = Callable[[nn.Module, Any], nn.Module | None]


class PlanError(ValueError):
    """A mesh, a rank or a program for which no plan can be made."""


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What one rank does in one training step.

    `mesh` is axis → size, outermost first, `coordinates` axis → the rank's place there. `parameters` and `bytes` are
    those of the weights that the rank holds, `model_parameters` the whole model's. `trace` is its step; what in it was
    not run, and follows from a rule, is told in `derived`, and what of a step is not in it in `left_out`.
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
        """Return the flops of the step in a convention, by module, operator and phase."""
        return FlopCountAnalysis.from_trace(self.trace, table=table, warn=False)

    def communication(self) -> Communication:
        """Return what the rank communicates in the step."""
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
    """Return what one rank of a mesh does in a training step: forward and backward, by shapes, with no weights.

    `mesh` is axis → size, outermost first; the last axis' ranks are neighbours. The program plays the rank in torch's
    fake process group, so that torch's own DTensor and FSDP2 say what each rank computes and sends; what is not run is
    told in `derived`. The axes:

        dp      replicas, as DistributedDataParallel makes them (derived); with fsdp, hybrid sharding
        fsdp    FSDP2 of each member of the model's outermost module lists, and of the root
        tp      tensor parallelism: of the zoo's models and of transformers' by a known plan, of others by `shard_by`, a
                function of (model, DeviceMesh of tp); `sequence_parallel` splits the sequence between the layers too
        cp      context parallelism: each rank has a part of the sequence, and attention gathers keys and values
        pp      stages of a pipeline, of models of which it is known where they may be cut; what they pass on is derived

    `args` and `kwargs` are the inputs of one rank, with cp its part of the sequence, and of one of the `microbatches`,
    whose gradients are added up. `loss` is a function of the model's result, by default the sum of its first tensor
    that wants a gradient; `device` is the kind of device whose kernels are shown, `assume` is that of `record_call`,
    and the composite ops that `table` counts are not looked into.

    A program that has a process group already raises PlanError, as do an unknown axis and a rank out of range, and a
    model that cannot be split ShardingError. The model is left as it is.

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
    """Play one rank of a world of any size, in which nothing is sent, for as long as the context lasts."""
    if not dist.is_available():
        raise PlanError("this torch is built without torch.distributed, which knows how ranks share their work")
    if dist.is_initialized():
        raise PlanError(
            "this program has a process group, and a plan plays a world of its own: "
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
    """Empty DTensor's memory of how ops are shared: its entries name process groups, which end with their world."""
    from fvflops.torch_internals import clear_sharding_cache

    clear_sharding_cache()


def sum_of_result(result: Any) -> torch.Tensor:
    """Return the sum of the first floating tensor in a model's result, which stands for its loss."""
    for tensor in tensors_of(result):
        if tensor.requires_grad:
            return tensor.sum()
    raise PlanError(f"the model gives {type(result).__name__} without a tensor that wants a gradient: give a loss")


def _touch_result(result: Any) -> torch.Tensor:
    """Return one number of a result: with it, backward computes what it would from a gradient, and adds nothing."""
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
            "when FSDP2 gathers and reduces is the schedule's choice where there are microbatches or stages"
        )
    if mesh.get("fsdp", 1) > 1 and device is not None and torch.device(device).type != "cpu":
        raise PlanError(f"FSDP2 is planned with the CPU's kernels, not with those of {device}: leave the device out")
    if sequence_parallel and mesh.get("pp", 1) > 1:
        raise PlanError("stages pass on whole sequences here: plan pp without sequence_parallel")


def _coordinates(mesh: Mapping[str, int], rank: int) -> dict[str, int]:
    """Return axis → the place of a rank there; the last axis varies fastest."""
    places = {}
    for axis, size in reversed(list(mesh.items())):
        rank, places[axis] = divmod(rank, size)
    return {axis: places[axis] for axis in mesh}


def _make_mesh(mesh: Mapping[str, int]) -> Any:
    long = [axis for axis, size in mesh.items() if size > 1]
    if len(long) == 1:  # its group is that of all ranks, of which torch does not say the axis
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
    """Return a trace with what was not run of a rank's step, and in words what that is."""
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
    """Return the mesh of one dimension that some axes make together, or None where none of them has two ranks."""
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
    """Return a model like another, whose parameters are on the meta device and whose buffers hold their numbers."""
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
    """Return the members of a model's outermost module lists: what is gathered and freed together."""
    found: list[nn.Module] = []
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            found += child
        else:
            found += _blocks(child)
    return list(dict.fromkeys(found))


def _materialise(model: nn.Module) -> None:
    """Give a model's parameters memory that nobody touches: FSDP2 refuses the meta device, where a shape run does not.

    Pages of a new block of memory are the system's until something is written there.
    """
    model._apply(
        lambda tensor: (torch.empty_like if isinstance(tensor, nn.Parameter) else _zeros)(tensor, device="cpu")
    )


def _zeros(buffer: torch.Tensor, device: str) -> torch.Tensor:
    return torch.zeros_like(buffer, device=device) if buffer.device.type == "meta" else buffer
