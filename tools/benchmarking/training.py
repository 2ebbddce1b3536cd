"""Real training steps: overhead of recording and metering, beside other tools."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.flop_counter import FlopCounterMode

from benchmarking.contenders import NoOpMode
from fvflops import StepMeter, record
from fvflops.zoo import build
from fvflops.zoo.gpt2 import GPT2, GPT2Config


@dataclass(frozen=True, slots=True)
class Subject:
    """A model that is trained: how to build it, its batch, loss and optimizer, and on how many cores."""

    build: Callable[[], nn.Module]
    make_inputs: Callable[[], torch.Tensor]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    make_optimizer: Callable[[nn.Module], Optimizer]
    cores: int


class Trained:
    """A copy of a subject."""

    def __init__(self, subject: Subject, model: nn.Module, inputs: torch.Tensor) -> None:
        self.model, self._inputs, self._loss = copy.deepcopy(model), inputs, subject.loss
        self.optimizer = subject.make_optimizer(self.model)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self._loss(self.model(self._inputs), self._inputs).backward()
        self.optimizer.step()


def _classify(logits: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, torch.zeros(len(images), dtype=torch.int64))


def _predict(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


SUBJECTS = {
    "resnet50, batch 8": Subject(
        build=partial(build, "resnet50"),
        make_inputs=lambda: torch.randn(8, 3, 224, 224),
        loss=_classify,
        make_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9),
        cores=os.cpu_count() or 1,
    ),
    "small GPT": Subject(
        build=lambda: GPT2(GPT2Config(vocab_size=512, positions=128, width=256, layers=6, heads=4, dropout=0.0)),
        make_inputs=lambda: torch.randint(0, 512, (2, 128)),
        loss=_predict,
        make_optimizer=lambda model: torch.optim.AdamW(model.parameters(), fused=True),
        cores=1,
    ),
}


def list_runs(name: str) -> tuple[dict[str, Callable[[], None]], StepMeter]:
    """Return the steps of a subject: plain, metered, recorded, in a mode that does nothing, and by other tools."""
    subject = SUBJECTS[name]
    model, inputs = subject.build().train(), subject.make_inputs()
    trained, metered = Trained(subject, model, inputs), Trained(subject, model, inputs)
    meter = StepMeter(metered.model, optimizer=metered.optimizer)

    def run_in(make_context: Callable[[], Any]) -> None:
        with make_context():
            trained.step()

    def run_metered() -> None:
        with meter.step():
            metered.step()

    def run_recorded() -> None:
        with record(trained.model) as run:
            trained.step()
        run.total()

    return {
        "plain": trained.step,
        "metered": run_metered,
        "no-op mode": partial(run_in, NoOpMode),
        "recorded": run_recorded,
        "FlopCounterMode": partial(run_in, partial(FlopCounterMode, display=False)),
        "torch.profiler": partial(run_in, torch.profiler.profile),
    }, meter
