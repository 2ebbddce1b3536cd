"""What DeepSpeed's flops profiler, which patches torch, says in a process of its own: its strings and profiles."""

import random
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import torch
from torch import nn

from fvflops import zoo

FORMATS = ("number_to_string", "macs_to_string", "flops_to_string", "params_to_string", "duration_to_string")
UNITS = (None, "T", "G", "M", "K", "", "m", "u")
CALLS = {
    "input_shape": {"input_shape": (3, 1, 28, 28)},
    "batch 1024": {"input_shape": (1024, 1, 28, 28)},
    "args": {"args": [torch.ones(2, 1, 28, 28)]},
    "kwargs": {"kwargs": {"x": torch.ones(2, 1, 28, 28)}, "warm_up": 0},
    "numbers": {"input_shape": (3, 1, 28, 28), "as_string": False},
    "ignored": {"input_shape": (3, 1, 28, 28), "as_string": False, "ignore_modules": [nn.Linear]},
}


def numbers() -> list[float]:
    """Return numbers of all sizes, those at the borders of a unit among them."""
    draw = random.Random(0)
    borders = [10.0**power + step for power in range(-7, 16) for step in (-1e-9, 0, 1, -1) if 10.0**power + step >= 0]
    whole = [round(10 ** draw.uniform(0, 15)) for _ in range(200)]
    return [0, 1, 999, 999.994, 999.996, 1000, 999_995, *borders, *whole, *(10 ** draw.uniform(-8, 15) for _ in whole)]


def arguments() -> list[tuple[float, str | None, int]]:
    """Return what the formats are called with: each number with one of the units, and digits behind the point."""
    automatic = [(number, None, 2) for number in numbers()]
    return automatic + [(number, UNITS[at % len(UNITS)], at % 5) for at, number in enumerate(numbers())]


def get_text(get_model_profile: Any, **options: Any) -> str:
    text = StringIO()
    with redirect_stdout(text):
        get_model_profile(zoo.build("lenet5"), **options)
    return text.getvalue()


def main(rank):
    from deepspeed.profiling.flops_profiler import profiler

    strings = {name: [getattr(profiler, name)(*call) for call in arguments()] for name in FORMATS}
    results = {
        name: profiler.get_model_profile(zoo.build("lenet5"), print_profile=False, **options)
        for name, options in CALLS.items()
    }
    text = get_text(profiler.get_model_profile, **CALLS["ignored"])
    full = get_text(profiler.get_model_profile, **CALLS["batch 1024"])
    return {"strings": strings, "results": results, "ignored": text, "text": full}
