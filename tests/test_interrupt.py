"""A signal at any moment, and a second one while the first is cleaned up after, leaves nothing behind."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fvflops import FlopCountAnalysis, TrainingStepAnalysis, record
from tests import interruptions
from tests.interruptions import Block, Plain, Storm, Training, describe_model, describe_process, differences

Case = Callable[[nn.Module, torch.Tensor], int]


def by_shapes(model: nn.Module, x: torch.Tensor) -> int:
    return FlopCountAnalysis(model, x).total()


def for_real(model: nn.Module, x: torch.Tensor) -> int:
    return FlopCountAnalysis(model, x, execution="real").total()


def training_step(model: nn.Module, x: torch.Tensor) -> int:
    return TrainingStepAnalysis(model, x, optimizer=torch.optim.AdamW).total()


def recorded(model: nn.Module, x: torch.Tensor) -> int:
    with record(model) as run:
        model(x)
    return run.total()


def recorded_by_shapes(model: nn.Module, x: torch.Tensor) -> int:
    with record(model, execution="shapes") as run:
        model(run.in_shapes(x)).backward()
    return run.total()


CASES: tuple[tuple[Case, type[nn.Module]], ...] = (
    (by_shapes, Block),
    (for_real, Block),
    (by_shapes, Training),
    (for_real, Training),
    (training_step, Training),
    (recorded, Plain),
    (recorded_by_shapes, Training),
)


class Subject:
    """A model that is analysed over and over, and what it and the process looked like before."""

    def __init__(self, case: Case, make: type[nn.Module]) -> None:
        torch.manual_seed(0)
        self.case = case
        self.model = make()
        self.x = torch.rand(2, 3, 4, 4)
        # What a real recording changes of the model, it changes.
        self.changes = case is recorded
        if self.changes:
            self.model.eval()
        self.total = self.run()
        started = time.perf_counter()
        for _ in range(3):
            self.run()
        self.seconds = (time.perf_counter() - started) / 3

    def run(self) -> int:
        return self.case(self.model, self.x)

    def look(self) -> dict[str, Any]:
        told = describe_process()
        if self.changes:
            # The program's own: PyTorch's dropout and the like draw, and the model counts its calls.
            del told["random"]
            return told
        return told | describe_model(self.model)


def storm(subjects: list[Subject], signals: int, seed: int) -> tuple[list[str], Counter[str]]:
    """Send signals at random moments; return what was left, and how many came, came inside, and were lost."""
    choose = random.Random(seed)
    problems: list[str] = []
    tally: Counter[str] = Counter()
    driver = Storm()
    while tally["signals"] < signals:
        subject = choose.choice(subjects)
        burst = choose.choice((1, 1, 2, 3))
        delay = max(choose.random() * subject.seconds * 1.3, 1e-5)
        interval = choose.random() * 300e-6 + 20e-6
        before = subject.look()
        interrupted, result = driver.run(subject.run, delay, burst, interval)
        tally["signals"] += max(driver.raised, 1)
        tally["analyses"] += 1
        tally["interrupted"] += interrupted
        tally["inside"] += bool(driver.where)
        if driver.raised and not interrupted:
            tally[f"swallowed by {subject.case.__name__}"] += 1
        left = differences(before, subject.look())
        if not interrupted and result != subject.total:
            left.append(f"total {result} for {subject.total}")
        if left:
            tally["left"] += 1
            problems.append(f"{subject.case.__name__} of {type(subject.model).__name__} at {driver.where}: {left}")
            return problems, tally
    for subject in subjects:
        if subject.run() != subject.total:
            problems.append(f"{subject.case.__name__}: another total afterwards")
    if not interruptions.is_free():
        problems.append("a lock is held")
    return problems, tally
