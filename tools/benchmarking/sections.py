"""The sections: each measures one part of the benchmark and returns its figures."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch

from benchmarking.candidates import SPACES, run_search
from benchmarking.contenders import CASES, CONTENDERS, RATIOS, STEPS, NoOpMode, Step, Subjects
from benchmarking.figures import Figure, summarise_ratios, summarise_values
from benchmarking.first_count import measure_apart, run_module
from benchmarking.growth import GROWTHS, list_runs
from benchmarking.probe import REPEATS
from benchmarking.rounds import Limits, Rounds, Run, run_rounds
from benchmarking.times import TIMED, compare_modules, compare_ops
from benchmarking.training import SUBJECTS, run_steps
from fvflops import FlopCountAnalysis, record
from fvflops.zoo import build
from tests.support.models.whole_models import MODELS

# The cases whose first count is measured in new processes too: a process a measurement takes seconds.
FIRST = ("resnet50", "vit_b_16", "llama3_405b")


@dataclass(frozen=True, slots=True)
class Section:
    """Results of a section: its figures, and the rounds that they came from."""

    name: str
    figures: list[Figure]
    rounds: Rounds = field(default_factory=Rounds)


@dataclass(frozen=True, slots=True)
class Effort:
    """How much to measure: the limits on rounds, the number of new processes, and the share of repeated analyses."""

    limits: Limits = field(default_factory=Limits)
    processes: int = 3
    share: float = 1.0


def compare_contenders(case_name: str, step: Step, effort: Effort) -> Section:
    name = f"{case_name}, {step}"
    case = CASES[case_name]
    subjects = Subjects(case, step)
    rounds = run_rounds({key: partial(make, subjects) for key, make in CONTENDERS.items()}, effort.limits)
    figures = [*_ratios(name, rounds, RATIOS), *_seconds(name, rounds)]
    figures += [summarise_values(name, f"{key} counts", "count", [value]) for key, value in rounds.counted.items()]
    if step == "forward" and case.macs is not None:
        entries = FlopCountAnalysis(subjects.weightless.model, subjects.weightless.value).counts().entries
        macs = sum(entry.macs for entry in entries)
        figures.append(summarise_values(name, "macs less the closed form", "count", [macs - case.macs]))
    return Section(name, figures, rounds)


def start_afresh(case_name: str, step: Step, effort: Effort) -> Section:
    """Time the first count and the first bare run of new processes, in turn, and the memory that they take."""
    name = f"{case_name}, {step}, in a new process"
    seconds: dict[str, list[float]] = {"first bare": [], "first fvflops": []}
    grown: list[list[float]] = []
    for _ in range(effort.processes):
        for contender in ("bare", "fvflops"):
            result = run_module("benchmarking.probe", "first", case_name, step, contender)
            seconds[f"first {contender}"].append(result["seconds"])
            if contender == "fvflops" and result["megabytes"] is not None:
                grown.append(result["megabytes"])
    rounds = Rounds(seconds)
    figures = [*_ratios(name, rounds, [("first fvflops", "first bare")]), *_seconds(name, rounds)]
    if grown:
        figures.append(summarise_values(name, "growth of memory", "MB", [after for after, _ in grown]))
        figures.append(summarise_values(name, "peak growth of memory", "MB", [peak for _, peak in grown]))
    return Section(name, figures, rounds)


def count_first(name: str, effort: Effort) -> Section:
    """Time `import fvflops` and the first count of new processes beside `import torch`."""
    title = f"first count: {name}"
    measured = [measure_apart(name) for _ in range(1 + effort.processes)][1:]  # the first writes bytecode
    torch_seconds = [one.torch for one in measured]
    figures = [
        summarise_ratios(title, "import fvflops / import torch", [one.fvflops for one in measured], torch_seconds),
        summarise_ratios(
            title,
            "import fvflops and count / import torch",
            [one.fvflops + one.count for one in measured],
            torch_seconds,
        ),
        summarise_values(title, "import torch", "s", torch_seconds),
        summarise_values(title, "first count", "s", [one.count for one in measured]),
        summarise_values(title, "modules imported by the count", "count", [max(one.modules for one in measured)]),
        summarise_values(title, "heavy modules asked for", "count", [max(len(one.asked) for one in measured)]),
    ]
    return Section(title, figures)


def compare_times(name: str, effort: Effort) -> Section:
    """Compare the times of ops with torch.profiler's, and of modules with a stopwatch's, on all cores."""
    title = f"times of {name}"
    model, images = build(name).eval(), torch.randn(TIMED[name])
    threads = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    try:
        with torch.no_grad():
            model(images)
            ops, modules = (compare(model, images, effort.limits.rounds) for compare in (compare_ops, compare_modules))
    finally:
        torch.set_num_threads(threads)
    figures = [
        summarise_ratios(title, other, [ours for _, ours in pairs], [theirs for theirs, _ in pairs])
        for other, pairs in (("ops, fvflops / torch.profiler", ops), ("modules, fvflops / stopwatch", modules))
    ]
    return Section(title, figures)


def watch_growth(quantity: str, effort: Effort) -> Section:
    name = f"growth with {quantity}"
    growth = GROWTHS[quantity]
    rounds = run_rounds(list_runs(growth), effort.limits)
    first = growth.sizes[0]
    figures = []
    for contender in ("fvflops warm", "fvflops cold", "bare"):
        for size in growth.sizes[1:]:
            above, below = rounds.seconds.get(f"{contender} {size}"), rounds.seconds.get(f"{contender} {first}")
            if above and below:
                figures.append(summarise_ratios(name, f"{size} / {first}, {contender}", above, below))
    return Section(name, [*figures, *_seconds(name, rounds)], rounds)


def repeat_analyses(repeated: str, effort: Effort) -> Section:
    """Time many analyses in a row in a process of their own, and watch its memory."""
    name = f"repeated: {repeated}"
    result = run_module("benchmarking.probe", "repeat", repeated, str(effort.share))
    figures = [
        summarise_values(name, "last tenth / first tenth", "ratio", [result["last"] / result["first"]]),
        summarise_values(name, "first tenth", "s", [result["first"]]),
        summarise_values(name, "last tenth", "s", [result["last"]]),
        summarise_values(name, "analyses", "count", [result["times"]]),
        summarise_values(name, "growth of Python's objects", "count", [result["objects"]]),
    ]
    if result["megabytes"] is not None:
        figures.append(summarise_values(name, "growth of memory", "MB", [result["megabytes"]]))
    return Section(name, figures)


def run_really(effort: Effort) -> Section:
    """Time the overhead of counting in a run that computes its numbers: ResNet-50, batch 8, on the CPU."""
    name = "resnet50, batch 8, real forward"
    model = build("resnet50").eval()
    images = torch.randn(8, 3, 224, 224)
    expected = 8 * FlopCountAnalysis(model, images[:1], execution="real").total()

    def plain() -> None:
        with torch.no_grad():
            model(images)

    def counted() -> None:
        assert FlopCountAnalysis(model, images, execution="real").total() == expected

    runs = {"plain": lambda: Run(plain), "counted": lambda: Run(counted)}
    rounds = run_rounds(runs, effort.limits)
    return Section(name, [*_ratios(name, rounds, [("counted", "plain")]), *_seconds(name, rounds)], rounds)


def train_really(subject: str, effort: Effort) -> Section:
    """Time the overhead of recording, metering, a no-op mode and other tools in a real training step."""
    name = f"{subject}, real training step"
    rounds = run_steps(subject, effort.limits)
    pairs = [
        ("metered", "plain"),
        ("recorded", "no-op mode"),
        *((contender, "plain") for contender in ("recorded", "no-op mode", "FlopCounterMode", "torch.profiler")),
    ]
    return Section(name, [*_ratios(name, rounds, pairs), *_seconds(name, rounds)], rounds)


def measure_really(effort: Effort) -> Section:
    """Time the overhead of measuring in a real run: ResNet-50's forward pass, batch 8, on all cores of the CPU."""
    name = "resnet50, batch 8, measured forward"
    model, images = build("resnet50").eval(), torch.randn(8, 3, 224, 224)

    def run(*measure: str) -> None:
        with torch.no_grad(), record(model, measure=measure) if measure else nullcontext():
            model(images)

    def pass_on() -> None:
        with NoOpMode():
            run()

    runs = {
        "plain": lambda: Run(run),
        "no-op mode": lambda: Run(pass_on),
        "time": lambda: Run(partial(run, "time")),
        "time and memory": lambda: Run(partial(run, "time", "memory")),
    }
    threads = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    try:
        rounds = run_rounds(runs, Limits(2 * effort.limits.rounds, 60 * effort.limits.seconds, effort.limits.least))
    finally:
        torch.set_num_threads(threads)
    pairs = [("time", "plain"), ("time and memory", "plain"), ("no-op mode", "plain"), ("time", "no-op mode")]
    return Section(name, [*_ratios(name, rounds, pairs), *_seconds(name, rounds)], rounds)


def count_candidates(space: str, effort: Effort) -> Section:
    """Time counting, and building and counting, candidates of a search over architectures, in CPU time."""
    name = f"candidates: {space}"
    rounds = run_search(space, effort.limits)
    pairs = [("count", "bare"), ("count_many, built", "bare"), ("FlopCounterMode on meta", "count")]
    pairs.append(("build without initialisers", "build"))
    rates = [
        summarise_values(name, f"{contender}, candidates", "a second", [1 / value for value in values])
        for contender, values in rounds.seconds.items()
    ]
    return Section(name, [*_ratios(name, rounds, pairs), *rates, *_seconds(name, rounds)], rounds)


def _ratios(name: str, rounds: Rounds, pairs: Iterable[tuple[str, str]]) -> list[Figure]:
    seconds = rounds.seconds
    return [
        summarise_ratios(name, f"{above} / {below}", seconds[above], seconds[below])
        for above, below in pairs
        if above in seconds and below in seconds
    ]


def _seconds(name: str, rounds: Rounds) -> list[Figure]:
    return [summarise_values(name, contender, "s", values) for contender, values in rounds.seconds.items()]


# Names for --only → the sections under them.
SECTIONS: dict[str, list[Callable[[Effort], Section]]] = {
    **{case: [partial(compare_contenders, case, step) for step in STEPS] for case in CASES},
    "new-process": [partial(start_afresh, case, step) for case in FIRST for step in STEPS],
    "first-count": [partial(count_first, name) for name in MODELS],
    "times": [partial(compare_times, name) for name in TIMED],
    "growth": [partial(watch_growth, quantity) for quantity in GROWTHS],
    "repeats": [partial(repeat_analyses, repeated) for repeated in REPEATS],
    "real-run": [run_really],
    "real-training": [partial(train_really, subject) for subject in SUBJECTS],
    "measuring": [measure_really],
    "candidates": [partial(count_candidates, space) for space in SPACES],
}
