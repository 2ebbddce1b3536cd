"""See reports on work that PyTorch's dispatcher does not see: Triton kernels, compiled code, CUDA graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fvflops import FlopCountAnalysis, profile_kernels, record
from tests.support.cuda_cases.runs import attempt, describe


def look_outside(share: int, shares: int) -> dict[str, Any]:
    """Return work → the reports on it."""
    return {
        "a Triton kernel launched in a forward": attempt(_launch),
        "a Triton kernel as an op of torch.library": attempt(_wrapped),
        "a replayed CUDA graph": attempt(_graph),
        "a compiled training step, recorded": attempt(_compiled),
    }


class _Launches(nn.Module):
    def __init__(self, launch: Any) -> None:
        super().__init__()
        self.launch = launch
        self.linear = nn.Linear(256, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return self.launch(x, x)


def _say(model: nn.Module, x: torch.Tensor) -> dict[str, Any]:
    found = {}
    for execution in ("real", "shapes"):
        analysis = FlopCountAnalysis(model, x, execution=execution)
        found[execution] = attempt(
            lambda analysis=analysis: {"flops": analysis.total(), "unsupported": dict(analysis.unsupported_ops())}  # type: ignore[misc]
        )
    with record(model) as run:
        model(x)
    found["record"] = {"flops": run.total(), "unsupported": dict(run.unsupported_ops())}
    profile = profile_kernels(model, x, warmup=2, repeat=1)
    kernels = [event.name for event in profile.match().run.events if event.kind == "device"]
    return {**found, "kernels": kernels[:8], "no op": [list(item) for item in profile.ledger().no_op][:6]}


def _launch() -> dict[str, Any]:
    from gpu_checks.triton_kernels import add

    return _say(_Launches(add).cuda(), torch.randn(64, 256, device="cuda"))


def _wrapped() -> dict[str, Any]:
    from gpu_checks.triton_kernels import add_as_op

    return _say(_Launches(add_as_op).cuda(), torch.randn(64, 256, device="cuda"))


def _graph() -> dict[str, Any]:
    model, x = nn.Linear(256, 256).cuda(), torch.randn(64, 256, device="cuda")
    with torch.no_grad():
        for _ in range(3):
            model(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model(x)
        with record(model) as run:
            graph.replay()
    return {"flops": run.total(), "unsupported": dict(run.unsupported_ops())}


def _compiled() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)).cuda()
    compiled, x = torch.compile(model), torch.randn(64, 256, device="cuda")
    compiled(x).sum().backward()
    with record(compiled) as run:  # type: ignore[arg-type]
        compiled(x).sum().backward()
    return describe(run.trace())
