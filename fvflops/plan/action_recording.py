"""Record the actions of a rank's training step in shape execution, equal ones once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from fvflops.capture.recorder.tensor_specs import tensors_of
from fvflops.capture.restore.torch_state import model_runs
from fvflops.capture.run import Loss, choose_device
from fvflops.capture.session import Session
from fvflops.capture.shortening.shorten import Shortened
from fvflops.capture.training_step import (
    OptimizerMaker,
    checkpointed_calls,
    describe_optimizers,
    loss_of,
    make_optimizer,
    record_run,
)
from fvflops.plan.checkpointing import Checkpoint
from fvflops.plan.layout import PlanError
from fvflops.plan.rank_step import Action, Pass
from fvflops.plan.sharding.expert_parallel import DividedExperts
from fvflops.plan.sharding.fully_sharded import (
    accumulate_only,
    is_fully_sharded,
    list_gathered,
    reduce_gradients,
    reshard,
    set_gathered,
    unshard,
)
from fvflops.plan.trace_changes import assign_backward, relabel_devices
from fvflops.text import truncate
from fvflops.trace import StopsAt, TensorSpec, Trace
from fvflops.trace.expansion.expand import Expansion

Tensor = TypeVar("Tensor", bound=torch.Tensor)

# Recorded after all others, since they end the step of a stage.
_FINAL = ("reduce", "allreduce", "tied_allreduce", "optimizer")
# They add gradients, and reduce them, outside of autograd's engine.
_WITHOUT_ENGINE = ("reduce", "input_backward", "weight_backward")


@dataclass(frozen=True, slots=True)
class StageModule:
    """A pipeline stage of a rank: its module and inputs, and the hidden states of a microbatch.

    A stage that receives gets `received` as `hidden_argument`. The last stage has a `loss`. Without pp the whole model
    is the only stage. `checkpointed` are the modules whose activations are recomputed. Of equal layers a `shortened`
    module has a few. `experts` are those of its mixtures, if it has some.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    hidden_argument: str = ""
    received: TensorSpec | None = None
    loss: Loss | None = None
    checkpointed: Sequence[nn.Module] = ()
    shortened: Shortened | None = None
    experts: DividedExperts | None = None

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters of the full stage, as shards of the rank; equal layers may have the same."""
        return self._of_all_layers(self.module.named_parameters())

    def parameters(self) -> list[nn.Parameter]:
        """Return the stage's parameters."""
        return [parameter for _, parameter in self.named_parameters()]

    def buffers(self) -> list[torch.Tensor]:
        """Return the buffers of the full stage; equal layers may have the same."""
        return [buffer for _, buffer in self._of_all_layers(self.module.named_buffers())]

    def _of_all_layers(self, named: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        return list(named) if self.shortened is None else self.shortened.repeat(named)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a step is recorded, besides its model and its order.

    `pipelined`: backward passes only accumulate gradients, which FSDP2 reduces in an action of its own; otherwise it
    reduces them in each backward pass, or with `reduce_each_microbatch` false in the last. `around_forward` makes the
    context of forward passes.
    """

    stops_at: StopsAt
    pipelined: bool = False
    reduce_each_microbatch: bool = True
    microbatches: int = 1
    optimizer: OptimizerMaker | None = None
    checkpoint: Checkpoint = ()
    checkpoint_options: Mapping[str, Any] = field(default_factory=dict)
    around_forward: Callable[[], AbstractContextManager[Any]] = nullcontext
    device: str | torch.device | None = None
    assume: Mapping[str, Any] | None = None


@dataclass(slots=True)
class _Graph:
    """A forward pass whose backward pass has not run: its inputs, its result, and its loss or the result sent on."""

    inputs: list[torch.Tensor] = field(default_factory=list)
    result: Any = None
    output: Any = None
    groups: Any = None  # of parameters, between the two halves of a split backward pass


class _State(NamedTuple):
    """What an action of a stage depends on: which parameters are gathered, and whether it has gradients."""

    gathered: tuple[bool, ...]
    has_gradients: bool


class _Step(NamedTuple):
    """A recorded action: its events, and which parameters are gathered after it."""

    begin: int
    end: int
    gathered: tuple[bool, ...] = ()


class Recording(NamedTuple):
    """The Trace of a rank, and for each order of actions the Pass of each."""

    trace: Trace
    passes: list[dict[Action, Pass]]


def record_actions(
    stages: Sequence[StageModule], orders: Sequence[Sequence[Action]], recipe: Recipe
) -> Recording | None:
    """Record the actions of a rank in some orders.

    `stage` of an action is an index of `stages`. The orders are those of ranks whose stages are equal. An action in a
    state in which its like was recorded before (the same parameters are gathered, and gradients exist or not) is not
    run again. The order in the Trace is that of the first occurrences, with a forward pass for each backward pass. It
    is the Trace of the full stages; None if equal layers of a shortened stage did not run equally.
    """
    first = stages[0]
    root = first.module
    if len(stages) > 1:
        root = nn.ModuleDict({f"stage{index}": stage.module for index, stage in enumerate(stages)})
    walks: list[dict[Action, _Step]] = []
    half_steps: list[tuple[int, int]] = []

    def run(session: Session) -> Mapping[str, str]:
        walks.clear()
        half_steps.clear()
        recorder = _ActionRecorder(session, stages, recipe, root, half_steps)
        checkpointed = [item for stage in stages for item in stage.checkpointed]
        checkpoints = checkpointed_calls(checkpointed, dict(recipe.checkpoint_options))
        with checkpoints, torch.enable_grad(), model_runs():
            walks.extend(recorder.walk(order) for order in orders)
            recorder.finish_stages(zip(orders, walks, strict=True))
        with model_runs():
            return recorder.step_optimizer(walks)

    trace = record_run(
        root,
        (first.args, {**first.kwargs, **_describe_hidden(first)}),
        run,
        code=tuple(stage.loss for stage in stages),
        stops_at=recipe.stops_at,
        # FSDP2 needs parameters in memory that this machine has.
        device=None if is_fully_sharded(first.module) else recipe.device,
        kernels=recipe.device,
        assume=recipe.assume,
    )
    if is_fully_sharded(first.module) and recipe.device is not None:
        trace = relabel_devices(trace, choose_device(recipe.device, ()))
    outside = [step for walk in walks for action, step in walk.items() if action.kind in _WITHOUT_ENGINE]
    trace = assign_backward(trace, {*half_steps, *((step.begin, step.end) for step in outside)})
    expansion = _expand(trace, stages)
    if expansion is None:
        return None
    trace, positions = expansion.trace, expansion.positions
    passes = [
        {action: Pass(trace, positions[step.begin], positions[step.end]) for action, step in walk.items()}
        for walk in walks
    ]
    return Recording(trace, passes)


def _describe_hidden(stage: StageModule) -> dict[str, torch.Tensor]:
    """Return the argument with the hidden state of a stage, for the list of its inputs."""
    if stage.received is None:
        return {}
    dtype = getattr(torch, stage.received.dtype)
    return {stage.hidden_argument: torch.empty(stage.received.shape, dtype=dtype, device="meta")}


def _expand(trace: Trace, stages: Sequence[StageModule]) -> Expansion | None:
    """Return the Trace of the full stages."""
    expansion: Expansion | None = Expansion.unchanged(trace)
    for index, stage in enumerate(stages):
        if expansion is not None and stage.shortened is not None:
            further = stage.shortened.expand(expansion.trace, below=f"stage{index}" if len(stages) > 1 else "")
            expansion = None if further is None else expansion.then(further)
    return expansion


def _step(optimizer: Optimizer) -> None:
    """Run an optimizer's step; PlanError where DTensor lacks one of its ops for sharded parameters."""
    from torch.distributed.tensor import DTensor

    try:
        optimizer.step()
    except (RuntimeError, NotImplementedError) as error:
        if not any(isinstance(item, DTensor) for group in optimizer.param_groups for item in group["params"]):
            raise
        reason = truncate(" ".join(str(error).split()).partition(". ")[0], 120)
        raise PlanError(
            f"torch's DTensor cannot run {type(optimizer).__name__}'s step, so neither can training: choose another "
            f"optimizer, such as AdamW, or a mesh of dp alone ({reason})"
        ) from error


class _ActionRecorder:
    """What a rank has done so far in a recording."""

    def __init__(
        self,
        session: Session,
        stages: Sequence[StageModule],
        recipe: Recipe,
        root: nn.Module,
        half_steps: list[tuple[int, int]],
    ) -> None:
        self._session = session
        self._half_steps = half_steps  # first halves of backward passes that are no action's
        self._stages = stages
        self._recipe = recipe
        self._optimizer = None if recipe.optimizer is None else make_optimizer(recipe.optimizer, root)
        self._sharded = [is_fully_sharded(stage.module) for stage in stages]
        self._recorded: dict[tuple[Any, ...], _Step] = {}
        self._forwarded: list[list[_Graph]] = [[] for _ in stages]  # without a backward pass
        self._half_done: list[list[_Graph]] = [[] for _ in stages]  # without the weights' gradients
        self._last_states: dict[int, _State] = {}
        session.recorder.resume()
        self._inputs = [session.in_shapes((stage.args, dict(stage.kwargs))) for stage in stages]

    def walk(self, order: Iterable[Action]) -> dict[Action, _Step]:
        """Return the recorded step of each action in an order, except of those that end a stage's step."""
        states = [_State(self._list_gathered(index), False) for index in range(len(self._stages))]
        sharded = [_State((False,) * len(state.gathered), True) for state in states]
        steps: dict[Action, _Step] = {}
        for action in order:
            if action.kind == "reduce":
                self._last_states[action.stage] = states[action.stage]
                states[action.stage] = sharded[action.stage]
            if action.kind in _FINAL:
                continue
            state = states[action.stage]
            key = self._key(action, state)
            if key not in self._recorded:
                self._recorded[key] = self._record(action, state)
            steps[action] = self._recorded[key]
            has_gradients = state.has_gradients or action.kind in ("backward", "weight_backward")
            states[action.stage] = _State(steps[action].gathered, has_gradients)
        return steps

    def finish_stages(self, walks: Iterable[tuple[Sequence[Action], dict[Action, _Step]]]) -> None:
        """Record the reductions that end the stages' steps, and add them to the steps of each order."""
        ends: dict[Action, _Step] = {}
        for order, steps in walks:
            for action in order:
                if action.kind in _FINAL and action.kind != "optimizer":
                    if action not in ends:
                        ends[action] = self._record_end(action)
                    steps[action] = ends[action]

    def _record_end(self, action: Action) -> _Step:
        state = self._last_states.get(action.stage, _State((), True))
        if action.kind == "reduce":
            return self._timed(action.stage, state, partial(reduce_gradients, self._stages[action.stage].module))
        return self._timed(action.stage, state, _do_nothing)

    def step_optimizer(self, walks: Iterable[dict[Action, _Step]]) -> Mapping[str, str]:
        """Record the optimizer's step, if there is one, add it to the steps of each order, and describe it."""
        if self._optimizer is None:
            return describe_optimizers([])
        begin = self._session.recorder.length
        _step(self._optimizer)
        step = _Step(begin, self._session.recorder.length)
        for steps in walks:
            steps[Action("optimizer", -1)] = step
        return describe_optimizers([self._optimizer])

    def _key(self, action: Action, state: _State) -> tuple[Any, ...]:
        if action.kind in ("backward", "weight_backward"):
            return action.kind, action.stage, state, self._reduces(action)
        if action.kind == "forward":
            return action.kind, action.stage, state
        return action.kind, action.stage, state.gathered

    def _reduces(self, action: Action) -> bool:
        """Return whether a backward pass reduces the gradients (FSDP2)."""
        if self._recipe.pipelined or not self._sharded[action.stage]:
            return False
        return self._recipe.reduce_each_microbatch or action.microbatch == self._recipe.microbatches - 1

    def _record(self, action: Action, state: _State) -> _Step:
        index, module = action.stage, self._stages[action.stage].module
        if action.kind == "forward":
            return self._timed(index, state, lambda: self._forwarded[index].append(self._run_forward(index)))
        if action.kind == "unshard":
            return self._timed(index, state, partial(unshard, module))
        if action.kind == "reshard":
            return self._timed(index, state, partial(reshard, module))
        return self._record_backward(action, state)

    def _record_backward(self, action: Action, state: _State) -> _Step:
        index, kind = action.stage, action.kind
        module: Any = self._stages[index].module
        # Not recorded from this state: actions of one kind run once.
        if not self._forwarded[index] and not (kind == "weight_backward" and self._half_done[index]):
            forward = Action("forward", index)
            step = self._record(forward, state)
            self._recorded.setdefault(self._key(forward, state), step)
        if kind == "weight_backward" and not self._half_done[index]:
            begin = self._session.recorder.length
            self._run_backward("input_backward", index)
            self._half_steps.append((begin, self._session.recorder.length))
        if self._sharded[index] and self._recipe.pipelined:
            accumulate_only(module)
        elif self._sharded[index] and not self._recipe.reduce_each_microbatch:
            module.set_requires_gradient_sync(self._reduces(action))
        return self._timed(index, state, partial(self._run_backward, kind, index))

    def _timed(self, index: int, state: _State, run: Callable[[], object]) -> _Step:
        """Run an action of a stage in a state; return its step."""
        if self._list_gathered(index) != state.gathered:
            set_gathered(self._stages[index].module, state.gathered)
        begin = self._session.recorder.length
        run()
        return _Step(begin, self._session.recorder.length, self._list_gathered(index))

    def _list_gathered(self, index: int) -> tuple[bool, ...]:
        return list_gathered(self._stages[index].module) if self._sharded[index] else ()

    @contextmanager
    def _paused(self) -> Iterator[None]:
        self._session.recorder.pause()
        yield
        self._session.recorder.resume()

    def _run_forward(self, index: int) -> _Graph:
        stage = self._stages[index]
        args, kwargs = self._inputs[index]
        graph = _Graph()
        if stage.received is not None:
            graph.inputs = [self._receive(stage)]
            kwargs = {**kwargs, stage.hidden_argument: graph.inputs[0]}
        with self._recipe.around_forward():
            result = stage.module(*args, **kwargs)
            graph.output = first_differentiable(result) if stage.loss is None else loss_of(result, stage.loss)
        # A pipeline's stage keeps the result until its backward pass; a trainer frees it when its loss is computed.
        graph.result = result if self._recipe.pipelined else None
        return graph

    def _receive(self, stage: StageModule) -> torch.Tensor:
        spec: Any = stage.received
        device = next(stage.module.parameters()).device
        with self._paused():
            return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=device, requires_grad=True)

    def _run_backward(self, kind: str, index: int) -> None:
        """Run a backward pass, or a half of it, as a stage of torch.distributed.pipelining."""
        if kind != "backward":
            from fvflops.torch_internals import stage_backward_input, stage_backward_weight
        stage = self._stages[index]
        graph = (self._half_done if kind == "weight_backward" else self._forwarded)[index].pop(0)
        if kind == "input_backward":
            self._half_done[index].append(graph)
            if stage.received is not None:  # else the first stage: its backward pass is not split
                output = _base_of(graph.output)
                gradients = None if stage.loss is not None else [self._receive_gradient(output)]
                _, graph.groups = stage_backward_input([output], gradients, graph.inputs, stage.module.parameters())
        elif graph.groups is not None:
            stage_backward_weight(stage.module.parameters(), graph.groups)
        elif stage.loss is not None:
            graph.output.backward()
        else:
            torch.autograd.backward(graph.output, self._receive_gradient(graph.output))

    def _receive_gradient(self, output: torch.Tensor) -> torch.Tensor:
        with self._paused():
            return torch.empty_like(output.detach())


def first_differentiable(result: Any) -> torch.Tensor:
    """Return the first tensor of a model's result that requires a gradient; ValueError if there is none."""
    for tensor in tensors_of(result):
        if tensor.requires_grad:
            return tensor
    raise ValueError(f"the model returns {type(result).__name__} without a tensor that requires a gradient: pass loss=")


def _base_of(output: torch.Tensor) -> torch.Tensor:
    """Return the base that an output aliases with equal shape, such as a slice of all: torch detaches in place.

    Models of transformers slice the hidden state for a head that the stage does not have.
    """
    base = output._base
    return output if base is None or base.shape != output.shape else base


def _do_nothing() -> None:
    """Stand in for an action whose calls are all estimated."""
