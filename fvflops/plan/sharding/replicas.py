"""Replicas of a rank: the gradients that they reduce, by collectives that are estimated, not run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fvflops.capture.recorder.tensor_specs import describe, describe_tensor
from fvflops.capture.shapes.metadata import dtype_name
from fvflops.plan.action_recording import StageModule
from fvflops.plan.fake_process_group import join_averaging
from fvflops.plan.plan_options import PlanOptions
from fvflops.plan.rank_step import Action, Call, Gradient
from fvflops.plan.sharding.optimizer_shards import Shards, divide_parameters, find_gradient_dtype
from fvflops.plan.trace_changes import allreduce, local_spec, make_signature
from fvflops.trace import TensorSpec, Value

# Kinds of actions that average gradients, and that gather parameters, by calls that are not run.
AVERAGING, GATHERING = ("allreduce", "reduce_scatter"), "all_gather"


@dataclass(frozen=True, slots=True)
class Replicas:
    """The ranks that have equal parameters, and the parameters whose gradients they reduce.

    `parameters` has the trainable ones of each stage, including experts that only one rank has (one replica).
    Gradients have the `dtype`, or the parameters' own if it is None.
    """

    group: Any
    axes: str
    parameters: tuple[tuple[Gradient, ...], ...]
    dtype: torch.dtype | None

    def shards(self) -> Shards:
        items = [item for stage in self.parameters for item in divide_parameters(stage)]
        return Shards(items, self.group)

    def estimate(
        self, device: str, stages: Sequence[StageModule], *, is_sharded: bool
    ) -> tuple[dict[Action, dict[str, Any]], list[str]]:
        """Return action → fields of its Pass (estimated calls, and gradients that they average), and a description."""
        kind = "reduce_scatter" if is_sharded else "allreduce"
        estimated: dict[Action, dict[str, Any]] = {}
        for index, stage in enumerate(stages):
            replicated = (item for item in self.parameters[index] if item.replicas > 1)
            parameters = tuple(item._replace(spec=replace(item.spec, device=device)) for item in replicated)
            gradients = tuple(item._replace(spec=with_dtype(item.spec, self.dtype)) for item in parameters)
            buffers = () if is_sharded else broadcast_buffers(stage.buffers(), device, describe(self.group))
            added = (*buffers, *calls_of(kind, gradients))
            estimated[Action(kind, index)] = {"added": added, "gradients": gradients}
            if is_sharded:
                gathered = tuple(calls_of(GATHERING, parameters))
                estimated[Action(GATHERING, index)] = {"added": gathered, "gradients": parameters}
        if is_sharded:
            text = f"sharded optimizer over {self.axes}: a reduce-scatter of all gradients and an all-gather of all "
            return estimated, [f"{text}trainable parameters a step, regardless of bucketing"]
        text = f"DDP gradient averaging over {self.axes} (all-reduce of each trainable parameter once, "
        return estimated, [f"{text}regardless of bucketing)"]


def find_replicas(stages: Sequence[StageModule], options: PlanOptions, device_mesh: Any) -> Replicas | None:
    """Return the replicas of a rank; None if it has none, or FSDP2 communicates for them."""
    replicas = None if options.is_fully_sharded else join_averaging(device_mesh, options.dense)
    if replicas is None:
        return None
    group, parameters = replicas.get_group(), []
    for index, stage in enumerate(stages):
        prefix = f"stage{index}." if len(stages) > 1 else ""
        parameters.append(tuple(_list_averaged(stage, prefix, describe(group), replicas.size())))
    dtype = find_gradient_dtype(options.gradient_dtype)
    return Replicas(group, replicas.mesh_dim_names[0], tuple(parameters), dtype)


def _list_averaged(stage: StageModule, prefix: str, group: Value, replicas: int) -> Iterator[Gradient]:
    experts = stage.experts
    divided = set() if experts is None else experts.divided_parameters
    of_experts: tuple[Value, int] = (None, 1)
    if experts is not None and experts.replicas > 1:
        of_experts = describe(experts.mesh.get_group("edp")), experts.replicas
    for name, parameter in stage.named_parameters():
        if parameter.requires_grad:
            averaged = of_experts if id(parameter) in divided else (group, replicas)
            yield Gradient(f"{prefix}{name}", local_spec(parameter), *averaged)


def with_dtype(spec: TensorSpec, dtype: torch.dtype | None) -> TensorSpec:
    """Return a spec with another dtype, itself for None."""
    return spec if dtype is None else replace(spec, dtype=dtype_name(dtype))


def calls_of(kind: str, gradients: Sequence[Gradient]) -> list[Call]:
    """Return an action's calls for gradients or gathered parameters; each group and dtype ends with its collective."""
    added: list[Call] = []
    if kind == "allreduce":  # of DDP: each gradient is scaled
        sizes = Counter[tuple[Value, str, str]]()
        for _, spec, group, replicas in gradients:
            scaled = make_signature(torch.ops.aten.mul.out, spec, self=spec, other=1 / replicas, out=spec)
            added.append((scaled, "backward", 1))
            sizes[group, spec.dtype, spec.device] += spec.numel
        for (group, dtype, device), size in sizes.items():
            added.append(allreduce(TensorSpec((size,), dtype, device), device, group))
        return added
    for (group, replicas), whole, part in _join(gradients):
        if kind == GATHERING:
            op, output, source, phase = torch.ops.c10d._allgather_base_.default, whole, part, "forward"
        else:  # each replica keeps its part of the averages
            op, output, source, phase = torch.ops.c10d._reduce_scatter_base_.default, part, whole, "backward"
            scaled = make_signature(torch.ops.aten.mul_.Tensor, whole, self=whole, other=1 / replicas)
            added.append((scaled, phase, 1))
        sent = make_signature(op, output_tensor=output, input_tensor=source, process_group=group)
        added.append((sent, phase, 1))
    return added


def count_padding(gradients: Sequence[Gradient]) -> int:
    """Return the bytes of padding in the buffers of gradients, which makes the replicas' parts equal."""
    return sum(whole.nbytes for _, whole, _ in _join(gradients)) - sum(item.spec.nbytes for item in gradients)


def _join(gradients: Iterable[Gradient]) -> Iterator[tuple[tuple[Value, int], TensorSpec, TensorSpec]]:
    """Yield the padded buffer of all gradients of each group and dtype, and the part of each replica."""
    sizes = Counter[tuple[Value, int, str, str]]()
    for _, spec, group, replicas in gradients:
        sizes[group, replicas, spec.dtype, spec.device] += spec.numel
    for (group, replicas, dtype, device), size in sizes.items():
        part = -(-size // replicas)
        whole = TensorSpec((part * replicas,), dtype, device)
        yield (group, replicas), whole, replace(whole, shape=(part,))


def broadcast_buffers(buffers: Iterable[torch.Tensor], device: str, group: Value) -> list[Call]:
    """Return the broadcasts of buffers before the forward pass, which DDP does by default (broadcast_buffers=True)."""
    sizes = Counter[str]()
    for buffer in buffers:
        sizes[describe_tensor(buffer).dtype] += buffer.numel()
    broadcast = torch.ops.c10d.broadcast_.default
    specs = [TensorSpec((size,), dtype, device) for dtype, size in sizes.items()]
    return [
        (make_signature(broadcast, tensors=(spec,), process_group=group, root_rank=0), "forward", 1) for spec in specs
    ]
