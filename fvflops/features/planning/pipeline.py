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
    "fvflops.zoo.megatron_gpt.MegatronGPT": PipelineStages(
        ("embedding", "embedding_dropout"), "layers", ("head",), "tokens", "tokens"
    ),
    "fvflops.zoo.mpt.MPT": PipelineStages(("embedding",), "blocks", ("head",), "tokens", "tokens"),
}


def find_stages(model: nn.Module) -> PipelineStages:
    """Return how a model is split: a zoo model by `STAGES`, one of transformers by its `_pp_plan`.

    Any other raises ShardingError.
    """
    name = f"{type(model).__module__}.{type(model).__qualname__}"
    stages = STAGES.get(name) or _read_pp_plan(model)
    if stages is None:
        raise ShardingError(f"no pipeline stages are known for {name}: plan it without pp")
    return stages


def find_tied(model: nn.Module, stages: PipelineStages) -> dict[str, str]:
    """Return the parameters that the first and the last stage share: the name in the first → the name in the last.

    >>> from fvflops.zoo import build
    >>> find_tied(model := build("mpt_tiny", device="meta"), find_stages(model))
    {'embedding.wte.weight': 'head.lm_head.weight'}
    """

    def names(paths: tuple[str, ...]) -> dict[nn.Parameter, str]:
        return {
            parameter: f"{path}.{name}"
            for path in paths
            for name, parameter in model.get_submodule(path).named_parameters()
        }

    first, last = names(stages.first), names(stages.last)
    return {name: last[parameter] for parameter, name in first.items() if parameter in last}


def _read_pp_plan(model: nn.Module) -> PipelineStages | None:
    plan: Mapping[str, Any] = getattr(model, "_pp_plan", None) or {}
    blocks = [path for path in plan if isinstance(model.get_submodule(path), nn.ModuleList)]
    if len(blocks) != 1 or "inputs_embeds" not in inspect.signature(model.forward).parameters:
        return None
    first = tuple(path for path, (inputs, _) in plan.items() if "input_ids" in inputs)
    last = tuple(path for path in plan if path not in (*first, *blocks))
    return PipelineStages(first, blocks[0], last, "input_ids", "inputs_embeds")


class AbsentModule(nn.Identity):
    """A module of another stage: returns its first argument, whatever else it gets, such as the labels."""

    def forward(self, input: Any, *_: Any, **__: Any) -> Any:
        return input


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
        setattr(model.get_submodule(parent), name, AbsentModule())


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
