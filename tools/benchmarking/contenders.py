"""Contenders: the cases, and the ways to run or to count one that are timed against each other."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from benchmarking.rounds import Run
from fvflops import FlopCountAnalysis, load_table
from fvflops.capture.run import record_call
from fvflops.capture.shapes.shape_cache import clear_cache
from fvflops.counting import TableCostModel
from fvflops.zoo import ZOO
from tests.support.schemas.torchvision_schemas import define_torchvision_schemas

Step = Literal["forward", "forward+backward"]
STEPS: tuple[Step, ...] = ("forward", "forward+backward")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model and its one input; `logits` names the field of its result, "" where the result is the tensor itself.

    `fits` says that its weights fit in memory, so that peers which need numbers can run it. `macs` are a forward run's
    in matmuls and attention, where a closed form is known.
    """

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    logits: str = ""
    fits: bool = True
    macs: int | None = None

    def build_on(self, device: str) -> nn.Module:
        """Build the model on a device, in the mode in which modules are built."""
        with torch.device(device):
            return self.build()

    def make_input(self, device: str) -> torch.Tensor:
        """Return the input on a device: zeros, which are valid token ids too."""
        return torch.zeros(self.shape, dtype=self.dtype, device=device)

    def reduce(self, result: Any) -> torch.Tensor:
        return (getattr(result, self.logits) if self.logits else result).sum()


def _build_swin_t() -> nn.Module:
    define_torchvision_schemas()
    import torchvision

    return torchvision.models.swin_t(weights=None)


def _build_llama(config: Mapping[str, Any]) -> nn.Module:
    define_torchvision_schemas()  # transformers imports torchvision where it is installed
    import transformers

    settings: dict[str, Any] = {**config, "rope_theta": 500_000.0}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))


def _llama(
    layers: int, hidden: int, heads: int, intermediate: int, tokens: int = 8192, vocabulary: int = 128_256
) -> Case:
    """Return a Llama-3 of transformers, with 8 heads of keys and values, on one sequence."""
    tokens, vocabulary = 8192, 128_256
    config = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "intermediate_size": intermediate,
        "vocab_size": vocabulary,
        "max_position_embeddings": 131_072,
    }
    of_one_layer = 2 * hidden * hidden + 2 * hidden * (8 * hidden // heads) + 3 * hidden * intermediate
    matmul_parameters = layers * of_one_layer + hidden * vocabulary
    return Case(
        build=partial(_build_llama, config),
        shape=(1, tokens),
        dtype=torch.int64,
        logits="logits",
        fits=False,
        # Attention is counted densely, as it is bounded: without a discount for the causal half.
        macs=matmul_parameters * tokens + 2 * layers * tokens * tokens * hidden,
    )


CASES: dict[str, Case] = {
    "resnet50": Case(build=ZOO["resnet50"].build, shape=(1, 3, 224, 224), macs=4_089_184_256),
    "vit_b_16": Case(build=ZOO["vit_b_16"].build, shape=(1, 3, 224, 224), macs=17_563_828_224),
    "swin_t": Case(build=_build_swin_t, shape=(1, 3, 224, 224)),
    "gpt2": Case(build=ZOO["gpt2"].build, shape=(1, 1024), dtype=torch.int64, macs=145_824_153_600),
    "llama3_8b": _llama(layers=32, hidden=4096, heads=32, intermediate=14_336),
    "llama3_70b": _llama(layers=80, hidden=8192, heads=64, intermediate=28_672),
    "llama3_405b": _llama(layers=126, hidden=16_384, heads=128, intermediate=53_248),
}


@dataclass(frozen=True, slots=True)
class Subject:
    """A model and an input on a device, and the step to make; `mode` is entered around whatever runs the model."""

    model: nn.Module
    value: torch.Tensor
    case: Case
    step: Step
    mode: Callable[[], AbstractContextManager[Any]] = nullcontext

    def run(self) -> None:
        if self.step == "forward":
            with torch.no_grad():
                self.model(self.value)
        else:
            self.case.reduce(self.model(self.value)).backward()

    def count(self) -> int:
        return count(self.model, self.value, None if self.step == "forward" else self.case.reduce)

    def clean(self) -> None:
        self.model.zero_grad(set_to_none=True)


class Subjects:
    """One case and step on every kind of device; each is built when first asked for."""

    def __init__(self, case: Case, step: Step) -> None:
        self.case = case
        self.step: Step = step

    @cached_property
    def meta(self) -> Subject:
        return self._subject(self.case.build_on("meta"), "meta")

    @cached_property
    def weightless(self) -> Subject:
        """The same model, given an input on the CPU, as by a user of fvflops."""
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
        return self._subject(self.case.build_on("cpu"), "cpu")

    def _subject(
        self, model: nn.Module, device: str, mode: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> Subject:
        model.train(self.step != "forward")
        return Subject(model, self.case.make_input(device), self.case, self.step, mode)


def count(model: nn.Module, value: torch.Tensor, loss: Callable[[Any], torch.Tensor] | None = None) -> int:
    """Return the flops of a forward run, or with a loss of forward and backward, from nothing to the number."""
    if loss is None:
        return FlopCountAnalysis(model, value).total()
    stops_at = TableCostModel(load_table("default"), "flops").stops_at
    trace = record_call(model, (value,), {}, stops_at=stops_at, execution="shapes", loss=loss)
    return FlopCountAnalysis.from_trace(trace).total()


class NoOpMode(TorchDispatchMode):
    """A dispatch mode that only passes on."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def bare(subjects: Subjects) -> Run:
    return Run(subjects.meta.run, after=subjects.meta.clean)


def no_op_mode(subjects: Subjects) -> Run:
    """The same under a mode that only passes on."""

    def run() -> None:
        with NoOpMode():
            subjects.meta.run()

    return Run(run, after=subjects.meta.clean)


def flop_counter_on_meta(subjects: Subjects) -> Run:
    return Run(partial(_count_with_torch, subjects.meta), after=subjects.meta.clean)


def flop_counter_on_fake(subjects: Subjects) -> Run:
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
    """The same, everything learnt in this process forgotten before; learnt again after, for warm ones."""
    warm = [subjects.weightless, subjects.real] if subjects.case.fits else [subjects.weightless]
    return count_cold(subjects.weightless, warm)


def count_cold(subject: Subject, warm: list[Subject]) -> Run:
    """Return a count from an empty memo, after which the subjects that other contenders count warm are counted."""
    return Run(subject.count, before=clear_cache, after=lambda: [other.count() for other in warm])


def fvflops_on_weights(subjects: Subjects) -> Run | None:
    """fvflops on the model that fvcore gets, warm."""
    return Run(subjects.real.count) if subjects.case.fits else None


CONTENDERS: dict[str, Callable[[Subjects], Run | None]] = {
    "bare": bare,
    "no-op mode": no_op_mode,
    "FlopCounterMode on meta": flop_counter_on_meta,
    "FlopCounterMode on fake": flop_counter_on_fake,
    "fvcore on weights": fvcore,
    "fvflops warm": fvflops_warm,
    "fvflops cold": fvflops_cold,
    "fvflops warm on weights": fvflops_on_weights,
}

# Which are divided by which, in the order in which the ratios are printed.
RATIOS: tuple[tuple[str, str], ...] = (
    ("fvflops warm", "bare"),
    ("fvflops cold", "bare"),
    ("FlopCounterMode on meta", "fvflops warm"),
    ("FlopCounterMode on fake", "fvflops warm"),
    ("fvcore on weights", "fvflops warm"),
    ("fvcore on weights", "fvflops warm on weights"),
    ("no-op mode", "bare"),
    ("FlopCounterMode on meta", "bare"),
    ("FlopCounterMode on fake", "bare"),
    ("fvcore on weights", "bare"),
)
