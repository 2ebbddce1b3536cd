"""Measure each part of the benchmark."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch

from benchmarking.candidates import time_search
from benchmarking.contenders import (
    CASES,
    CONTENDERS,
    GROWTHS,
    RATIOS,
    STEPS,
    NoOpMode,
    Step,
    Subjects,
    bare,
    count_cold,
    fvflops_warm,
)
from benchmarking.measuring import Limits, Run, Section
from benchmarking.processes import REPEATS, run_apart
from benchmarking.times import TIMED, compare_modules, compare_ops
from benchmarking.training import SUBJECTS, list_runs
from fvflops import record
from fvflops.zoo import build
from tests.support.models.whole_models import MODELS

# The cases whose first count is measured in new processes too: a process a measurement takes seconds.
FIRST = ("resnet50", "vit_b_16", "llama3_405b")


@dataclass(frozen=True, slots=True)
class Effort:
    """How much to measure: the limits on rounds, the number of new processes, and the share of repeated analyses."""

    limits: Limits = field(default_factory=Limits)
    processes: int = 3
    share: float = 1.0

    @property
    def long(self) -> Limits:
        """Limits of real runs, which take seconds."""
        return Limits(2 * self.limits.rounds, 60 * self.limits.seconds, self.limits.least)


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def compare_contenders(case: str, step: Step, effort: Effort) -> Section:
    section, subjects = Section(f"{case}, {step}"), Subjects(CASES[case], step)
    contenders = {name: partial(make, subjects) for name, make in CONTENDERS.items()}
    section.add_times(section.run_rounds(contenders, effort.limits), RATIOS)
    return section


def start_afresh(case: str, step: Step, effort: Effort) -> Section:
    """Time the first count and the first bare run of new processes, in turn, and the memory that they take."""
    section = Section(f"{case}, {step}, in a new process")
    seconds: dict[str, list[float]] = {"first bare": [], "first fvflops": []}
    grown = []
    for _ in range(effort.processes):
        for contender in ("bare", "fvflops"):
            result = run_apart("first", case, step, contender)
            seconds[f"first {contender}"].append(result["seconds"])
        grown.append(result["megabytes"])
    section.add_times(seconds, [("first fvflops", "first bare")])
    for name, values in zip(("growth of memory", "peak growth of memory"), zip(*grown, strict=True), strict=True):
        section.add(name, values, "MB")
    return section


def count_first(name: str, effort: Effort) -> Section:
    """Time `import fvflops` and the first count of new processes beside `import torch`."""
    section = Section(f"first count: {name}")
    measured = [run_apart("imports", name) for _ in range(1 + effort.processes)][1:]  # the first writes bytecode
    imports, ours, counts, modules = zip(*(one.values() for one in measured), strict=True)
    section.add_ratio("import fvflops / import torch", ours, imports)
    both = [sum(pair) for pair in zip(ours, counts, strict=True)]
    section.add_ratio("import fvflops and count / import torch", both, imports)
    section.add_times({"import torch": imports, "first count": counts}, ())
    section.add("modules imported by the count", [max(modules)])
    return section


def compare_times(name: str, effort: Effort) -> Section:
    """Compare the times of ops with torch.profiler's, and of modules with a stopwatch's, on all cores."""
    section = Section(f"times of {name}")
    model, images = build(name).eval(), torch.randn(TIMED[name])
    with _threads(os.cpu_count() or 1), torch.no_grad():
        model(images)
        for other, compare in (("ops / torch.profiler", compare_ops), ("modules / stopwatch", compare_modules)):
            theirs, ours = zip(*compare(model, images, effort.limits.rounds), strict=True)
            section.add_ratio(other, ours, theirs)
    return section


def measure_growth(quantity: str, effort: Effort) -> Section:
    """Time counts of growing sizes of a model or its input; all sizes take part in each round."""
    section, (sizes, make_case) = Section(f"growth with {quantity}"), GROWTHS[quantity]
    subjects = {size: Subjects(make_case(size), "forward") for size in sizes}
    warm = [subject.weightless for subject in subjects.values()]
    runs: dict[str, Callable[[], Run]] = {}
    for size, subject in subjects.items():
        runs[f"bare, {size}"] = partial(bare, subject)
        runs[f"fvflops cold, {size}"] = partial(count_cold, subject.weightless, warm)
        runs[f"fvflops warm, {size}"] = partial(fvflops_warm, subject)
    contenders = ("fvflops warm", "fvflops cold", "bare")
    pairs = [(f"{name}, {size}", f"{name}, {sizes[0]}") for name in contenders for size in sizes[1:]]
    section.add_times(section.run_rounds(runs, effort.limits), pairs)
    return section


def repeat_analyses(repeated: str, effort: Effort) -> Section:
    """Time many analyses in a row in a process of their own, and observe its memory."""
    section = Section(f"repeated: {repeated}")
    result = run_apart("repeats", repeated, str(effort.share))
    section.add("last tenth / first tenth", [result["last"] / result["first"]])
    section.add_times({"first tenth": [result["first"]], "last tenth": [result["last"]]}, ())
    section.add("analyses", [result["times"]])
    section.add("growth of Python's objects", [result["objects"]])
    section.add("growth of memory", [result["megabytes"]], "MB")
    return section


def train_really(subject: str, effort: Effort) -> Section:
    """Time the overhead of recording, metering, a no-op mode and other tools in a real training step."""
    section = Section(f"{subject}, real training step")
    runs, meter = list_runs(subject)
    with _threads(SUBJECTS[subject].cores):
        seconds = section.run_rounds({name: partial(Run, run) for name, run in runs.items()}, effort.long)
    meter.close()
    others = ("recorded", "no-op mode", "FlopCounterMode", "torch.profiler")
    pairs = [("metered", "plain"), ("recorded", "no-op mode"), *((name, "plain") for name in others)]
    section.add_times(seconds, pairs)
    return section


def measure_really(effort: Effort) -> Section:
    """Time the overhead of measuring in a real run: ResNet-50's forward pass, batch 8, on all cores of the CPU."""
    section = Section("resnet50, batch 8, measured forward")
    model, images = build("resnet50").eval(), torch.randn(8, 3, 224, 224)

    def run(*measure: str) -> None:
        with torch.no_grad(), record(model, measure=measure) if measure else nullcontext():
            model(images)

    def pass_on() -> None:
        with NoOpMode():
            run()

    runs: dict[str, Callable[[], None]] = {
        "plain": run,
        "no-op mode": pass_on,
        "time": partial(run, "time"),
        "time and memory": partial(run, "time", "memory"),
    }
    with _threads(os.cpu_count() or 1):
        seconds = section.run_rounds({name: partial(Run, run) for name, run in runs.items()}, effort.long)
    pairs = [("time", "plain"), ("time and memory", "plain"), ("no-op mode", "plain"), ("time", "no-op mode")]
    section.add_times(seconds, pairs)
    return section


def count_candidates(effort: Effort) -> Section:
    """Time counting, and building and counting, candidates of a search over architectures, in CPU time."""
    section, seconds = Section("candidates"), time_search(effort.limits)
    for contender, values in seconds.items():
        section.add(f"{contender}, models", [1 / value for value in values], "/s")
    pairs = [("count", "bare"), ("count_many, built", "bare"), ("FlopCounterMode on meta", "count")]
    section.add_times(seconds, [*pairs, ("build without initialisers", "build")])
    return section


# Names for --only → the sections under them.
SECTIONS: dict[str, list[Callable[[Effort], Section]]] = {
    **{case: [partial(compare_contenders, case, step) for step in STEPS] for case in CASES},
    "new-process": [partial(start_afresh, case, step) for case in FIRST for step in STEPS],
    "first-count": [partial(count_first, name) for name in MODELS],
    "times": [partial(compare_times, name) for name in TIMED],
    "growth": [partial(measure_growth, quantity) for quantity in GROWTHS],
    "repeats": [partial(repeat_analyses, repeated) for repeated in REPEATS],
    "real-training": [partial(train_really, subject) for subject in SUBJECTS],
    "measuring": [measure_really],
    "candidates": [count_candidates],
}
