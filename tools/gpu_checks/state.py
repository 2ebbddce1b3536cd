"""See leftovers of an analysis on CUDA: memory, random state, a context, settings, hooks and modes."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import threading
from typing import Any

import torch
from torch import nn

from fvflops import FlopCountAnalysis, ProfileAnalysis, TrainingStepAnalysis, predict_memory, record
from tests.support.cuda_cases.runs import attempt
from tests.support.installed_patches import installed

_ON_CPU = """
import torch
from torch import nn
from fvflops import FlopCountAnalysis, TrainingStepAnalysis, predict_memory, flop_count_table, ByteCountAnalysis, record
from fvflops.zoo import build
model, x = build("resnet50"), torch.randn(2, 3, 224, 224)
flop_count_table(FlopCountAnalysis(model, x))
ByteCountAnalysis(model, x).total()
step = TrainingStepAnalysis(model, x, loss=torch.sum, optimizer=torch.optim.AdamW)
predict_memory(step)
FlopCountAnalysis(nn.Linear(3, 3), torch.ones(2, 3), execution="real").total()
with record(nn.Linear(3, 3)) as run:
    nn.Linear(3, 3)(torch.ones(2, 3)).sum().backward()
print(torch.cuda.is_initialized())
FlopCountAnalysis(model, x, device="cuda", execution="shapes").total()
print(torch.cuda.is_initialized())
"""


def _net() -> nn.Module:
    layers = [
        *(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Dropout(0.5), nn.Flatten(), nn.Linear(16 * 900, 10)),
    ]
    return nn.Sequential(*layers).cuda().train()


def _look(model: nn.Module) -> dict[str, Any]:
    torch.cuda.synchronize()
    gc.collect()
    return {
        "allocated": torch.cuda.memory_allocated(),
        "random": torch.cuda.get_rng_state().sum().item(),
        "cpu random": torch.get_rng_state().sum().item(),
        "state": [item.double().sum().item() for item in model.state_dict().values()],
        "gradients": [None if item.grad is None else item.grad.sum().item() for item in model.parameters()],
        "installed": {key: str(value) for key, value in installed().items()},
        "device": torch.cuda.current_device(),
        "tf32": torch.backends.cuda.matmul.allow_tf32,
        "cudnn": [torch.backends.cudnn.benchmark, torch.backends.cudnn.enabled],
    }


class _Stops(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.model(x)
        raise KeyError("in the midst")


def look_at_state(share: int, shares: int) -> dict[str, Any]:
    """Return action → its leftovers, or "" for nothing."""
    found: dict[str, Any] = {}
    printed = subprocess.run([sys.executable, "-c", _ON_CPU], capture_output=True, text=True)
    found["a CUDA context after counts on the CPU, and by device='cuda'"] = (
        printed.stdout.split() or printed.stderr[-800:]
    )
    model, x = _net(), torch.randn(4, 3, 32, 32, device="cuda")
    model(x).sum().backward()  # libraries take their workspaces the first time
    model.zero_grad(set_to_none=True)

    def adamw() -> Any:
        return TrainingStepAnalysis(model, x, loss=torch.sum, optimizer=torch.optim.AdamW)

    actions = {
        "count, shape execution": lambda: FlopCountAnalysis(model, x, execution="shapes").total(),
        "count, real execution": lambda: FlopCountAnalysis(model, x, execution="real").total(),
        "training step, shape execution": lambda: adamw().total(),
        "memory prediction": lambda: predict_memory(adamw()).peak,
        "profile": lambda: ProfileAnalysis(model, x, loss=torch.sum, repeat=2).table(),
        "count that raises, shape execution": lambda: FlopCountAnalysis(_Stops(model), x, execution="shapes").total(),
        "count that raises, real execution": lambda: FlopCountAnalysis(_Stops(model), x, execution="real").total(),
        "recording that raises": lambda: _record_and_raise(model, x),
    }
    for name, action in actions.items():
        before = _look(model)
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        result = attempt(lambda action=action: {"result": str(action())[:40]})  # type: ignore[misc]
        taken = torch.cuda.max_memory_allocated() - start
        after = _look(model)
        left = {key: [before[key], after[key]] for key in before if before[key] != after[key]}
        if "recording" in name:
            for key in ("random", "state", "gradients", "allocated", "cpu random"):
                left.pop(key, None)
        found[name] = {"left": left, "taken": taken, **result}
        model.zero_grad(set_to_none=True)
    found["interrupted"] = _interrupt(model, x)
    return found


def _record_and_raise(model: nn.Module, x: torch.Tensor) -> None:
    with record(model):
        model(x).sum().backward()
        raise KeyError("in the midst")


def _interrupt(model: nn.Module, x: torch.Tensor) -> dict[str, Any]:
    """Interrupt real runs and runs by shapes at 60 moments, and return in how many something was left."""
    left: list[str] = []
    interrupted = 0
    for execution in ("real", "shapes"):
        FlopCountAnalysis(model, x, execution=execution).total()
        before = _look(model)
        for number in range(30):
            delay = 0.0002 * (number + 1)
            timer = threading.Timer(delay, lambda: signal.raise_signal(signal.SIGINT))
            try:
                timer.start()
                try:
                    for _ in range(20):
                        FlopCountAnalysis(model, x, execution=execution).total()
                finally:
                    timer.join()
            except KeyboardInterrupt:
                interrupted += 1
            after = _look(model)
            changed = sorted(key for key in before if before[key] != after[key])
            if changed:
                left.append(f"{execution}, {delay:.4f} s: {', '.join(changed)}")
                before = after
    return {"interrupted": interrupted, "left": left}
