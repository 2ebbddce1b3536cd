"""The growth: how the time depends on sizes of a model and its input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from benchmarking.contenders import Case, Subjects, bare, count_cold, fvflops_warm
from benchmarking.rounds import Run
from fvflops.zoo import ZOO
from fvflops.zoo.llama import CONFIGS, Llama


@dataclass(frozen=True, slots=True)
class Growth:
    """One quantity, the sizes that it takes, and the case at a size."""

    sizes: tuple[int, ...]
    make_case: Callable[[int], Case]


def _llama(layers: int, tokens: int) -> Case:
    config = replace(CONFIGS["llama_tiny"], layers=layers)
    return Case(build=lambda: Llama(config), shape=(1, tokens), dtype=torch.int64, fits=False)


GROWTHS: dict[str, Growth] = {
    "layers": Growth((8, 32, 128, 512), lambda layers: _llama(layers, tokens=64)),
    "batch": Growth(
        (1, 16, 256, 4096), lambda batch: Case(build=ZOO["resnet50"].build, shape=(batch, 3, 64, 64), fits=False)
    ),
    "sequence length": Growth((128, 4096, 131_072), lambda tokens: _llama(8, tokens)),
}


def list_runs(growth: Growth) -> dict[str, Callable[[], Run]]:
    """Return the timed runs, named by contender and size; all sizes take part in each round."""
    subjects = {size: Subjects(growth.make_case(size), "forward") for size in growth.sizes}
    warm = [subject.weightless for subject in subjects.values()]
    runs: dict[str, Callable[[], Run]] = {}
    for size, subject in subjects.items():
        runs[f"bare {size}"] = partial(bare, subject)
        runs[f"fvflops cold {size}"] = partial(count_cold, subject.weightless, warm)
        runs[f"fvflops warm {size}"] = partial(fvflops_warm, subject)
    return runs
