"""The cases, and the ways to run or to count one that are timed against each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from benchmarking.measuring import Run
from fvflops import FlopCountAnalysis, TrainingStepAnalysis
from fvflops.capture.shapes.shape_cache import clear_cache
from fvflops.zoo import ZOO
from fvflops.zoo.llama import CONFIGS, Llama

STEPS = ("forward", "forward+backward")


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


@dataclass(frozen=True, slots=True)
class Subject:
    """A model and an input on a device, and the step to make."""

    model: nn.Module
    value: torch.Tensor
    step: str

    def run(self) -> None:
        if self.step == "forward":
            with torch.no_grad():
                self.model(self.value)
        else:
            self.model(self.value).sum().backward()

    def count(self) -> int:
        if self.step == "forward":
            return FlopCountAnalysis(self.model, self.value, warn=False).total()
        return TrainingStepAnalysis(self.model, self.value, loss=torch.sum).total()

    def bare(self, make_context: Callable[[], Any] | None = None) -> Run:
        """Return a run, in a context if one is given."""

        def run() -> None:
            if make_context is None:
                self.run()
            else:
                with make_context():
                    self.run()

        return Run(run, after=partial(self.model.zero_grad, set_to_none=True))


@dataclass
class Subjects:
    """One case and step with its model on every kind of device; each is built when first asked for."""

    case: Case
    step: str

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

    def cold(self) -> Run:
        warm = [self.weightless, self.real] if self.case.fits else [self.weightless]
        return count_cold(self.weightless, warm)


def count_cold(subject: Subject, warm: list[Subject]) -> Run:
    """Return a count from an empty cache, after which the subjects that other contenders count warm are counted."""
    return Run(subject.count, before=clear_cache, after=lambda: [other.count() for other in warm])


class NoOpMode(TorchDispatchMode):
    """A dispatch mode that only passes on."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _fvcore(subjects: Subjects) -> Run | None:
    """fvcore over real weights, forward only: it traces, and cannot count a backward."""
    if subjects.step != "forward" or not subjects.case.fits:
        return None
    from fvcore.nn import FlopCountAnalysis

    model, value = subjects.real.model, subjects.real.value
    return Run(lambda: FlopCountAnalysis(model, value).unsupported_ops_warnings(False).total())


FLOP_COUNTER_MODE = partial(FlopCounterMode, display=False)
CONTENDERS: dict[str, Callable[[Subjects], Run | None]] = {
    "bare": lambda subjects: subjects.meta.bare(),
    "no-op mode": lambda subjects: subjects.meta.bare(NoOpMode),
    "FlopCounterMode on meta": lambda subjects: subjects.meta.bare(FLOP_COUNTER_MODE),
    "fvcore on weights": _fvcore,
    "fvflops warm": lambda subjects: Run(subjects.weightless.count),
    "fvflops cold": Subjects.cold,
    "fvflops warm on weights": lambda subjects: Run(subjects.real.count) if subjects.case.fits else None,
}
# Which are divided by which, in the order in which the ratios are printed.
RATIOS = (
    ("fvflops warm", "bare"),
    ("fvflops cold", "bare"),
    ("FlopCounterMode on meta", "fvflops warm"),
    ("fvcore on weights", "fvflops warm"),
    ("fvcore on weights", "fvflops warm on weights"),
    ("no-op mode", "bare"),
)
