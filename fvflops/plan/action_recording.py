"""Record the actions of a rank's training step in shape execution; equal actions are recorded once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from fvflops.capture.model_call import loss_of
from fvflops.capture.recorder.tensor_specs import tensors_of
from fvflops.capture.restore.torch_state import model_runs
from fvflops.capture.run import Loss, choose_device
from fvflops.capture.session import Session
from fvflops.capture.shorten import Shortened
from fvflops.capture.training_step import checkpointed_calls, describe_optimizers, make_optimizer, record_run
from fvflops.plan.added_optimizers import MasterWeights
from fvflops.plan.checkpointing import make_contexts
from fvflops.plan.plan_options import PlanError, PlanOptions
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
from fvflops.plan.sharding.optimizer_shards import GradientBuffers, Shards, accumulated, shard_optimizer
from fvflops.plan.trace_changes import assign_phases, relabel_devices
from fvflops.text import truncate
from fvflops.trace import TensorSpec, Trace
from fvflops.trace.expansion.expand import Expansion

Tensor = TypeVar("Tensor", bound=torch.Tensor)

# Actions that end the step of a stage, and others of no pass, recorded after all others.
_FINAL = ("reduce", "allreduce", "reduce_scatter", "all_gather", "tied_allreduce", "optimizer")
# Actions that accumulate, reduce or clear gradients outside of autograd's engine and the optimizer → their phase.
_PHASES = {"reduce": "backward", "input_backward": "backward", "weight_backward": "backward", "optimizer": "optimizer"}


@dataclass(frozen=True, slots=True)
class StageModule:
    """A pipeline stage of a rank: its module and inputs, and the hidden states of a microbatch.

    A stage that receives hidden states gets a tensor of the spec `received` as its argument `hidden_argument`. The last
    stage has a `loss`. Without pp the whole model is the only stage. `checkpointed` are the modules whose activations
    are recomputed. `shortened` describes equal layers left out of the module, `experts` the experts of its MoE layers.
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

    def kwargs_with(self, hidden: TensorSpec | None) -> dict[str, Any]:
        """Return the keyword arguments, with a hidden state on the meta device if the stage receives one."""
        if hidden is None:
            return dict(self.kwargs)
        return {**self.kwargs, self.hidden_argument: make_tensor(hidden, "meta")}

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters of the full stage, as the rank's shards; equal layers may have the same objects."""
        return self._of_all_layers(self.module.named_parameters())

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for _, parameter in self.named_parameters()]

    def buffers(self) -> list[torch.Tensor]:
        """Return the buffers of the full stage; equal layers may have the same objects."""
        return [buffer for _, buffer in self._of_all_layers(self.module.named_buffers())]

    def _of_all_layers(self, named: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        return list(named) if self.shortened is None else self.shortened.repeat(named)


@dataclass(slots=True)
class _Graph:
    inputs: list[torch.Tensor] = field(default_factory=list)
    result: Any = None
    output: Any = None
    groups: Any = None  # parameter groups, between the two halves of a split backward pass


class _State(NamedTuple):
    """State of a stage on which its actions depend: which parameters are gathered, and whether gradients exist."""

    gathered: tuple[bool, ...]
    has_gradients: bool


class _Step(NamedTuple):
    """A recorded action: its events, and which parameters are gathered after it."""

    begin: int
    end: int
    gathered: tuple[bool, ...] = ()


def record_actions(
    stages: Sequence[StageModule],
    orders: Sequence[Sequence[Action]],
    options: PlanOptions,
    around_forward: Callable[[], AbstractContextManager[Any]],
    shards: Shards | None = None,
) -> tuple[Trace, list[dict[Action, Pass]]] | None:
    """Record the actions of a rank; return its Trace, and for each of some orders the Pass of each action.

    `around_forward` makes the context of forward passes, `shards` are the sharded optimizer's. An action's `stage` is
    an index of `stages`. The orders belong to ranks with equal stages. An action is not run again if an equal one was
    recorded in an equal state (the same parameters gathered, gradients present or not). The Trace has each action's
    first occurrence, in order, with a forward pass for each backward pass. It is the Trace of the full stages; None if
    equal layers of a shortened stage ran differently.
    """
    first, root = stages[0], stages[0].module
    is_sharded = is_fully_sharded(root)  # FSDP2 needs parameters on a device that this machine has
    if len(stages) > 1:
        root = nn.ModuleDict({f"stage{index}": stage.module for index, stage in enumerate(stages)})
    walks: list[dict[Action, _Step]] = []
    half_steps: list[tuple[int, int]] = []

    def run(session: Session) -> Mapping[str, str]:
        walks.clear()
        half_steps.clear()
        checkpointed = [item for stage in stages for item in stage.checkpointed]
        contexts = make_contexts(options.checkpoint, around_forward)
        with accumulated(root, options.gradient_dtype, is_needed=shards is not None) as buffers:
            optimizer = None if options.optimizer is None else _make_optimizer(session, root, options, shards)
            recorder = _ActionRecorder(session, stages, options, around_forward, buffers)
            with checkpointed_calls(checkpointed, {"context_fn": contexts}), torch.enable_grad(), model_runs():
                walks.extend(recorder.walk(order) for order in orders)
                recorder.finish_stages(zip(orders, walks, strict=True))
                half_steps.extend(recorder.half_steps)
            with model_runs():
                return recorder.step_optimizer(optimizer, walks)

    trace = record_run(
        root,
        (first.args, first.kwargs_with(first.received)),
        run,
        code=tuple(stage.loss for stage in stages),
        stops_at=options.stops_at,
        device=None if is_sharded else options.device,
        kernels=options.device,
        assume=options.assume,
    )
    if is_sharded and options.device is not None:
        trace = relabel_devices(trace, choose_device(options.device, ()))
    # Later events are frees, such as the graph of a forward pass without backward.
    trace = replace(trace, events=(trace.events or ())[: max(step.end for walk in walks for step in walk.values())])
    steps = {(step.begin, step.end): action.kind for walk in walks for action, step in walk.items()}
    phases = {events: _PHASES[kind] for events, kind in steps.items() if kind in _PHASES}
    trace = assign_phases(trace, {**dict.fromkeys(half_steps, "backward"), **phases})
    expansion = _expand(trace, stages)
    if expansion is None:
        return None
    at = expansion.positions
    passes = ({action: (at[step.begin], at[step.end]) for action, step in walk.items()} for walk in walks)
    return expansion.trace, [{action: Pass(expansion.trace, *ends) for action, ends in own.items()} for own in passes]


def _expand(trace: Trace, stages: Sequence[StageModule]) -> Expansion | None:
    expansion: Expansion | None = Expansion.unchanged(trace)
    for index, stage in enumerate(stages):
        if expansion is not None and stage.shortened is not None:
            further = stage.shortened.expand(expansion.trace, below=f"stage{index}" if len(stages) > 1 else "")
            expansion = None if further is None else expansion.then(further)
    return expansion


def _make_optimizer(session: Session, root: nn.Module, options: PlanOptions, shards: Shards | None) -> Optimizer:
    """Return the optimizer of a rank's modules, or of its shards of their parameters, in a paused recording."""
    assert options.optimizer is not None
    if shards is not None:
        device = next(root.parameters()).device
        return shard_optimizer(options.optimizer, shards, options.gradient_dtype, session.recorder, device=device)
    optimizer = make_optimizer(options.optimizer, root)
    if options.gradient_dtype is not None and not isinstance(optimizer, MasterWeights):
        raise PlanError("gradient_dtype is for master weights or a sharded optimizer: omit it, or add one of them")
    return optimizer


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
    """Records actions; has the steps recorded so far, and the forward passes that await their backward pass."""

    def __init__(
        self,
        session: Session,
        stages: Sequence[StageModule],
        options: PlanOptions,
        around_forward: Callable[[], AbstractContextManager[Any]],
        buffers: GradientBuffers | None,
    ) -> None:
        self._session = session
        self._stages = stages
        self._options = options
        self._buffers = buffers
        self._around_forward = around_forward
        self.half_steps: list[tuple[int, int]] = []  # first halves of backward passes, run without an action
        self._sharded = [is_fully_sharded(stage.module) for stage in stages]
        self._recorded: dict[tuple[Any, ...], _Step] = {}
        self._awaiting_backward: list[list[_Graph]] = [[] for _ in stages]  # before their backward pass
        self._awaiting_weight_gradients: list[list[_Graph]] = [[] for _ in stages]  # before their weight gradients
        self._last_states: dict[int, _State] = {}
        session.recorder.resume()
        self._inputs = [session.in_shapes((stage.args, dict(stage.kwargs))) for stage in stages]

    def walk(self, order: Iterable[Action]) -> dict[Action, _Step]:
        """Return the recorded step of each action in an order, except actions that end a stage's step."""
        modules = [(False,) * len(self._list_gathered(index)) for index in range(len(self._stages))]
        states = [_State(gathered, has_gradients=False) for gathered in modules]
        sharded = [_State(gathered, has_gradients=True) for gathered in modules]
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
                        state = self._last_states.get(action.stage, _State((), True))
                        reduce = partial(reduce_gradients, self._stages[action.stage].module)
                        # The calls of the other final actions are estimated, not run.
                        run = reduce if action.kind == "reduce" else lambda: None
                        ends[action] = self._timed(action.stage, state, run)
                    steps[action] = ends[action]

    def step_optimizer(self, optimizer: Optimizer | None, walks: Iterable[dict[Action, _Step]]) -> Mapping[str, str]:
        """Record an optimizer's step, if there is one, add it to the steps of each order, and describe it."""
        if optimizer is None:
            return describe_optimizers([])
        begin = self._session.recorder.length
        if self._buffers is not None:
            self._buffers.reduce_partial_sums()
        _step(optimizer)
        if self._buffers is not None:
            self._buffers.zero()
        step = _Step(begin, self._session.recorder.length)
        for steps in walks:
            steps[Action("optimizer", -1)] = step
        return describe_optimizers([optimizer])

    def _key(self, action: Action, state: _State) -> tuple[Any, ...]:
        if action.kind in ("forward", "backward", "weight_backward"):
            return action.kind, action.stage, state, action.kind != "forward" and self._reduces(action)
        return action.kind, action.stage, state.gathered

    def _reduces(self, action: Action) -> bool:
        """Return whether a backward pass reduces the gradients (FSDP2)."""
        if self._options.is_pipelined or not self._sharded[action.stage]:
            return False
        return self._options.reduce_each_microbatch or action.microbatch == self._options.microbatches - 1

    def _record(self, action: Action, state: _State) -> _Step:
        index = action.stage
        if action.kind == "forward":
            return self._timed(index, state, lambda: self._awaiting_backward[index].append(self._run_forward(index)))
        if action.kind in ("unshard", "reshard"):
            change = unshard if action.kind == "unshard" else reshard
            return self._timed(index, state, partial(change, self._stages[index].module))
        return self._record_backward(action, state)

    def _record_backward(self, action: Action, state: _State) -> _Step:
        index, kind = action.stage, action.kind
        module: Any = self._stages[index].module
        is_half_done = kind == "weight_backward" and bool(self._awaiting_weight_gradients[index])
        if not self._awaiting_backward[index] and not is_half_done:  # equal forward passes ran only once
            forward = Action("forward", index)
            step = self._record(forward, state)
            self._recorded.setdefault(self._key(forward, state), step)
        if kind == "weight_backward" and not is_half_done:
            begin = self._session.recorder.length
            self._run_backward("input_backward", index)
            self.half_steps.append((begin, self._session.recorder.length))
        if self._sharded[index] and self._options.is_pipelined:
            accumulate_only(module)
        elif self._sharded[index] and not self._options.reduce_each_microbatch:
            module.set_requires_gradient_sync(self._reduces(action))
        return self._timed(index, state, partial(self._run_backward, kind, index))

    def _timed(self, index: int, state: _State, run: Callable[[], object]) -> _Step:
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
            with self._paused():
                device = next(stage.module.parameters()).device
                graph.inputs = [make_tensor(stage.received, device).requires_grad_()]
            kwargs = {**kwargs, stage.hidden_argument: graph.inputs[0]}
        with self._around_forward():
            result = stage.module(*args, **kwargs)
            graph.output = _first_differentiable(result) if stage.loss is None else loss_of(result, stage.loss)
        # A pipeline stage keeps the result until its backward pass; a trainer frees it once the loss is computed.
        graph.result = result if self._options.is_pipelined else None
        return graph

    def _run_backward(self, kind: str, index: int) -> None:
        """Run a backward pass, or half of it, as a stage of torch.distributed.pipelining does."""
        if kind != "backward":
            from fvflops.torch_internals import stage_backward_input, stage_backward_weight
        stage = self._stages[index]
        awaiting = self._awaiting_weight_gradients if kind == "weight_backward" else self._awaiting_backward
        graph = awaiting[index].pop(0)
        if kind == "input_backward":
            self._awaiting_weight_gradients[index].append(graph)
            if stage.received is not None:  # else the first stage: its backward pass is not split
                output, base = graph.output, graph.output._base
                if base is not None and base.shape == output.shape:
                    output = base  # torch detaches it in place, which views refuse
                gradients = None if stage.loss is not None else [self._receive_gradient(output)]
                _, graph.groups = stage_backward_input([output], gradients, graph.inputs, stage.module.parameters())
        elif graph.groups is not None:
            stage_backward_weight(stage.module.parameters(), graph.groups)
            if self._buffers is not None:
                self._buffers.collect()
        elif stage.loss is not None:
            graph.output.backward()
        else:
            torch.autograd.backward(graph.output, self._receive_gradient(graph.output))

    def _receive_gradient(self, output: torch.Tensor) -> torch.Tensor:
        with self._paused():
            return torch.empty_like(output.detach())


def make_tensor(spec: TensorSpec, device: torch.device | str) -> torch.Tensor:
    return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=device)


def sum_of_result(result: Any) -> torch.Tensor:
    return _first_differentiable(result).sum()


def _first_differentiable(result: Any) -> torch.Tensor:
    for tensor in tensors_of(result):
        if tensor.requires_grad:
            return tensor
    raise PlanError(f"the model returns {type(result).__name__} without a tensor that requires a gradient: pass loss=")
