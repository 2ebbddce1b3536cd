"""The plan of a distributed training step: what one rank of any world would do, found out on one machine."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fvflops.analysis.model_counts import FlopCountAnalysis
from fvflops.analysis.sharding import find_sharding, shard
from fvflops.capture.record import Loss, record_call
from fvflops.capture.signature import describe, describe_tensor, known_schema, tensors_of
from fvflops.formulas import FormulaTable, load_table
from fvflops.metrics.communication import read_communication
from fvflops.trace import Signature, TensorSpec, Trace, Value
from fvflops.trace.communication import Communication

# A mesh's axes, from what talks least to what talks most: replicas (DistributedDataParallel, or together with fsdp
# hybrid sharding), fully sharded data parallelism (FSDP2), tensor parallelism.
AXES = ("dp", "fsdp", "tp")
Shard = Callable[[nn.Module, Any], nn.Module | None]


class PlanError(ValueError):
    """A mesh, a rank or a program for which no plan can be made."""


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What one rank does in one training step.

    `mesh` is axis → size, outermost first, `coordinates` axis → the rank's place there. `parameters` and `bytes` are
    those of the weights that the rank holds, `model_parameters` the whole model's. `trace` is its step; what in it was
    not run, and follows from a rule, is told in `derived`.
    """

    mesh: Mapping[str, int]
    rank: int
    coordinates: Mapping[str, int]
    parameters: int
    parameter_bytes: int
    model_parameters: int
    trace: Trace
    derived: tuple[str, ...] = ()

    @property
    def world(self) -> int:
        """The number of ranks."""
        return math.prod(self.mesh.values())

    def flops(self, table: str | FormulaTable = "default") -> FlopCountAnalysis:
        """Return the flops of the step in a convention, by module, operator and phase."""
        analysis = FlopCountAnalysis.from_trace(self.trace, table=table)
        return analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False)

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
    loss: Loss | None = None,
    device: str | torch.device | None = None,
    assume: Mapping[str, Any] | None = None,
    table: str | FormulaTable = "default",
) -> RankPlan:
    """Return what one rank of a mesh does in a training step: forward and backward, by shapes, with no weights.

    `mesh` is axis → size, outermost first; the axes are "dp" (replicas), "fsdp" and "tp". `args` and `kwargs` are the
    inputs of one rank. The program plays the rank in torch's fake process group, so that torch's own DTensor and FSDP2
    say what each rank computes and sends; the gradients' exchange among replicas is derived from
    DistributedDataParallel's rule. FSDP2 is applied to each member of the model's outermost module lists and to the
    root. `tp` splits the zoo's models and those of transformers by a known plan, others by `shard_by`, a function of
    (model, DeviceMesh of "tp"); `sequence_parallel` splits the sequence between the layers too. `loss` is a function of
    the model's result, by default the sum of its first floating tensor; `device` is the kind of device whose kernels
    are shown, `table` says where composite ops are looked into.

    A program that has a process group already raises PlanError, as do an unknown axis and a rank out of range; the
    model is left as it is.

    >>> from fvflops.zoo import build
    >>> tokens = torch.ones(1, 16, dtype=torch.int64)
    >>> plan = plan_rank(build("llama_tiny", device="meta"), (tokens,), mesh={"dp": 512, "tp": 2})
    >>> plan.parameters, {route.collective: volume.calls for route, volume in plan.communication().by_route().items()}
    (62784, {'all_reduce': 1, 'all_gather': 1})
    """
    _check(mesh, rank)
    whole = sum(parameter.numel() for parameter in model.parameters())
    twin = _copy_to_meta(model)
    with pretended_world(math.prod(mesh.values()), rank):
        long = [axis for axis, size in mesh.items() if size > 1]
        if len(long) == 1:  # its group is that of all ranks, of which torch does not say the axis
            dist.distributed_c10d._get_default_group()._set_group_desc(f"mesh_{long[0]}")
        device_mesh = dist.device_mesh.init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
        twin = _split(twin, device_mesh, mesh, shard_by, sequence_parallel)
        held = [_local(parameter) for parameter in _distinct(twin)]
        trace = record_call(
            twin,
            args,
            None if kwargs is None else dict(kwargs),
            loss=loss or sum_of_result,
            execution="shapes",
            device=device,
            assume=assume,
            stops_at=(load_table(table) if isinstance(table, str) else table).stops_at,
        )
        derived: tuple[str, ...] = ()
        if mesh.get("dp", 1) > 1 and mesh.get("fsdp", 1) == 1:
            trace = _exchange(trace, twin, describe(device_mesh.get_group("dp")), mesh["dp"])
            derived = (
                "the gradients' all-reduce over dp, and what DistributedDataParallel does for it: not run, but all "
                "parameters that want a gradient go through it once, whatever the buckets",
            )
        return RankPlan(
            mesh=dict(mesh),
            rank=rank,
            coordinates=dict(zip(mesh, device_mesh.get_coordinate() or (), strict=True)),
            parameters=sum(spec.numel for spec in held),
            parameter_bytes=sum(spec.nbytes for spec in held),
            model_parameters=whole,
            trace=trace,
            derived=derived,
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
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def sum_of_result(result: Any) -> torch.Tensor:
    """Return the sum of the first floating tensor in a model's result, which stands for its loss."""
    for tensor in tensors_of(result):
        if tensor.requires_grad:
            return tensor.sum()
    raise PlanError(f"the model gives {type(result).__name__} without a tensor that wants a gradient: give a loss")


def _check(mesh: Mapping[str, int], rank: int) -> None:
    if not mesh or any(axis not in AXES for axis in mesh):
        raise PlanError(f"a mesh has axes from {', '.join(AXES)}, not {', '.join(mesh) or 'none'}")
    for axis, size in mesh.items():
        if size < 1:
            raise PlanError(f"axis {axis} of the mesh has {size} ranks: it takes 1 at least")
    world = math.prod(mesh.values())
    if not 0 <= rank < world:
        raise PlanError(f"rank {rank} is none of the mesh's {world:,}: they are 0 to {world - 1:,}")


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

        replicated = mesh.get("dp", 1) > 1
        over = device_mesh["dp", "fsdp"] if replicated else device_mesh["fsdp"]
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


def _distinct(model: nn.Module) -> list[nn.Parameter]:
    return list(model.parameters())


def _local(tensor: torch.Tensor) -> TensorSpec:
    from torch.distributed.tensor import DTensor

    return describe_tensor(tensor.to_local() if isinstance(tensor, DTensor) else tensor)


def _exchange(trace: Trace, model: nn.Module, group: Value, ranks: int) -> Trace:
    """Return a trace with what DistributedDataParallel adds to it: each gradient scaled, and all of them summed.

    Buffers are sent to all ranks before the forward run, as is its default.
    """
    scaled: Counter[Signature] = Counter()
    gradients: Counter[tuple[str, str]] = Counter()
    for parameter in _distinct(model):
        if parameter.requires_grad:
            spec = _local(parameter)
            out = TensorSpec(spec.shape, spec.dtype, trace.about["device"])
            scaled[_sign(torch.ops.aten.mul.out, out, self=out, other=1 / ranks, out=out)] += 1
            gradients[spec.dtype, out.device] += spec.numel
    buffers: Counter[tuple[str, str]] = Counter()
    for buffer in model.buffers():
        buffers[describe_tensor(buffer).dtype, trace.about["device"]] += buffer.numel()
    c10d = torch.ops.c10d
    reduced = [
        _sign(c10d.allreduce_.default, tensors=(TensorSpec((size,), *kind),), process_group=group)
        for kind, size in gradients.items()
    ]
    sent = [
        _sign(c10d.broadcast_.default, tensors=(TensorSpec((size,), *kind),), process_group=group, root_rank=0)
        for kind, size in buffers.items()
    ]
    added = [(item, "forward", 1) for item in sent] + [(item, "backward", count) for item, count in scaled.items()]
    added += [(item, "backward", 1) for item in reduced]
    start = len(trace.signatures)
    return replace(
        trace.aggregate(),
        signatures=(*trace.signatures, *(item for item, _, _ in added)),
        calls={
            **trace.calls,
            **{(start + index, 0, phase): count for index, (_, phase, count) in enumerate(added)},
        },
    )


def _sign(op: Any, *outputs: Value, **inputs: Value) -> Signature:
    schema = known_schema(op)
    values = [inputs.get(name, default) for name, default in zip(schema.names, schema.defaults, strict=True)]
    return Signature(schema.name, schema.names, tuple(values), outputs, schema.text)
