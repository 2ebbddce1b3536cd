"""The contenders: the ways to run or to count a case that are timed against each other."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from benchmarking.cases import Case, Step
from benchmarking.counting import clear_cache, count
from benchmarking.floor import list_dispatches, replay, return_fresh, return_ready
from benchmarking.rounds import Run


@dataclass(frozen=True, slots=True)
class Subject:
    """A model and an input on a device, and the step to make; `mode` is entered around whatever runs the model."""

    model: nn.Module
    value: torch.Tensor
    case: Case
    step: Step
    mode: Callable[[], AbstractContextManager[Any]] = nullcontext

    def run(self) -> None:
        """Make the step as a user would, without counting."""
        if self.step == "forward":
            with torch.no_grad():
                self.model(self.value)
        else:
            self.case.reduce(self.model(self.value)).backward()

    def count(self) -> int:
        """Count the step with fvflops."""
        return count(self.model, self.value, None if self.step == "forward" else self.case.reduce)

    def clean(self) -> None:
        """Drop the gradients."""
        self.model.zero_grad(set_to_none=True)


class Subjects:
    """One case and step on every kind of device; each is built when first asked for."""

    def __init__(self, case: Case, step: Step) -> None:
        self.case = case
        self.step: Step = step

    @cached_property
    def meta(self) -> Subject:
        """Everything on the meta device."""
        return self._subject(self.case.build_on("meta"), "meta")

    @cached_property
    def weightless(self) -> Subject:
        """The same model, given an input on the CPU: what a user of fvflops has at hand."""
        return self._subject(self.meta.model, "cpu")

    @cached_property
    def fake(self) -> Subject:
        """A model of FakeTensors that say that they are on the CPU; a copy of a real one where that fits."""
        mode = FakeTensorMode()
        if self.case.fits:  # Swin-T reads values while it is built
            with FakeCopyMode(mode):
                model = copy.deepcopy(self.real.model)
        with mode:
            if not self.case.fits:
                model = self.case.build_on("cpu")
            return self._subject(model, "cpu", lambda: mode)

    @cached_property
    def real(self) -> Subject:
        """A model with its weights in memory."""
        return self._subject(self.case.build_on("cpu"), "cpu")

    @cached_property
    def dispatches(self) -> list[Any]:
        """What each op of the step returns, as fvflops sees them: composite ops in forward, core ops in training."""
        results = list_dispatches(self.meta.run, composite=self.step == "forward")
        self.meta.clean()
        return results

    def _subject(
        self, model: nn.Module, device: str, mode: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> Subject:
        model.train(self.step != "forward")
        return Subject(model, self.case.make_input(device), self.case, self.step, mode)


class NoOpMode(TorchDispatchMode):
    """A dispatch mode that only passes on."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def bare(subjects: Subjects) -> Run:
    """The model on the meta device, and nothing else."""
    return Run(subjects.meta.run, after=subjects.meta.clean)


def no_op_mode(subjects: Subjects) -> Run:
    """The same under a mode that only passes on."""

    def run() -> None:
        with NoOpMode():
            subjects.meta.run()

    return Run(run, after=subjects.meta.clean)


def flop_counter_on_meta(subjects: Subjects) -> Run:
    """torch's FlopCounterMode over the model on the meta device."""
    return Run(partial(_count_with_torch, subjects.meta), after=subjects.meta.clean)


def flop_counter_on_fake(subjects: Subjects) -> Run:
    """torch's FlopCounterMode over the model of FakeTensors."""
    return Run(partial(_count_with_torch, subjects.fake), after=subjects.fake.clean)


def _count_with_torch(subject: Subject) -> int:
    with subject.mode(), FlopCounterMode(display=False) as counter:
        subject.run()
    return counter.get_total_flops()


def fvcore(subjects: Subjects) -> Run | None:
    """fvcore over real weights, forward only: it traces, and cannot count a backward."""
    if subjects.step != "forward" or not subjects.case.fits:
        return None
    subject = subjects.real

    def run() -> int:
        from fvcore.nn import FlopCountAnalysis

        analysis = FlopCountAnalysis(subject.model, subject.value)
        return int(analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False).total())

    return Run(run)


def fvflops_warm(subjects: Subjects) -> Run:
    """fvflops on a model without weights, which has counted it before."""
    return Run(subjects.weightless.count)


def fvflops_cold(subjects: Subjects) -> Run:
    """The same, everything learnt in this process forgotten before; learnt again after, for those that are warm."""
    warm = [subjects.weightless, subjects.real] if subjects.case.fits else [subjects.weightless]
    return count_cold(subjects.weightless, warm)


def count_cold(subject: Subject, warm: list[Subject]) -> Run:
    """Return a count from an empty memo, after which the subjects that other contenders count warm are counted."""
    return Run(subject.count, before=clear_cache, after=lambda: [other.count() for other in warm])


def fvflops_on_weights(subjects: Subjects) -> Run | None:
    """fvflops on the model that fvcore gets, warm."""
    return Run(subjects.real.count) if subjects.case.fits else None


def floor_ready(subjects: Subjects) -> Run:
    """As many dispatches, each answered with one tensor that is there already."""
    return Run(partial(return_ready, len(subjects.dispatches)))


def floor_fresh(subjects: Subjects) -> Run:
    """As many dispatches, each answered with new meta tensors of the right shapes."""
    return Run(partial(return_fresh, subjects.dispatches))


def floor_in_model(subjects: Subjects) -> Run | None:
    """The model's own Python, each of its dispatches answered with new meta tensors of the right shapes."""
    if subjects.step != "forward":  # autograd wants views that are views
        return None
    return Run(partial(replay, subjects.meta.run, subjects.dispatches))


CONTENDERS: dict[str, Callable[[Subjects], Run | None]] = {
    "bare": bare,
    "no-op mode": no_op_mode,
    "FlopCounterMode on meta": flop_counter_on_meta,
    "FlopCounterMode on fake": flop_counter_on_fake,
    "fvcore on weights": fvcore,
    "fvflops warm": fvflops_warm,
    "fvflops cold": fvflops_cold,
    "fvflops warm on weights": fvflops_on_weights,
    "floor: ready tensor": floor_ready,
    "floor: fresh tensors": floor_fresh,
    "floor: fresh tensors in the model": floor_in_model,
}

# Which are divided by which, in the order in which the ratios are printed.
RATIOS: tuple[tuple[str, str], ...] = (
    ("fvflops warm", "bare"),
    ("fvflops cold", "bare"),
    ("FlopCounterMode on meta", "fvflops warm"),
    ("FlopCounterMode on fake", "fvflops warm"),
    ("fvcore on weights", "fvflops warm"),
    ("fvcore on weights", "fvflops warm on weights"),
    ("fvflops warm", "floor: fresh tensors"),
    ("fvflops warm", "floor: fresh tensors in the model"),
    ("no-op mode", "bare"),
    ("FlopCounterMode on meta", "bare"),
    ("FlopCounterMode on fake", "bare"),
    ("fvcore on weights", "bare"),
    ("floor: ready tensor", "bare"),
    ("floor: fresh tensors", "bare"),
    ("floor: fresh tensors in the model", "bare"),
)
