"""Replicas of a pipeline stage: the gradients that they average, and the calls by which they do, which are not run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from fvflops.capture.recorder.tensor_specs import describe, describe_tensor
from fvflops.plan.action_recording import StageModule
from fvflops.plan.fake_process_group import join_axes
from fvflops.plan.plan_options import PlanOptions
from fvflops.plan.rank_step import Action, Call, Gradient
from fvflops.plan.trace_changes import allreduce, local_spec, make_signature
from fvflops.trace import TensorSpec, Value


def estimate_averages(
    device: str, stages: Sequence[StageModule], options: PlanOptions, device_mesh: Any
) -> tuple[dict[Action, dict[str, Any]], list[str]]:
    """Return the Pass' calls of DistributedDataParallel and the gradients that it averages, and a description."""
    replicas = None if options.is_fully_sharded else join_axes(device_mesh, options.dense, "dp", "cp")
    if replicas is None:
        return {}, []
    group = describe(replicas.get_group())
    averaged: dict[Action, dict[str, Any]] = {}
    for index, stage in enumerate(stages):
        prefix = f"stage{index}." if len(stages) > 1 else ""
        gradients = tuple(_list_averaged(stage, prefix, device, group, replicas.size()))
        added = (*broadcast_buffers(stage.buffers(), device, group), *average_gradients(gradients))
        averaged[Action("allreduce", index)] = {"added": added, "gradients": gradients}
    description = (
        f"DDP gradient averaging over {replicas.mesh_dim_names[0]} (all-reduce of each trainable parameter once, "
        "regardless of bucketing)"
    )
    return averaged, [description]


def _list_averaged(stage: StageModule, prefix: str, device: str, group: Value, replicas: int) -> Iterator[Gradient]:
    """Yield the gradients that replicas of a stage average: dense ones, then the experts'."""
    experts = stage.experts
    divided = set() if experts is None else experts.divided_parameters
    of_experts = None
    if experts is not None and experts.replicas > 1:
        of_experts = describe(experts.mesh.get_group("edp")), experts.replicas
    for name, parameter in stage.named_parameters():
        averaged = of_experts if id(parameter) in divided else (group, replicas)
        if parameter.requires_grad and averaged is not None:
            yield Gradient(f"{prefix}{name}", replace(local_spec(parameter), device=device), *averaged)


def average_gradients(gradients: Iterable[Gradient]) -> list[Call]:
    """Return the calls of DDP: each gradient scaled, then an all-reduce for each group and dtype."""
    sizes = Counter[tuple[Value, str, str]]()
    added: list[Call] = []
    for _, spec, group, replicas in gradients:
        scaled = make_signature(torch.ops.aten.mul.out, spec, self=spec, other=1 / replicas, out=spec)
        added.append((scaled, "backward", 1))
        sizes[group, spec.dtype, spec.device] += spec.numel
    for (group, dtype, device), size in sizes.items():
        added.append(allreduce(TensorSpec((size,), dtype, device), device, group))
    return added


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
