"""Meter a training loop, and annotate the trace that torch.profiler writes of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.nn import functional as F

from fvflops import StepMeter, annotate_trace, record
from fvflops.zoo.gpt2 import GPT2, GPT2Config
from tests.support.cuda_cases.runs import attempt


class Loop:
    """GPT-2 with fused AdamW, in bfloat16 autocast on CUDA."""

    def __init__(self, config: GPT2Config, batch: int, length: int, device: str, *, compiled: bool = False) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model = GPT2(config).to(device).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.tokens = torch.randint(0, config.vocab_size, (batch, length), device=device)
        if compiled:
            self.model.compile()

    def loss(self) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16) if self.device == "cuda" else nullcontext():
            logits = self.model(self.tokens)
            return F.cross_entropy(logits[:, :-1].flatten(0, 1), self.tokens[:, 1:].flatten())

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.loss().backward()
        self.optimizer.step()

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def make_loop(*, compiled: bool = False) -> Loop:
    """Return the loop of the page: 16 × 1,024 tokens."""
    return Loop(GPT2Config(dropout=0.0), 16, 1024, "cuda", compiled=compiled)


def measure_loops(share: int, shares: int) -> dict[str, Any]:
    """Return the cost and the figures of StepMeter, and the share of the FLOPs that an annotated trace has."""
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "metered, eager": lambda: meter_steps(make_loop()),
        "metered, compiled": lambda: meter_steps(make_loop(compiled=True)),
        "annotated, without shapes": lambda: annotate_steps(make_loop(), shapes=False),
        "annotated, with shapes": lambda: annotate_steps(make_loop(), shapes=True),
    }
    found = {}
    for name, part in parts.items():
        found[name] = attempt(part)
        torch.cuda.empty_cache()
    return found


def meter_steps(loop: Loop, rounds: int = 30, steps: int = 3) -> dict[str, Any]:
    """Return the times of rounds with and without a meter, in turn, and the meter's figures."""
    meter = StepMeter(loop.model, optimizer=loop.optimizer)

    def metered() -> None:
        with meter.step():
            loop.step()

    def clock(step: Callable[[], None]) -> float:
        loop.wait()
        begun = time.perf_counter()
        for _ in range(steps):
            step()
        loop.wait()
        return (time.perf_counter() - begun) / steps

    for step in (loop.step, metered, loop.step, metered):  # kernels are chosen, and the calls counted
        clock(step)
    pairs = [(clock(loop.step), clock(metered)) for _ in range(rounds)]
    mean, summary = meter.mean(steps * rounds), meter.summary()
    meter.close()
    assert mean is not None and summary is not None
    return {
        "plain seconds": median(plain for plain, _ in pairs),
        "metered seconds": median(seconds for _, seconds in pairs),
        "ratio": median(seconds / plain for plain, seconds in pairs),
        "figures": dict(mean.as_dict()),
        "memory predicted": summary.memory_predicted,
    }


def annotate_steps(loop: Loop, *, shapes: bool) -> dict[str, Any]:
    """Return the share of the recorded FLOPs that are on events of torch.profiler's trace, and on kernels."""
    with record(loop.model, table="exact") as run:
        loop.step()
    activities = [torch.profiler.ProfilerActivity.CPU]
    if loop.device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        with torch.profiler.profile(activities=activities, record_shapes=shapes) as profile:
            loop.step()
            loop.wait()
        profile.export_chrome_trace(str(path))
        annotated = annotate_trace(path, run.trace())
        return {
            "share": annotated.share(),
            "flops": annotated.work().flops,
            "recorded": 2 * run.macs() + sum(entry.flops for entry in run.counts().entries),
            "about": annotated.about(),
        }
