"""The modules that one rank runs: its pipeline stages, with its shards of their parameters."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from fvflops.capture.instrument.patching import Patch
from fvflops.capture.model.meta_copy import cast_floats, copy_to_meta
from fvflops.capture.model.model_index import read_modules
from fvflops.capture.recorder.tensor_specs import tensors_of
from fvflops.capture.run import choose_device
from fvflops.capture.shapes.cuda_autocast import autocast_emulated
from fvflops.capture.shorten import Shortened, find_layer_kinds, shorten
from fvflops.capture.training_step import checkpointed_modules
from fvflops.plan.action_recording import StageModule, sum_of_result
from fvflops.plan.checkpointing import find_checkpointed
from fvflops.plan.fake_process_group import join_averaging
from fvflops.plan.pipeline_schedules import rank_of_stage, stages_of_rank
from fvflops.plan.pipeline_stages import (
    Inputs,
    PipelineStages,
    check_layers,
    check_stages,
    copy_stage,
    divide_layers,
    find_hidden_state,
    find_stages,
    find_tied,
    make_stage_inputs,
    name_in_stage,
)
from fvflops.plan.plan_options import PlanError, PlanOptions
from fvflops.plan.rank_step import StageLinks
from fvflops.plan.sharding.expert_parallel import (
    DividedExperts,
    divide,
    fix_routing,
    loops_over_experts,
    without_experts,
)
from fvflops.plan.sharding.fully_sharded import autocast, materialise, shard_fully
from fvflops.plan.sharding.tensor_parallel import find_sharding, shard
from fvflops.torch_internals import all_gather_with_gradient, scaled_dot_product_attention
from fvflops.trace import TensorSpec
from fvflops.trace.expansion.layer_run import LayerRun

_ATTENTION = Patch(F, "scaled_dot_product_attention")


class RankModel:
    """A model divided by a layout, from which the stages of a rank are made, in its process group.

    `model` is the whole model, `layers` are the numbers of layers of all pipeline stages, () without pp. `cache` has
    shortened stages for other plans of the model, whose meshes, batches and checkpointing may differ.
    """

    def __init__(
        self, model: nn.Module, inputs: Inputs, options: PlanOptions, cache: dict[Hashable, ShortStage] | None = None
    ) -> None:
        precision = options.dtypes
        if precision is not None and precision.is_uniform:
            inputs = cast_floats(inputs, precision.compute)
        self.model = model
        self._inputs = inputs
        self.options = options
        self._precision = precision
        self._loss = options.loss or sum_of_result
        self._schedule, self._ranks, self._stages_per_rank = options.placement
        self._stages: PipelineStages | None = None
        self._hidden: TensorSpec | None = None
        self._whole_hidden: TensorSpec | None = None  # not divided by sequence parallelism
        self._cache = {} if cache is None else cache
        self.layers: tuple[int, ...] = ()
        self._kinds: list[int] = []  # of each layer
        if options.is_pipelined:
            self._stages = options.split_by or find_stages(model)
            check_stages(model, self._stages)
            blocks: Any = model.get_submodule(self._stages.blocks)
            self._kinds = find_layer_kinds(blocks)
            given, stages = options.stage_layers, self._ranks * self._stages_per_rank
            check_layers(self._stages.blocks, len(blocks), stages, given)
            self.layers = divide_layers(len(blocks), stages) if given is None else tuple(given)

    @property
    def tied(self) -> tuple[tuple[str, str], ...]:
        return () if self._stages is None else find_tied(self.model, self._stages)

    @cached_property
    def parameters(self) -> int:
        return read_modules(self.model).count_parameters()[""]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the pipeline stages of a rank, in the model's order."""
        index = self.options.coordinates(rank).get("pp", 0)
        return stages_of_rank(self._schedule, index, self._ranks, self._stages_per_rank)

    def describe_stages(self, rank: int) -> tuple[tuple[Any, ...], ...]:
        """Return a key, equal for equal stages."""
        return () if self._stages is None else tuple(map(self._describe_stage, self.stages_of(rank)))

    def _describe_stage(self, stage: int) -> tuple[Any, ...]:
        """Return whether a stage is the first or the last, the kinds of its layers, and which are checkpointed."""
        begin = sum(self.layers[:stage])
        kinds = tuple(self._kinds[begin : begin + self.layers[stage]]) if self.layers else ()
        return stage == 0, stage == len(self.layers) - 1, kinds, self._name_checkpointed(stage)

    def _name_checkpointed(self, stage: int) -> tuple[str, ...]:
        """Return the names, in a stage, of modules that are checkpointed by name, class or predicate in the model."""
        if self._stages is None:
            return self._checkpointed
        names = (name_in_stage(item, self._stages.blocks, stage, self.layers) for item in self._checkpointed)
        return tuple(filter(None, names))

    @cached_property
    def _checkpointed(self) -> tuple[str, ...]:
        checkpoint = self.options.checkpoint
        if isinstance(checkpoint, str):  # a policy for each stage
            return ()
        selected = {id(module) for module in checkpointed_modules(self.model, checkpoint)}
        return tuple(name for name, module in self.model.named_modules() if id(module) in selected)

    def make_stages(self, rank: int, device_mesh: Any, *, shortened: bool) -> list[StageModule]:
        """Return a rank's sharded stages, without pp the whole model; `shortened` keeps a few of their equal layers."""
        self._find_hidden(device_mesh)
        numbers = (0,) if self._stages is None else self.stages_of(rank)
        return [self._make_stage(number, device_mesh, shortened) for number in numbers]

    def _make_stage(self, number: int, device_mesh: Any, shortened: bool) -> StageModule:
        """Return a stage with the rank's shards; `shortened` keeps a few of its equal layers."""
        options = self.options
        # Names in known plans are patterns for all layers; other functions may name each layer.
        names_all = options.shard_by is not None
        stage = self._describe_inputs(number)
        # A mapping names each layer's experts.
        shortened = shortened and not isinstance(options.routing, Mapping)
        if shortened and not names_all:
            stage = self._copy_short(stage, number)
        else:
            module = self._split(self._copy(number), device_mesh) if names_all else self._copy(number)
            stage = replace(stage, module=module, checkpointed=self._find_checkpointed(module, number))
            if shortened:
                stage = self._shorten(stage, stage.received)
        module = stage.module if names_all else self._split(stage.module, device_mesh)
        experts = self._divide_experts(module, device_mesh)
        return replace(stage, module=self._shard(module, device_mesh, experts), experts=experts)

    def _describe_inputs(self, number: int) -> StageModule:
        if self._stages is None:
            return StageModule(self.model, *self._inputs, loss=self._loss)
        is_last = number == len(self.layers) - 1
        received = self._hidden if number > 0 else None
        inputs = make_stage_inputs(self.model, self._inputs, self._stages, received, is_last=is_last)
        return StageModule(self.model, *inputs, self._stages.hidden_argument, received, self._loss if is_last else None)

    def _copy(self, number: int) -> nn.Module:
        stages = self._stages
        copied = copy_to_meta(self.model) if stages is None else copy_stage(self.model, stages, number, self.layers)
        return self._with_precision(copied)

    def _copy_short(self, stage: StageModule, number: int) -> StageModule:
        """Return a stage with a copy of its modules and a few of its equal layers; equal stages are shortened once."""
        received = None if stage.received is None else self._whole_hidden
        specs = tuple((tensor.shape, tensor.dtype) for tensor in tensors_of((stage.args, stage.kwargs)))
        checkpoint = self.options.checkpoint
        policy = checkpoint if isinstance(checkpoint, str) else ""
        key = (*self._describe_stage(number), policy, specs, received)
        if key in self._cache:
            short = self._cache[key]
            module = copy_to_meta(short.module)
            checkpointed = [module.get_submodule(name) for name in short.checkpointed]
            return replace(stage, module=module, checkpointed=checkpointed, shortened=Shortened(module, short.runs))
        module = self._copy(number)
        stage = replace(stage, module=module, checkpointed=self._find_checkpointed(module, number))
        stage = self._shorten(stage, received)
        if stage.shortened is not None:
            marked = set(map(id, stage.checkpointed))
            names = tuple(name for name, item in module.named_modules() if id(item) in marked)
            self._cache[key] = ShortStage(copy_to_meta(module), stage.shortened.runs, names)
        return stage

    def _shorten(self, stage: StageModule, received: TensorSpec | None) -> StageModule:
        """Leave out equal layers of a stage that receives a hidden state, if that is possible."""
        if loops_over_experts(stage.module):
            return stage
        inputs = stage.args, stage.kwargs_with(received)
        if self._precision is not None:  # the whole parameters are not cast
            inputs = cast_floats(inputs, self._precision.parameters)
        found = shorten(stage.module, *inputs, marked=stage.checkpointed, assume=self.options.assume)
        if found is None:
            return stage
        left = {id(module) for module in stage.module.modules()}
        kept = [item for item in stage.checkpointed if id(item) in left]
        return replace(stage, shortened=found, checkpointed=kept)

    def _find_checkpointed(self, module: nn.Module, stage: int) -> list[nn.Module]:
        if isinstance(self.options.checkpoint, str):
            return find_checkpointed(module, self.options.checkpoint)
        found = dict(module.named_modules())
        here = (found.get(name) for name in self._name_checkpointed(stage))
        return [item for item in here if item is not None and not isinstance(item, nn.Identity)]  # of another stage

    def _find_hidden(self, device_mesh: Any) -> None:
        """Find the hidden state that stages send by shape execution of the first layer."""
        if self._stages is None or self._hidden is not None:
            return
        first = self._with_precision(copy_stage(self.model, self._stages, 0, (1, sum(self.layers) - 1)))
        precision = self._precision
        if self.options.is_fully_sharded and precision is not None:
            first = first.to(precision.compute)  # in which FSDP2 gathers parameters
        inputs = make_stage_inputs(self.model, self._inputs, self._stages, None, is_last=False)

        def find() -> TensorSpec:
            with autocast_emulated(), self.around_forward(device_mesh)():
                return find_hidden_state(first, inputs)

        whole = find() if self.options.sequence_parallel else None
        first = self._split(first, device_mesh)
        self._divide_experts(first, device_mesh)
        self._hidden = find()
        self._whole_hidden = whole or self._hidden

    def links(self, rank: int) -> dict[int, StageLinks]:
        """Return stage → the hidden states that it receives and sends, for the stages of a rank."""
        if self._stages is None:
            return {0: StageLinks()}
        links = {}
        for stage in self.stages_of(rank):
            source, destination = (
                rank_of_stage(self._schedule, number, self._ranks) if 0 <= number < len(self.layers) else None
                for number in (stage - 1, stage + 1)
            )
            received, sent = (None if rank is None else self._hidden for rank in (source, destination))
            links[stage] = StageLinks(received, sent, source, destination)
        return links

    def around_forward(self, device_mesh: Any) -> Callable[[], AbstractContextManager[None]]:
        """Return the factory of each forward pass's context."""
        options = self.options
        device = choose_device(options.device, ()).type

        @contextmanager
        def contexts() -> Iterator[None]:
            with ExitStack() as stack:
                if options.size("cp") > 1:
                    stack.enter_context(ShardedSequence(device_mesh.get_group("cp")))
                if not options.is_fully_sharded:
                    stack.enter_context(autocast(self._precision, device))
                yield

        return contexts

    def _with_precision(self, model: nn.Module) -> nn.Module:
        return model if self._precision is None else model.to(self._precision.parameters)

    def _shard(self, model: nn.Module, device_mesh: Any, experts: DividedExperts | None) -> nn.Module:
        options = self.options
        if options.is_fully_sharded:
            mesh = join_averaging(device_mesh, options.dense, without="dp")
            mesh = device_mesh["dp", mesh.mesh_dim_names[0]] if options.size("dp") > 1 else mesh
            again, precision = options.reshards, self._precision
            shard_fully(model, mesh, reshard_after_forward=again, precision=precision, experts=experts)
            materialise(model)
        return model

    def _split(self, model: nn.Module, device_mesh: Any) -> nn.Module:
        options = self.options
        if options.size("tp") == 1:
            return model
        if options.shard_by is not None:
            return options.shard_by(model, device_mesh["tp"]) or model
        sharding = find_sharding(model, sequence=options.sequence_parallel)
        shard(model, device_mesh["tp"], without_experts(model, sharding, options.mesh))
        return model

    def _divide_experts(self, model: nn.Module, device_mesh: Any) -> DividedExperts | None:
        """Divide and route the experts of a model's mixtures, in place; return None for a model without known ones."""
        options = self.options
        experts = divide(model, device_mesh, options.mesh, rank=dist.get_rank())
        if experts is not None:
            fix_routing(model, experts, options.mesh, options.routing)
        elif options.routing is not None:
            raise PlanError(f"no mixtures of experts are known in {type(model).__name__}: plan it without routing")
        return experts


class ShortStage(NamedTuple):
    """A shortened stage: its module, the runs of equal layers, and the names of checkpointed modules."""

    module: nn.Module
    runs: tuple[LayerRun, ...]
    checkpointed: tuple[str, ...]


class ShardedSequence(TorchFunctionMode):
    """Gather keys and values of all ranks of a process group in every attention, as a context manager.

    As in Llama 3's training (Grattafiori et al., "The Llama 3 Herd of Models", arXiv:2407.21783, section 3.3.2). All
    ranks have parts of equal length. The backward pass reduce-scatters the gradients of keys and values. A causal mask
    is wrong for the gathered keys, so the costs are right and the values are not.
    """

    def __init__(self, group: Any) -> None:
        super().__init__()
        self._group = group
        self._is_changed = False  # the call in progress

    def __enter__(self) -> ShardedSequence:
        # The kernels of CUDA are chosen in place of the attribute of F, before a mode could see the call.
        self._wrapped = _ATTENTION.wrapped(lambda attention: partial(self._call, attention))
        self._wrapped.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._wrapped.__exit__(*error)

    def attend(self, attention: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """Return the result of an attention with gathered keys and values."""
        for name in ("key", "value"):
            tensor = arguments[name]
            arguments[name] = all_gather_with_gradient(tensor, gather_dim=tensor.ndim - 2, group=self._group)
        return attention(**arguments)

    def _call(self, attention: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        self._is_changed = True
        try:
            return self.attend(attention, {**dict(zip(names, args, strict=False)), **kwargs})
        finally:
            self._is_changed = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is scaled_dot_product_attention and not self._is_changed:  # imported by the program
            return self._call(func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))
