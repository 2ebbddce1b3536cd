"""Record optimizer steps as the phase "optimizer", and attribute their ops to parameter groups."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from traceback import walk_stack
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fvflops.capture.recorder.recorder import Recorder
from fvflops.capture.recorder.run_position import OUTSIDE
from fvflops.capture.recorder.tensor_specs import PLAIN_TENSORS, inner_tensors
from fvflops.capture.restore.forks import undone
from fvflops.capture.restore.restore import ContainerSnapshot, restore_all
from fvflops.capture.shapes.shape_mode import ShapeMode
from fvflops.capture.shapes.shape_parameters import ShapeParameters
from fvflops.capture.shapes.shape_tensor import ShapeTensor
from fvflops.torch_internals import foreach_types, optimizer_foreach_types
from fvflops.trace import Region

# Optimizers choose foreach implementations by the types and devices of the parameters (on CUDA, not on CPU). Listing
# ShapeTensor makes shape parameters choose like the real ones; DTensor registers itself here too.
for _types in (optimizer_foreach_types, foreach_types):
    _types.append(ShapeTensor)

# Origins of a parameter and its gradient. A parameter that is not the model's has none of its own.
_ORIGINS = ("outside", "gradient")


class OptimizerStep:
    """One optimizer step, whose ops are attributed to parameter groups.

    Groups are processed one after another, so an op that reads only intermediate results belongs to the group of the
    previous op. Ops on parameters that are not the model's belong to the pseudo-module OUTSIDE; foreach ops that read
    parameters of both belong to the model.
    """

    def __init__(self, recorder: Recorder, optimizer: Optimizer, label: str, frame: FrameType) -> None:
        self.optimizer = optimizer
        self._recorder = recorder
        self._label = label
        self._frame = frame
        self._base = self._stack = recorder.thread_state().stack
        # By storage: the stack of its group, and whether its parameter is outside the model.
        self._groups: dict[int, tuple[int, bool]] = {}
        self.refresh()

    def refresh(self) -> None:
        """Update the storages of each group: parameters, their gradients and states."""
        recorder, groups, states = self._recorder, self._groups, self.optimizer.state
        storage_of, indices = recorder.storage_of, recorder.storage_indices
        all_groups = self.optimizer.param_groups
        has_outside = any(self._is_outside_model(parameter) for group in all_groups for parameter in group["params"])
        outside = recorder.stack_at(OUTSIDE) if has_outside else 0
        for number, group in enumerate(all_groups):
            region = recorder.region(Region("group", f"{self._label} {group.get('group_name', number)}"))
            owner = recorder.extend_stack(self._base, region), False
            owner_outside_model = (recorder.extend_stack(outside, region), True) if outside else owner
            for parameter in group["params"]:
                chosen = owner_outside_model if outside and self._is_outside_model(parameter) else owner
                state = states.get(parameter)
                tensors = (parameter, parameter.grad, *state.values()) if state else (parameter, parameter.grad)
                for position, tensor in enumerate(tensors):
                    origin = _ORIGINS[position] if position < 2 else "optimizer state"
                    if type(tensor) in PLAIN_TENSORS and tensor.layout is torch.strided:
                        index = indices.get(id(tensor.untyped_storage()))
                        if index is None:
                            index = storage_of(tensor, origin)
                        groups[index] = chosen
                        if recorder.storages[index][2] == "outside":
                            _set_origin(recorder, index, origin)
                    elif isinstance(tensor, torch.Tensor):
                        for index in recorder.storages_of(inner_tensors(tensor)):
                            groups[index] = chosen
                            _set_origin(recorder, index, origin)

    def is_running(self) -> bool:
        """Return whether the step is still running; torch calls no hook after a step that raised."""
        return any(frame is self._frame for frame, _ in walk_stack(sys._getframe()))

    def stack_of(self, reads: Sequence[int]) -> int:
        """Return the stack of an op of the step by the storages it reads."""
        groups = [group for index in reads if (group := self._groups.get(index)) is not None]
        if groups:
            # Prefer the group of one of the model's parameters.
            self._stack = min(groups, key=lambda group: group[1])[0]
        return self._stack

    def _is_outside_model(self, parameter: torch.Tensor) -> bool:
        modules = self._recorder.module_of_tensor  # empty without a model
        return bool(modules) and id(parameter) not in modules


def _set_origin(recorder: Recorder, index: int, origin: str) -> None:
    """Set the origin of a storage that existed before the run and whose origin is "outside" so far."""
    row = recorder.storages[index]
    if row[2] == "outside":
        recorder.storages[index] = (*row[:2], origin, *row[3:])


class OptimizerSnapshot:
    """Snapshot of optimizers in shape execution, where steps run on shape parameters and write to optimizer states.

    One-element states, such as the step count, retain their values, since optimizers read them.
    """

    def __init__(self, mode: ShapeMode, shape_parameters: ShapeParameters) -> None:
        self._mode = mode
        self._shape_parameters = shape_parameters
        self._saved: dict[int, tuple[Optimizer, ContainerSnapshot]] = {}

    def prepare(self, optimizer: Optimizer) -> None:
        """Save an optimizer, unless saved before, and replace its parameters and states by shape tensors."""
        if id(optimizer) in self._saved:
            return
        before = ContainerSnapshot()
        before.snapshot([optimizer.__dict__], objects=False)
        self._saved[id(optimizer)] = optimizer, before
        for parameter, state in list(optimizer.state.items()):
            shape_copy = self._shape_parameters.of(parameter)
            if isinstance(state, dict):
                state = {key: self._shape_state(value) for key, value in state.items()}
            optimizer.state[shape_copy] = state
        for group in optimizer.param_groups:
            group["params"] = [self._shape_parameters.of(parameter) for parameter in group["params"]]

    def restore(self) -> None:
        restore_all(((ContainerSnapshot.restore, [before for _, before in self._saved.values()]),))

    def _shape_state(self, value: Any) -> Any:
        """Return an optimizer state as shape tensors, but a one-element tensor unchanged."""
        if isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type != "meta":
            self._mode.concrete.mark_known(value)
            return value
        return self._shape_parameters.in_values(value)


@contextmanager
def optimizer_phase(recorder: Recorder, prepare: Callable[[Optimizer], None] | None = None) -> Iterator[None]:
    """Record each optimizer step while the context lasts; `prepare` is called before each.

    Ops in a closure that a step calls, as L-BFGS does, are not recorded as part of the step.
    """
    labels: dict[int, tuple[Optimizer, str]] = {}  # with the optimizers, so that ids are not reused

    def label_of(optimizer: Optimizer) -> str:
        # "SGD", then "SGD 2,": with the group's name or number, a region is called "SGD 0" or "SGD 2, 0".
        if id(optimizer) not in labels:
            previous = sum(type(other) is type(optimizer) for other, _ in labels.values())
            number = f" {previous + 1}," if previous else ""
            labels[id(optimizer)] = optimizer, type(optimizer).__name__ + number
        return labels[id(optimizer)][1]

    def on_step_start(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if not recorder.is_recording_thread():
            return None
        state = recorder.thread_state()
        state.drop_ended_steps()
        if prepare is not None:
            prepare(optimizer)
        state.active_optimizers.append(OptimizerStep(recorder, optimizer, label_of(optimizer), sys._getframe(1)))
        if not any(map(callable, (*args[1:], *kwargs.values()))):
            return None

        def without_active_steps(closure: Any) -> Any:
            def call(*inner_args: Any, **inner_kwargs: Any) -> Any:
                state = recorder.thread_state()
                steps, state.active_optimizers = state.active_optimizers, []
                try:
                    return closure(*inner_args, **inner_kwargs)
                finally:
                    state.active_optimizers = steps
                    for step in steps:
                        step.refresh()

            return call

        def wrap(value: Any) -> Any:
            return without_active_steps(value) if callable(value) else value

        return (optimizer, *map(wrap, args[1:])), {name: wrap(value) for name, value in kwargs.items()}

    def on_step_end(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not recorder.is_recording_thread():
            return
        steps = recorder.thread_state().active_optimizers
        if any(step.optimizer is optimizer for step in steps):
            while steps.pop().optimizer is not optimizer:
                pass
        recorder.is_after_pass = recorder.has_modules

    with ExitStack() as stack:
        for hook in (register_optimizer_step_pre_hook(on_step_start), register_optimizer_step_post_hook(on_step_end)):
            stack.enter_context(undone(hook.remove))
        yield
