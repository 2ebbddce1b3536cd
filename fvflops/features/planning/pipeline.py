"""Pipeline parallelism: split a model into stages, and find the hidden state that one sends to the next."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fvflops.capture.run import record_call
from fvflops.features.planning.sharding import ShardingError
from fvflops.trace import TensorSpec, tensors_in

# A model's arguments, positional and by keyword.
Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class PipelineStages:
    """Names of a model's modules and arguments by which it is split into pipeline stages.

    `blocks` is the module list that is divided among the stages. The modules of `first` belong to the first stage only,
    those of `last` to the last. `input_argument` is the argument of the model's forward that only the first stage has;
    later stages get the hidden state as `hidden_argument`.
    """

    first: tuple[str, ...]
    blocks: str
    last: tuple[str, ...]
    input_argument: str
    hidden_argument: str


STAGES: Mapping[str, PipelineStages] = {
    "fvflops.zoo.llama.Llama": PipelineStages(("embed_tokens",), "layers", ("norm", "lm_head"), "tokens", "tokens"),
}


def find_stages(model: nn.Module) -> PipelineStages:
    """Return how a model is split: a zoo model by `STAGES`, one of transformers by its `_pp_plan`.

    Any other, and one whose first and last stage would share a parameter, raises ShardingError.
    """
    name = f"{type(model).__module__}.{type(model).__qualname__}"
    stages = STAGES.get(name) or _read_pp_plan(model)
    if stages is None:
        raise ShardingError(f"no pipeline stages are known for {name}: plan it without pp")
    first = {parameter for path in stages.first for parameter in model.get_submodule(path).parameters()}
    last = {parameter for path in stages.last for parameter in model.get_submodule(path).parameters()}
    if first & last:
        raise ShardingError(f"the first and the last stage of {name} would share a parameter: plan it without pp")
    return stages


def _read_pp_plan(model: nn.Module) -> PipelineStages | None:
    plan: Mapping[str, Any] = getattr(model, "_pp_plan", None) or {}
    blocks = [path for path in plan if isinstance(model.get_submodule(path), nn.ModuleList)]
    if len(blocks) != 1 or "inputs_embeds" not in inspect.signature(model.forward).parameters:
        return None
    first = tuple(path for path, (inputs, _) in plan.items() if "input_ids" in inputs)
    last = tuple(path for path in plan if path not in (*first, *blocks))
    return PipelineStages(first, blocks[0], last, "input_ids", "inputs_embeds")


def split_stage(model: nn.Module, stages: PipelineStages, stage: int, count: int) -> None:
    """Reduce a model, in place, to one stage of `count`.

    The blocks are divided in order; where they cannot be divided evenly, the first stages have one more.
    """
    parent, _, name = stages.blocks.rpartition(".")
    module_list: Any = model.get_submodule(stages.blocks)
    blocks = list(module_list)
    if len(blocks) < count:
        raise ShardingError(f"{stages.blocks} has {len(blocks)} layers, too few for {count} stages")
    per_stage, remainder = divmod(len(blocks), count)
    start = stage * per_stage + min(stage, remainder)
    end = start + per_stage + (stage < remainder)
    setattr(model.get_submodule(parent), name, nn.ModuleList(blocks[start:end]))
    removed = (*(stages.first if stage > 0 else ()), *(stages.last if stage < count - 1 else ()))
    for path in removed:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, nn.Identity())


def find_hidden_state(first: nn.Module, inputs: Inputs) -> TensorSpec:
    """Return the hidden state that the first stage sends, found by shape execution of its forward pass."""
    trace = record_call(first, *inputs, execution="shapes")
    root = next(index for index, region in enumerate(trace.regions) if region.name == "")
    outputs = next(item.outputs for item in trace.region_signatures if item.region == root)
    return next(spec for spec in tensors_in(outputs) if spec.is_floating_point)


def make_stage_inputs(model: nn.Module, inputs: Inputs, stages: PipelineStages, hidden: TensorSpec) -> Inputs:
    """Return the inputs of a later stage, with the hidden state instead of the model's input."""
    args, kwargs = inputs
    names = list(inspect.signature(model.forward).parameters)
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    arguments.pop(stages.input_argument, None)
    arguments[stages.hidden_argument] = torch.empty(
        hidden.shape, dtype=getattr(torch, hidden.dtype), device="meta", requires_grad=True
    )
    return (), arguments
