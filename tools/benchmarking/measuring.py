"""Time contenders in rounds, and keep the figures of a section: medians with quartiles, some with an aim."""

from __future__ import annotations

import gc
import operator
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

# Collecting takes some 0.1 s: before every run of a few milliseconds it would leave time for few rounds.
_COLLECT_AFTER = 1.0
_HOLDS = {"≤": operator.le, "≥": operator.ge, "=": operator.eq}
_SMALL = {
    ", forward": {
        "fvflops warm / bare": ("≤", 0.12),
        "fvflops cold / bare": ("≤", 0.6),
        "FlopCounterMode on meta / fvflops warm": ("≥", 12),
        "fvcore on weights / fvflops warm on weights": ("≥", 30),
    },
    ", forward+backward": {"fvflops warm / bare": ("≤", 0.25)},
    ", forward, in a new process": {"first fvflops / first bare": ("≤", 0.6)},
}
_STEADY = {
    "last tenth / first tenth": ("≤", 1.2),
    "growth of Python's objects": ("≤", 100),
    "growth of memory": ("≤", 5),
}
# Section → figure → its bound, in ratios, seconds, MB and numbers; the section of a model's first count is without it.
AIMS: dict[str, dict[str, tuple[str, float]]] = {
    **{f"{case}{step}": aims for case in ("resnet50", "vit_b_16") for step, aims in _SMALL.items()},
    "llama3_405b, forward": {"fvflops cold": ("≤", 0.2)},
    "llama3_405b, forward+backward": {"fvflops cold": ("≤", 1.5)},
    "llama3_405b, forward, in a new process": {"first fvflops": ("≤", 0.2), "peak growth of memory": ("≤", 150)},
    "llama3_405b, forward+backward, in a new process": {
        "first fvflops": ("≤", 1.5),
        "peak growth of memory": ("≤", 150),
    },
    "resnet50, batch 8, real training step": {"recorded / no-op mode": ("≤", 1.03), "metered / plain": ("≤", 1.01)},
    "small GPT, real training step": {"recorded / no-op mode": ("≤", 1.05), "metered / plain": ("≤", 1.01)},
    "resnet50, batch 8, measured forward": {"time / plain": ("≤", 1.05), "time and memory / plain": ("≤", 1.10)},
    "first count": {
        "import fvflops / import torch": ("≤", 0.1),
        "import fvflops and count / import torch": ("≤", 0.25),
    },
    "growth with layers": {
        "fvflops warm, 512 / fvflops warm, 8": ("≤", 64),
        "fvflops cold, 512 / fvflops cold, 8": ("≤", 64),
    },
    "growth with batch": {"fvflops warm, 4096 / fvflops warm, 1": ("≤", 1.2)},
    "growth with sequence length": {"fvflops warm, 131072 / fvflops warm, 128": ("≤", 1.2)},
    "candidates": {"count, models": ("≥", 100), "build and count, models": ("≥", 25)},
    **{
        f"repeated: {name}": _STEADY
        for name in ("LeNet-5", "LeNet-5, forward+backward", "LeNet-5, each time another model", "ResNet-50")
    },
}


@dataclass(frozen=True, slots=True)
class Run:
    """A timed call; `before` and `after` are called outside the clock."""

    run: Callable[[], object]
    before: Callable[[], object] = lambda: None
    after: Callable[[], object] = lambda: None

    def seconds(self) -> float:
        self.before()
        begun = time.perf_counter()
        self.run()
        seconds = time.perf_counter() - begun
        self.after()
        return seconds


@dataclass(frozen=True, slots=True)
class Limits:
    """How many rounds: `rounds`, or fewer once `seconds` have passed, but `least` in any case."""

    rounds: int = 15
    seconds: float = 10.0
    least: int = 3

    def count(self) -> Iterator[int]:
        """Yield the numbers of the rounds."""
        begun = time.perf_counter()
        for index in range(self.rounds):
            if index >= self.least and time.perf_counter() - begun > self.seconds:
                return
            yield index


@dataclass(frozen=True, slots=True)
class Figure:
    """The median of `samples` values with their quartiles; `unit` is "" for ratios and numbers; `aim` its bound."""

    name: str
    unit: str
    value: float
    low: float
    high: float
    samples: int
    aim: tuple[str, float] | None

    def __str__(self) -> str:
        spread = f"  [{self._show(self.low)}, {self._show(self.high)}] {self.samples}" if self.samples > 1 else ""
        aim = ""
        if self.aim is not None:
            at, bound = self.aim
            met = "met" if _HOLDS[at](self.value, bound) else "MISSED"
            aim = f"  aim {at} {bound * 1e3 if self.unit == 's' else bound:g}: {met}"
        unit = {"s": "ms"}.get(self.unit, self.unit)
        return f"    {self.name:44}{self._show(self.value):>14} {unit:3}{spread:30}{aim}".rstrip()

    def _show(self, value: float) -> str:
        return f"{value * 1e3:,.2f}" if self.unit == "s" else f"{value:,.3f}" if abs(value) < 10 else f"{value:,.1f}"


@dataclass(slots=True)
class Section:
    """Results of a part of the benchmark: its figures, and the errors of contenders that are left out."""

    name: str
    figures: list[Figure] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, values: Sequence[float], unit: str = "") -> None:
        """Add a figure.

        >>> section = Section("toy")
        >>> section.add("warm / bare", [3.0, 1.0, 2.0])
        >>> section.figures[0]
        Figure(name='warm / bare', unit='', value=2.0, low=1.5, high=2.5, samples=3, aim=None)
        """
        quartiles = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
        low, middle, high = quartiles
        aim = AIMS.get(self.name.partition(": ")[0] if self.name.startswith("first") else self.name, {}).get(name)
        self.figures.append(Figure(name, unit, middle, low, high, len(values), aim))

    def add_ratio(self, name: str, above: Sequence[float], below: Sequence[float]) -> None:
        """Add the median of ratios of two columns, row by row: both values of a row met the same noise."""
        self.add(name, [a / b for a, b in zip(above, below, strict=True)])

    def add_times(self, seconds: Mapping[str, Sequence[float]], pairs: Iterable[tuple[str, str]]) -> None:
        """Add the ratios of pairs of contenders that took part, and the seconds of each."""
        for above, below in pairs:
            if above in seconds and below in seconds:
                self.add_ratio(f"{above} / {below}", seconds[above], seconds[below])
        for name, values in seconds.items():
            self.add(name, values, "s")

    def run_rounds(self, contenders: Mapping[str, Callable[[], Run | None]], limits: Limits) -> dict[str, list[float]]:
        """Return the seconds of contenders in rounds, in a shuffled order, after one warm-up of each.

        One that gives None does not take part, and one that raises when it is made or warmed up is a failure. Garbage
        is collected before each round, and in a round of large models before a contender too, lest it pays for what
        others left; the collector stays on, as it is for a user.
        """
        runs: dict[str, Run] = {}
        for name, make in contenders.items():
            try:
                run = make()
                if run is not None:
                    run.seconds()
                    runs[name] = run
            except Exception as error:  # a peer that cannot count this model must not hide the others
                lines = str(error).splitlines() or [""]
                self.failures[name] = f"{type(error).__name__}: {lines[0][:120]}"
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        generator = random.Random(0)
        for _ in limits.count():
            collected = float("-inf")
            for name in generator.sample(list(runs), len(runs)):
                if time.perf_counter() - collected >= _COLLECT_AFTER:
                    gc.collect()
                    collected = time.perf_counter()
                seconds[name].append(runs[name].seconds())
        return seconds

    def lines(self) -> Iterator[str]:
        yield f"  {self.name}"
        yield from map(str, self.figures)
        yield from (f"    {contender} raised, and is left out: {error}" for contender, error in self.failures.items())
