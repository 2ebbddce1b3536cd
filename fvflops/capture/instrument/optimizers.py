"""The optimizers: a step is a phase of its own, and its ops belong to a parameter group."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fvflops.capture.recorder.recorder import OUTSIDE, Recorder
from fvflops.capture.restore.forks import undone_in_child
from fvflops.capture.restore.restore import ContainerSnapshot, restore_all
from fvflops.capture.shapes.shape_mode import ShapeMode
from fvflops.capture.shapes.shape_parameters import ShapeParameters
from fvflops.capture.shapes.shape_tensor import ShapeTensor
from fvflops.torch_internals import foreach_types, is_wrapper_subclass, optimizer_foreach_types
from fvflops.trace import Region

# Whether an optimizer takes all parameters at once by default is asked of their types and devices (CUDA's, not the
# CPU's): those of a run by shapes answer as the parameters that they stand for. DTensor enters itself here too.
for _types in (optimizer_foreach_types, foreach_types):
    _types.append(ShapeTensor)


class GroupStep:
    """One step of an optimizer: which parameter group each op of it works for.

    Groups are worked through one after another, so that an op on nothing but what was just computed belongs to the
    group of the op before it. Parameters that are not the model's have an owner of their own; an op on such and on the
    model's together is the model's.
    """

    def __init__(self, recorder: Recorder, optimizer: Optimizer, label: str, frame: FrameType) -> None:
        self.optimizer = optimizer
        self._recorder = recorder
        self._label = label
        self._frame = frame
        self._base = self._stack = recorder.thread_state().stack
        self._groups: dict[int, tuple[int, bool]] = {}
        self.refresh()

    def refresh(self) -> None:
        """Note what each group works with: its parameters, their gradients and states, as they are now."""
        recorder = self._recorder
        outside = recorder.stack_at(OUTSIDE) if self._strangers(recorder) else 0
        for number, group in enumerate(self.optimizer.param_groups):
            region = recorder.region(Region("group", f"{self._label} {group.get('group_name', number)}"))
            for parameter in group["params"]:
                stranger = bool(recorder.module_of_tensor) and id(parameter) not in recorder.module_of_tensor
                stack = recorder.inside(outside if stranger else self._base, region)
                held = [("", parameter), ("gradient", parameter.grad)]
                held += [("optimizer state", value) for value in self.optimizer.state.get(parameter, {}).values()]
                for origin, tensor in held:
                    if isinstance(tensor, torch.Tensor):
                        found = _storages(recorder, tensor)
                        self._groups.update(dict.fromkeys(found, (stack, stranger)))
                        _say_origin(recorder, found, origin)

    def is_running(self) -> bool:
        """Return whether the step is still being made: one that raised tells nobody of its end."""
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame is not self._frame:
            frame = frame.f_back
        return frame is not None

    def stack_of(self, reads: Sequence[int]) -> int:
        """Return the stack of an op of the step that reads these storages."""
        found = [group for index in reads if (group := self._groups.get(index)) is not None]
        if found:
            self._stack = min(found, key=lambda group: group[1])[0]
        return self._stack

    def _strangers(self, recorder: Recorder) -> bool:
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        return bool(recorder.module_of_tensor) and any(
            id(parameter) not in recorder.module_of_tensor for parameter in parameters
        )


def _storages(recorder: Recorder, tensor: torch.Tensor) -> list[int]:
    """Return the numbers of the storages of a tensor, or of those inside a wrapper such as a DTensor."""
    if is_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        inner = [getattr(tensor, name) for name in names]
        return [index for item in inner if isinstance(item, torch.Tensor) for index in _storages(recorder, item)]
    return list(recorder.storages_of((tensor,)))


def _say_origin(recorder: Recorder, storages: Sequence[int], origin: str) -> None:
    """Say of storages that existed before the run, and of which no more is known, that a parameter's work held them."""
    for index in storages:
        row = recorder.storages[index]
        if origin and row[2] == "outside":
            recorder.storages[index] = (*row[:2], origin, *row[3:])


class OptimizerStates:
    """What optimizers held before a run by shapes, in which their steps write shape tensors into their states.

    They step on what stands for their parameters in the run. Numbers of one element, such as how many steps there were,
    count as known, since optimizers look at them.
    """

    def __init__(self, mode: ShapeMode, stand_ins: ShapeParameters) -> None:
        self._mode = mode
        self._stand_ins = stand_ins
        self._kept: dict[int, tuple[Optimizer, ContainerSnapshot]] = {}

    def prepare(self, optimizer: Optimizer) -> None:
        """Note what an optimizer holds, and let it step on stand-ins."""
        if id(optimizer) in self._kept:
            return
        before = ContainerSnapshot()
        before.watch([optimizer.__dict__], objects=False)
        self._kept[id(optimizer)] = optimizer, before
        for parameter, state in list(optimizer.state.items()):
            twin = self._stand_ins.of(parameter)
            held = {key: self._known(value) for key, value in state.items()} if isinstance(state, dict) else state
            optimizer.state[twin] = held
        for group in optimizer.param_groups:
            group["params"] = [self._stand_ins.of(parameter) for parameter in group["params"]]

    def restore(self) -> None:
        """Put back what the optimizers held."""
        restore_all(((ContainerSnapshot.restore, [before for _, before in self._kept.values()]),))

    def _known(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type != "meta":
            self._mode.reals.mark_known(value)
            return value
        return self._stand_ins.in_values(value)


@contextmanager
def optimizer_phase(recorder: Recorder, prepare: Callable[[Optimizer], None] | None = None) -> Iterator[None]:
    """Tell a recorder of each optimizer's step for as long as the context lasts; `prepare` is called before each.

    What a closure does that the step calls, as L-BFGS does, is not the step's; the gradients that it makes are.
    """
    labels: dict[int, str] = {}
    kept: list[Optimizer] = []  # so that no other gets its id

    def label_of(optimizer: Optimizer) -> str:
        if id(optimizer) not in labels:
            same = sum(type(other) is type(optimizer) for other in kept)
            kept.append(optimizer)
            labels[id(optimizer)] = type(optimizer).__name__ + (f" {same + 1}," if same else "")
        return labels[id(optimizer)]

    def begin(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if not recorder.is_recording_thread():
            return None
        strand = recorder.thread_state()
        strand.drop_ended_steps()
        if prepare is not None:
            prepare(optimizer)
        strand.active_optimizers.append(GroupStep(recorder, optimizer, label_of(optimizer), sys._getframe(1)))
        closures = [value for value in (*args[1:], *kwargs.values()) if callable(value)]
        if not closures:
            return None

        def outside_the_step(closure: Any) -> Any:
            def call(*inner_args: Any, **inner_kwargs: Any) -> Any:
                strand = recorder.thread_state()
                steps, strand.active_optimizers = strand.active_optimizers, []
                try:
                    return closure(*inner_args, **inner_kwargs)
                finally:
                    strand.active_optimizers = steps
                    for step in steps:
                        step.refresh()

            return call

        changed = tuple(outside_the_step(value) if value in closures else value for value in args[1:])
        named = {name: outside_the_step(value) if value in closures else value for name, value in kwargs.items()}
        return (optimizer, *changed), named

    def end(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not recorder.is_recording_thread():
            return
        strand = recorder.thread_state()
        if any(step.optimizer is optimizer for step in strand.active_optimizers):
            while strand.active_optimizers.pop().optimizer is not optimizer:
                pass

    with ExitStack() as stack:
        for hook in (register_optimizer_step_pre_hook(begin), register_optimizer_step_post_hook(end)):
            stack.callback(hook.remove)
            stack.enter_context(undone_in_child(hook.remove))
        yield
