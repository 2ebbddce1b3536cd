"""Measure time on a GPU: profiles of kernels, peaks beside datasheets, and a training step's utilisation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn

from fvflops import TrainingStepAnalysis, find_device, mfu, profile_kernels, record
from fvflops.devices.device_benchmark import measure_device
from fvflops.zoo import build
from fvflops.zoo.gpt2 import GPT2, GPT2Config
from gpu_checks.loops import make_loop
from tests.support.cuda_cases.runs import attempt


def _vit() -> tuple[nn.Module, torch.Tensor]:
    return build("vit_b_16").cuda().bfloat16(), torch.randn(32, 3, 224, 224, device="cuda", dtype=torch.bfloat16)


def _gpt2() -> tuple[nn.Module, torch.Tensor]:
    return GPT2(GPT2Config(dropout=0.0)).cuda().bfloat16(), torch.randint(0, 50257, (8, 1024), device="cuda")


def _lstm() -> tuple[nn.Module, torch.Tensor]:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.LSTM(512, 1024, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x)[0]

    return Recurrent().cuda(), torch.randn(64, 32, 512, device="cuda")


MODELS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "resnet50 × 32": lambda: (build("resnet50").cuda(), torch.randn(32, 3, 224, 224, device="cuda")),
    "vit_b_16 × 32 bf16": _vit,
    "gpt2 × 8 bf16": _gpt2,
    "LSTM × 32": _lstm,
}


def _total(result: Any) -> torch.Tensor:
    return result.float().sum()


def compare_profiles(share: int, shares: int) -> dict[str, Any]:
    """Return "model, mode" → the attribution by fvflops' kernel profile."""
    found: dict[str, Any] = {}
    for name, make in MODELS.items():
        for loss in (None, _total):
            key = f"{name}, {'forward' if loss is None else 'training'}"
            found[key] = attempt(partial(_match_kernels, make, loss))
        torch.cuda.empty_cache()
    found["vit_b_16 × 32 bf16, compiled"] = attempt(partial(_match_kernels, lambda: _compiled(_vit), None))
    return found


def _compiled(make: Callable[[], tuple[nn.Module, torch.Tensor]]) -> tuple[Any, torch.Tensor]:
    model, x = make()
    return torch.compile(model), x


def _match_kernels(make: Callable[[], tuple[Any, torch.Tensor]], loss: Any) -> dict[str, Any]:
    model, x = make()
    profile = profile_kernels(model, x, loss=loss, warmup=3, repeat=3)
    match = profile.match()
    owners = [
        (event, owner) for event, owner in zip(match.run.events, match.modules, strict=True) if event.kind == "device"
    ]
    device_ns = sum(event.duration_ns for event, _ in owners)
    steps = len(match.complete_steps())
    return {
        "share of FLOPs on events": sum(flops or 0 for flops in match.self_flops) / (profile.total() * (steps or 1)),
        "kernels": len(owners),
        "kernels launched by no op": sum(event.parent < 0 for event, _ in owners),
        "device ms a step": device_ns / 1e6 / (steps or 1),
        "device time with a module": sum(event.duration_ns for event, owner in owners if owner) / (device_ns or 1),
        "ledger": asdict(profile.ledger()),
    }


def _clock(run: Callable[[], Any], rounds: int = 10) -> float:
    """Return the median seconds of a run, by CUDA events."""
    for _ in range(3):
        run()
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return median(times)


def measure_peaks(share: int, shares: int) -> dict[str, Any]:
    """Return measured peaks beside the datasheet's."""
    listed = find_device(torch.cuda.get_device_name())
    measured = measure_device("cuda")
    matrix = {kind: [peak, listed.matrix.get(kind)] for kind, peak in measured.matrix.items()}
    return {"listed": listed.name, "matrix": matrix, "bandwidth": [measured.bandwidth, listed.bandwidth]}


def measure_utilisation(share: int, shares: int) -> dict[str, Any]:
    """Return the utilisation of GPT-2's training step: eager and compiled, by each attention kernel."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    found: dict[str, Any] = {}
    for compiled in (False, True):
        for backend in ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"):
            if compiled and backend != "FLASH_ATTENTION":
                continue
            key = f"{backend}{' compiled' if compiled else ''}"
            with sdpa_kernel(getattr(SDPBackend, backend)):
                found[key] = attempt(partial(_utilise, compiled))
            torch.cuda.empty_cache()
    return found


def _utilise(compiled: bool) -> dict[str, Any]:
    loop, counted = make_loop(compiled=compiled), make_loop()
    seconds = _clock(loop.step, 15)
    with record(counted.model, table="default") as run:
        counted.step()

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = counted.model

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return counted.loss()

    step = TrainingStepAnalysis(Whole().train(), loop.tokens, optimizer=partial(torch.optim.AdamW, fused=True))
    name = torch.cuda.get_device_name()
    return {
        "seconds": seconds,
        "macs recorded": run.macs(),
        "macs by shapes": step.macs(),
        "tokens per second": loop.tokens.numel() / seconds,
        "mfu": attempt(lambda: {"value": mfu(run, seconds=seconds, device=name, dtype="bf16")}),
    }
