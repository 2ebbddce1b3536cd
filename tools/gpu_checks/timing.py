"""Measure time on a GPU: profiles beside torch.profiler, peaks beside datasheets, and a training step's utilisation."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fvflops import (
    FlopCountAnalysis,
    KernelProfile,
    ProfileAnalysis,
    TrainingStepAnalysis,
    find_device,
    hfu,
    mfu,
    profile_kernels,
    record,
    roofline,
)
from fvflops.devices.device_benchmark import measure_device
from fvflops.zoo import build
from fvflops.zoo.gpt2 import GPT2, GPT2Config
from tests.support.cuda_cases.runs import attempt


def _resnet() -> tuple[nn.Module, torch.Tensor]:
    return build("resnet50").cuda(), torch.randn(32, 3, 224, 224, device="cuda")


def _vit() -> tuple[nn.Module, torch.Tensor]:
    return build("vit_b_16").cuda().bfloat16(), torch.randn(32, 3, 224, 224, device="cuda", dtype=torch.bfloat16)


def _gpt2(batch: int = 8) -> tuple[nn.Module, torch.Tensor]:
    return GPT2(GPT2Config(dropout=0.0)).cuda().bfloat16(), torch.randint(0, 50257, (batch, 1024), device="cuda")


def _lstm() -> tuple[nn.Module, torch.Tensor]:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.LSTM(512, 1024, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x)[0]

    return Recurrent().cuda(), torch.randn(64, 32, 512, device="cuda")


MODELS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "resnet50 × 32": _resnet,
    "vit_b_16 × 32 bf16": _vit,
    "gpt2 × 8 bf16": _gpt2,
    "LSTM × 32": _lstm,
}


def _total(result: Any) -> torch.Tensor:
    return result.float().sum()


def compare_profiles(share: int, shares: int) -> dict[str, Any]:
    """Return "model" → how fvflops' kernel profile and op times lie beside torch.profiler."""
    found: dict[str, Any] = {}
    for name, make in MODELS.items():
        for loss in (None, _total):
            key = f"{name}, {'forward' if loss is None else 'training'}"
            found[key] = _clocked(partial(_match_kernels, make, loss))
        found[f"{name}, op times"] = _clocked(partial(_time_ops, make))
        found[f"{name}, ProfileAnalysis"] = _clocked(partial(_profile, make))
        torch.cuda.empty_cache()
    found["vit_b_16 × 32 bf16, compiled"] = _clocked(partial(_match_kernels, lambda: _compiled(_vit), None))
    return found


def _clocked(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    begun = time.perf_counter()
    return {**attempt(run), "seconds taken": round(time.perf_counter() - begun, 1)}


def _compiled(make: Callable[[], tuple[nn.Module, torch.Tensor]]) -> tuple[Any, torch.Tensor]:
    model, x = make()
    return torch.compile(model), x


def _match_kernels(make: Callable[[], tuple[Any, torch.Tensor]], loss: Any) -> dict[str, Any]:
    model, x = make()
    profile = profile_kernels(model, x, loss=loss, warmup=3, repeat=3)
    match = profile.match()
    ledger = profile.ledger()
    events = match.run.events
    kernels = [event for event in events if event.kind == "device"]
    device_ns = sum(event.duration_ns for event in kernels)
    theirs = sum(row.self_device_time_total for row in profile.profiler.key_averages())
    ours = sum(row.self_device_time_total for row in profile.key_averages())
    on_events = sum(flops or 0 for flops in match.self_flops)
    owned = sum(
        event.duration_ns
        for event, owner in zip(events, match.modules, strict=True)
        if event.kind == "device" and owner
    )
    steps = len(match.complete_steps())
    rows = sorted((row for row in profile.key_averages() if row.flops), key=lambda row: -row.device_time_total)
    rates = [(row.key, row.device_time_total, row.flops_per_second) for row in rows[:6]]
    return {
        "total": profile.total(),
        "steps": steps,
        "share of FLOPs on events": on_events / (profile.total() * steps) if steps else 0,
        "kernels": len(kernels),
        "kernels launched by no op": sum(event.parent < 0 for event in kernels),
        "device ms a step": device_ns / 1e6 / max(steps, 1),
        "device time with a module": owned / device_ns if device_ns else 0,
        "rows' self device µs, fvflops and torch": [ours, theirs],
        "matched": ledger.matched,
        "no event": [list(item) for item in ledger.no_event][:10],
        "no op": [list(item) for item in ledger.no_op][:10],
        "elsewhere": [list(item) for item in ledger.attributed_to_modules][:10],
        "compiled": ledger.compiled,
        "FLOP/s": profile.flops_per_second(),
        "rates": rates,
        "table": profile.key_averages().table(sort_by="cuda_time_total", row_limit=8)[:3500],
    }


def _time_ops(make: Callable[[], tuple[Any, torch.Tensor]]) -> dict[str, Any]:
    """Return how CUDA events around ops compare with torch.profiler's kernel times of the same ops in the same run."""
    model, x = make()
    model.eval()
    pairs: list[tuple[str, float, float]] = []
    with torch.no_grad():
        for _ in range(3):
            model(x)
        with KernelProfile(model) as profile, record(model, measure={"time", "memory"}) as run:
            model(x)
    trace = run.trace()
    match = profile.count_with(trace).match()
    events = match.run.events
    inside: dict[int, float] = defaultdict(float)
    for event in events:
        if event.kind == "device" and "spin_kernel" not in event.name:  # by which fvflops holds the device
            parent = event.parent
            while parent >= 0:
                inside[parent] += event.duration_ns
                parent = events[parent].parent
    for place, index in sorted(match.call_of_event.items()):
        duration = (trace.events or ())[index].duration_ns
        if events[place].kind == "op" and duration is not None and inside[place]:
            pairs.append((events[place].name, inside[place], duration))
    if not pairs:
        return {"pairs": 0, "matched": match.ledger.matched}
    long = [(theirs, ours) for _, theirs, ours in pairs if theirs > 50_000]
    ratios = sorted(ours / theirs for theirs, ours in long) or [0.0]
    return {
        "pairs": len(pairs),
        "over 50 µs": len(long),
        "ratio median, least, most over 50 µs": [median(ratios), ratios[0], ratios[-1]],
        "sum over 50 µs, events and kernels": [sum(ours for _, ours in long), sum(theirs for theirs, _ in long)],
        "sum, events and kernels": [sum(ours for _, _, ours in pairs), sum(theirs for _, theirs, _ in pairs)],
        "worst": sorted(pairs, key=lambda pair: -abs(pair[2] - pair[1]))[:5],
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


def _profile(make: Callable[[], tuple[Any, torch.Tensor]]) -> dict[str, Any]:
    model, x = make()
    model.eval()
    profile = ProfileAnalysis(model, x, warmup=3, repeat=5)
    whole = profile.times().modules["forward"][""]
    operators = profile.times().operators["forward"]
    with torch.no_grad():
        seconds = _clock(lambda: model(x))
    allocated = torch.cuda.memory_allocated()
    with torch.no_grad():
        torch.cuda.reset_peak_memory_stats()
        y = model(x)
        peak = torch.cuda.max_memory_allocated() - allocated
        retained = torch.cuda.memory_allocated() - allocated
        del y
    line = profile.measured(device=torch.cuda.get_device_name()).module_rows()[""]
    return {
        "plain ms": seconds * 1000,
        "root ms": whole.total / 1e6,
        "ops ms": sum(item.total for item in operators.values()) / 1e6,
        "overhead ms": float(profile.trace().about.get("overhead_ns", 0)) / 1e6,
        "peak, retained measured": [peak, retained],
        "line": {
            key: str(getattr(line, key, None))
            for key in ("flops", "read", "written", "retained", "peak", "total_ns", "bound_ns")
        },
        "table": profile.table(by="operator", device=torch.cuda.get_device_name())[:3000],
    }


def measure_peaks(share: int, shares: int) -> dict[str, Any]:
    """Return measured peaks beside the datasheet's, and the time of models beside their roofline."""
    name = torch.cuda.get_device_name()
    listed = find_device(name)
    measured = measure_device("cuda")
    found: dict[str, Any] = {
        "device": name,
        "listed": listed.name,
        "matrix": {kind: [peak, listed.matrix.get(kind)] for kind, peak in measured.matrix.items()},
        "bandwidth": [measured.bandwidth, listed.bandwidth],
        "memory": [measured.memory, listed.memory],
    }
    for key, make in MODELS.items():
        found[f"{key}, roofline"] = attempt(partial(_bound, make, listed))
    return found


def _bound(make: Callable[[], tuple[Any, torch.Tensor]], device: Any) -> dict[str, Any]:
    model, x = make()
    model.eval()
    least = roofline(FlopCountAnalysis(model, x, table="exact").trace(), device=device)
    with torch.no_grad():
        seconds = _clock(lambda: model(x))
    return {"measured ms": seconds * 1000, "least ms": float(least.total().seconds) * 1000}


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
    torch.manual_seed(0)
    batch = 16
    model = GPT2(GPT2Config(dropout=0.0)).cuda().train()
    tokens = torch.randint(0, 50257, (batch, 1024), device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    call: Any = torch.compile(model) if compiled else model

    def forward(module: Any) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            logits = module(tokens)
            return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        forward(call).backward()
        optimizer.step()

    seconds = _clock(step, 15)
    begun = time.perf_counter()
    with record(model, table="default") as run:
        optimizer.zero_grad(set_to_none=True)
        forward(model).backward()
        optimizer.step()
    torch.cuda.synchronize()
    recorded = time.perf_counter() - begun
    name = torch.cuda.get_device_name()

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return forward(self.model)

    analysis = TrainingStepAnalysis(Whole().train(), tokens, optimizer=lambda p: torch.optim.AdamW(p, fused=True))
    return {
        "seconds": seconds,
        "recorded seconds": recorded,
        "macs recorded": run.macs(),
        "macs by shapes": analysis.macs(),
        "by phase": {
            phase: run.macs(phase=phase) for phase in ("forward", "backward", "optimizer") if phase in run.by_phase()
        },
        "by operator": dict(run.by_operator().most_common(8)),
        "tokens per second": batch * 1024 / seconds,
        "mfu": attempt(lambda: {"value": mfu(run, seconds=seconds, device=name, dtype="bf16")}),
        "hfu": attempt(lambda: {"value": hfu(run, seconds=seconds, device=name, dtype="bf16")}),
    }
