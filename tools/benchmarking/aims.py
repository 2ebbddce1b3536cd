"""The aims: what fvflops sets out to cost, by section and figure."""

from __future__ import annotations

from benchmarking.figure import Aim

AIMS: dict[tuple[str, str], Aim] = {
    **{
        (f"{case}, {step}", figure): aim
        for case in ("resnet50", "vit_b_16")
        for step, figure, aim in (
            ("forward", "fvflops warm / bare", Aim("≤", 0.12)),
            ("forward", "fvflops cold / bare", Aim("≤", 0.6)),
            ("forward", "FlopCounterMode on meta / fvflops warm", Aim("≥", 12)),
            ("forward", "fvcore on weights / fvflops warm on weights", Aim("≥", 30)),
            ("forward+backward", "fvflops warm / bare", Aim("≤", 0.25)),
            ("forward, in a new process", "first fvflops / first bare", Aim("≤", 0.6)),
        )
    },
    ("llama3_405b, forward", "fvflops cold"): Aim("≤", 0.2),
    ("llama3_405b, forward", "macs less the closed form"): Aim("=", 0),
    ("llama3_405b, forward+backward", "fvflops cold"): Aim("≤", 1.5),
    ("llama3_405b, forward, in a new process", "first fvflops"): Aim("≤", 0.2),
    ("llama3_405b, forward, in a new process", "peak growth of memory"): Aim("≤", 150),
    ("llama3_405b, forward+backward, in a new process", "first fvflops"): Aim("≤", 1.5),
    ("llama3_405b, forward+backward, in a new process", "peak growth of memory"): Aim("≤", 150),
    ("resnet50, batch 8, real training step", "recorded / no-op mode"): Aim("≤", 1.03),
    ("small GPT, real training step", "recorded / no-op mode"): Aim("≤", 1.05),
    ("resnet50, batch 8, real training step", "metered / plain"): Aim("≤", 1.01),
    ("small GPT, real training step", "metered / plain"): Aim("≤", 1.01),
    ("resnet50, batch 8, measured forward", "time / plain"): Aim("≤", 1.05),
    ("resnet50, batch 8, measured forward", "time and memory / plain"): Aim("≤", 1.10),
    ("growth with layers", "512 / 8, fvflops warm"): Aim("≤", 64),
    ("growth with layers", "512 / 8, fvflops cold"): Aim("≤", 64),
    ("growth with batch", "4096 / 1, fvflops warm"): Aim("≤", 1.2),
    ("growth with sequence length", "131072 / 128, fvflops warm"): Aim("≤", 1.2),
    ("candidates: MobileNet-like", "count, candidates"): Aim("≥", 100),
    ("candidates: MobileNet-like", "build and count, candidates"): Aim("≥", 25),
    ("candidates: NAS-Bench-201 cells", "count, candidates"): Aim("≥", 300),
    **{
        (f"repeated: {name}", figure): aim
        for name in ("LeNet-5", "LeNet-5, forward+backward", "LeNet-5, each time another model", "ResNet-50")
        for figure, aim in (
            ("last tenth / first tenth", Aim("≤", 1.2)),
            ("growth of Python's objects", Aim("≤", 100)),
            ("growth of memory", Aim("≤", 5)),
        )
    },
}
