"""Pipeline parallelism: split a model into stages, and find the hidden state that a stage sends to the next."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from fvflops.capture.model.meta_copy import copy_to_meta
from fvflops.capture.run import record_call
from fvflops.plan.sharding.sharding_styles import ShardingError, name_class, parallelism_of
from fvflops.text import suggest
from fvflops.trace import TensorSpec, tensors_in

# A model's arguments, positional and by keyword.
Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class PipelineStages:
    """Names of a model's modules and arguments by which it is split into pipeline stages.

    `blocks` is the module list that is divided among the stages. The modules of `first` belong to the first stage only,
    the modules of `last` to the last. Only the first stage has the argument `input_argument` of the model's forward,
    only the last has `last_arguments`, such as labels. Later stages get the hidden state as `hidden_argument`, and
    where that is a part of the sequence (sequence parallelism), the length of the whole as `length_argument`.
    """

    first: tuple[str, ...]
    blocks: str
    last: tuple[str, ...]
    input_argument: str
    hidden_argument: str
    length_argument: str = ""
    last_arguments: tuple[str, ...] = ()


def find_stages(model: nn.Module) -> PipelineStages:
    """Return how a model is split: by `zoo_parallelism`, or transformers' `_pp_plan`; ShardingError without one."""
    known = parallelism_of(model)
    if known is not None and known.stages is not None:
        return PipelineStages(*known.stages)
    stages = _read_pp_plan(model)
    if stages is None:
        raise ShardingError(
            f"no pipeline stages are known for {name_class(model)}: from Python pass split_by, a "
            f"{PipelineStages.__module__}.PipelineStages, or omit pp"
        )
    return stages


def check_stages(model: nn.Module, stages: PipelineStages) -> None:
    """Raise ShardingError for a name without a module, and in the zoo for a parameter that each stage would keep."""
    names = [name for name, _ in model.named_modules()]
    for name in (*stages.first, stages.blocks, *stages.last):
        if name not in names:
            raise ShardingError(
                f"pipeline stages of {type(model).__name__}: no module is named {name!r}{suggest(name, names)}"
            )
    if parallelism_of(model) is not None:
        within = tuple(f"{name}." for name in (*stages.first, stages.blocks, *stages.last))
        for name, _ in model.named_parameters():
            if not f"{name}.".startswith(within):
                raise ShardingError(
                    f"pipeline stages of {type(model).__name__}: each stage would keep the parameter {name}; name its "
                    "module in `first` or `last`"
                )


def find_tied(model: nn.Module, stages: PipelineStages) -> tuple[tuple[str, str], ...]:
    """Return each parameter that the first and the last stage share, as (name in the first, name in the last).

    >>> from fvflops.zoo.llama import Llama, LlamaConfig
    >>> sizes = {"vocab_size": 8, "hidden_size": 4, "intermediate_size": 8, "layers": 2, "heads": 1, "kv_heads": 1}
    >>> model = Llama(LlamaConfig(tie_embeddings=True, **sizes))
    >>> find_tied(model, find_stages(model))
    (('embed_tokens.weight', 'lm_head.weight'),)
    """

    def name_parameters(paths: Sequence[str]) -> dict[nn.Parameter, str]:
        named = ((path, model.get_submodule(path).named_parameters()) for path in paths)
        return {parameter: f"{path}.{name}" for path, parameters in named for name, parameter in parameters}

    first, last = name_parameters(stages.first), name_parameters(stages.last)
    return tuple((name, last[parameter]) for parameter, name in first.items() if parameter in last)


def _read_pp_plan(model: nn.Module) -> PipelineStages | None:
    plan: Mapping[str, Any] = getattr(model, "_pp_plan", None) or {}
    blocks = [path for path in plan if isinstance(model.get_submodule(path), nn.ModuleList)]
    if len(blocks) != 1 or "inputs_embeds" not in inspect.signature(model.forward).parameters:
        return None
    first = tuple(path for path, (inputs, _) in plan.items() if "input_ids" in inputs)
    last = tuple(path for path in plan if path not in (*first, *blocks))
    return PipelineStages(first, blocks[0], last, "input_ids", "inputs_embeds")


def divide_layers(layers: int, stages: int) -> tuple[int, ...]:
    """Return the number of layers of each stage.

    Where they cannot be divided evenly, the embedding and the head count as a layer each, as in torchtitan, and the
    first stages have one more.

    >>> divide_layers(32, 4), divide_layers(126, 16)[:2], divide_layers(5, 2)
    ((8, 8, 8, 8), (7, 8), (3, 2))
    """
    if not layers % stages:
        return (layers // stages,) * stages
    per_stage, remainder = divmod(layers + 2, stages)
    sizes = [per_stage + (stage < remainder) for stage in range(stages)]
    sizes[0] -= 1
    sizes[-1] -= 1
    return tuple(sizes)


def check_layers(name: str, layers: int, stages: int, given: Sequence[int] | None) -> None:
    """Raise ShardingError if `name` cannot be divided; `given`, if not None, has the layers of each stage.

    The first stage may have the embedding alone, and the last the head alone, as in Llama 3's training.
    """
    if given is None:
        if layers < stages:
            raise ShardingError(f"{name} has {layers} layers, too few for {stages} stages: use at most {layers}")
    elif len(given) != stages or sum(given) != layers or min(given) < 0 or min(given[1:-1], default=1) < 1:
        raise ShardingError(
            f"{name} has {layers} layers for {stages} stages, and stage_layers gives {list(given)}, a sum of "
            f"{sum(given)}: give a number of at least 1 for each stage, or 0 for the first and the last"
        )


def copy_stage(model: nn.Module, stages: PipelineStages, stage: int, counts: Sequence[int]) -> nn.Module:
    """Return a copy of one stage of a model on the meta device; `counts` has the number of blocks of each stage."""
    module_list: Any = model.get_submodule(stages.blocks)
    start = sum(counts[:stage])
    blocks: nn.Module = nn.ModuleList(list(module_list)[start : start + counts[stage]])
    replaced = {module_list: blocks}
    for path in (*(stages.first if stage > 0 else ()), *(stages.last if stage < len(counts) - 1 else ())):
        replaced[model.get_submodule(path)] = nn.Identity()
    copied = copy_to_meta(model, replaced)
    _keep_layer_types(copied.get_submodule(stages.blocks.rpartition(".")[0]), len(module_list), start)
    return copied


def _keep_layer_types(owner: Any, layers: int, start: int) -> None:
    """Rotate the types of layers to begin at `start`: transformers finds a layer's attention by its index."""
    types = getattr(getattr(owner, "config", None), "layer_types", None)
    if isinstance(types, Sequence) and len(types) == layers:
        owner.config.layer_types = [*types[start:], *types[:start]]


def name_in_stage(name: str, blocks: str, stage: int, counts: Sequence[int]) -> str:
    """Return the name that a module of the model has in a stage, "" where its block is in another stage.

    >>> [name_in_stage("layers.3.mlp", "layers", stage, (2, 2)) for stage in range(2)]
    ['', 'layers.1.mlp']
    """
    if not name.startswith(f"{blocks}."):
        return name
    index, *path = name.removeprefix(f"{blocks}.").split(".")
    local = int(index) - sum(counts[:stage])
    return ".".join((blocks, str(local), *path)) if 0 <= local < counts[stage] else ""


def find_hidden_state(first: nn.Module, inputs: Inputs) -> TensorSpec:
    """Return the hidden state that the first stage sends, found by shape execution of its forward pass."""
    trace = record_call(first, *inputs, execution="shapes")
    root = next(index for index, region in enumerate(trace.regions) if region.name == "")
    outputs = next(item.outputs for item in trace.region_signatures if item.region == root)
    return next(spec for spec in tensors_in(outputs) if spec.is_floating_point)


def make_stage_inputs(
    model: nn.Module, inputs: Inputs, stages: PipelineStages, hidden: TensorSpec | None, *, is_last: bool
) -> Inputs:
    """Return a stage's inputs except `hidden`, the hidden state that it receives, which is None for the first stage."""
    if hidden is None and (is_last or not stages.last_arguments):
        return inputs
    args, kwargs = inputs
    names = list(inspect.signature(model.forward).parameters)
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    for name in () if is_last else stages.last_arguments:
        arguments.pop(name, None)
    if hidden is None:
        return (), arguments
    replaced = arguments.pop(stages.input_argument, None)
    arguments.pop(stages.hidden_argument, None)
    if stages.length_argument and replaced is not None and replaced.shape[1] != hidden.shape[1]:
        arguments[stages.length_argument] = replaced.shape[1]
    return (), arguments
