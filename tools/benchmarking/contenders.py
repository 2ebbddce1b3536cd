"""The cases, and the ways to run or to count one that are timed against each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from benchmarking.measuring import Run
from fvflops import FlopCountAnalysis, load_table
from fvflops.capture.run import record_call
from fvflops.capture.shapes.shape_cache import clear_cache
from fvflops.counting import TableCostModel
from fvflops.zoo import ZOO
from fvflops.zoo.llama import CONFIGS, Llama

Step = Literal["forward", "forward+backward"]
STEPS: tuple[Step, ...] = ("forward", "forward+backward")


class Case(NamedTuple):
    """A model, the shape and dtype of its input, and whether its weights fit in memory, for peers that need numbers."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    fits: bool = False


def _from_zoo(name: str) -> Case:
    entry = ZOO[name]
    ((_, shape, dtype),) = entry.inputs
    return Case(entry.build, shape, getattr(torch, dtype), fits=not entry.meta)


CASES = {name: _from_zoo(name) for name in ("resnet50", "vit_b_16", "gpt2", "llama3_8b", "llama3_70b", "llama3_405b")}


def _small_llama(layers: int, tokens: int) -> Case:
    config = replace(CONFIGS["llama_tiny"], layers=layers)
    return Case(lambda: Llama(config), (1, tokens), torch.int64)


# Quantity → the sizes that it takes, and the case of a size.
GROWTHS: dict[str, tuple[tuple[int, ...], Callable[[int], Case]]] = {
    "layers": ((8, 32, 128, 512), lambda layers: _small_llama(layers, tokens=64)),
    "batch": ((1, 16, 256, 4096), lambda batch: Case(ZOO["resnet50"].build, (batch, 3, 64, 64))),
    "sequence length": ((128, 4096, 131_072), lambda tokens: _small_llama(8, tokens)),
}


def count(model: nn.Module, value: torch.Tensor, loss: Callable[[Any], torch.Tensor] | None = None) -> int:
    """Return the flops of a forward run, or with a loss of forward and backward, from nothing to the number."""
    if loss is None:
        return FlopCountAnalysis(model, value).total()
    stops_at = TableCostModel(load_table("default"), "flops").stops_at
    trace = record_call(model, (value,), {}, stops_at=stops_at, execution="shapes", loss=loss)
    return FlopCountAnalysis.from_trace(trace).total()


@dataclass(frozen=True, slots=True)
class Subject:
    """A model and an input on a device, and the step to make."""

    model: nn.Module
    value: torch.Tensor
    step: Step

    def run(self) -> None:
        if self.step == "forward":
            with torch.no_grad():
                self.model(self.value)
        else:
            self.model(self.value).sum().backward()

    def count(self) -> int:
        return count(self.model, self.value, None if self.step == "forward" else torch.sum)

    def clean(self) -> None:
        self.model.zero_grad(set_to_none=True)


@dataclass
class Subjects:
    """One case and step with its model on every kind of device; each is built when first asked for."""

    case: Case
    step: Step

    def _build(self, device: str) -> Subject:
        with torch.device(device):
            model = self.case.build().train(self.step != "forward")
            # Zeros are valid token ids too.
            return Subject(model, torch.zeros(self.case.shape, dtype=self.case.dtype), self.step)

    @cached_property
    def meta(self) -> Subject:
        return self._build("meta")

    @cached_property
    def weightless(self) -> Subject:
        """The same model, given an input on the CPU, as by a user of fvflops."""
        return replace(self.meta, value=torch.zeros(self.case.shape, dtype=self.case.dtype))

    @cached_property
    def real(self) -> Subject:
        return self._build("cpu")


class NoOpMode(TorchDispatchMode):
    """A dispatch mode that only passes on."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _run_under(make_mode: Callable[[], Any], subject: Subject) -> None:
    with make_mode():
        subject.run()


def bare(subjects: Subjects) -> Run:
    return Run(subjects.meta.run, after=subjects.meta.clean)


def _under(make_mode: Callable[[], Any], subjects: Subjects) -> Run:
    return Run(partial(_run_under, make_mode, subjects.meta), after=subjects.meta.clean)


def _fvcore(subjects: Subjects) -> Run | None:
    """fvcore over real weights, forward only: it traces, and cannot count a backward."""
    if subjects.step != "forward" or not subjects.case.fits:
        return None
    subject = subjects.real

    def run() -> None:
        from fvcore.nn import FlopCountAnalysis

        analysis = FlopCountAnalysis(subject.model, subject.value)
        analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False).total()

    return Run(run)


def fvflops_warm(subjects: Subjects) -> Run:
    """fvflops on a model without weights, which has counted it before."""
    return Run(subjects.weightless.count)


def count_cold(subject: Subject, warm: list[Subject]) -> Run:
    """Return a count from an empty cache, after which the subjects that other contenders count warm are counted."""
    return Run(subject.count, before=clear_cache, after=lambda: [other.count() for other in warm])


def _fvflops_cold(subjects: Subjects) -> Run:
    warm = [subjects.weightless, subjects.real] if subjects.case.fits else [subjects.weightless]
    return count_cold(subjects.weightless, warm)


def _fvflops_on_weights(subjects: Subjects) -> Run | None:
    """fvflops on the model that fvcore gets, warm."""
    return Run(subjects.real.count) if subjects.case.fits else None


CONTENDERS: dict[str, Callable[[Subjects], Run | None]] = {
    "bare": bare,
    "no-op mode": partial(_under, NoOpMode),
    "FlopCounterMode on meta": partial(_under, partial(FlopCounterMode, display=False)),
    "fvcore on weights": _fvcore,
    "fvflops warm": fvflops_warm,
    "fvflops cold": _fvflops_cold,
    "fvflops warm on weights": _fvflops_on_weights,
}
# Which are divided by which, in the order in which the ratios are printed.
RATIOS: tuple[tuple[str, str], ...] = (
    ("fvflops warm", "bare"),
    ("fvflops cold", "bare"),
    ("FlopCounterMode on meta", "fvflops warm"),
    ("fvcore on weights", "fvflops warm"),
    ("fvcore on weights", "fvflops warm on weights"),
    ("no-op mode", "bare"),
    ("FlopCounterMode on meta", "bare"),
    ("fvcore on weights", "bare"),
)
