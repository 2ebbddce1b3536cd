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
_HOLDS = {"≤": operator.le, "≥": operator.ge}
_STEADY = {
    "last tenth / first tenth": ("≤", 1.2),
    "growth of Python's objects": ("≤", 100),
    "growth of memory, MB": ("≤", 5),
}
# Section → figure → its bound.
_FORWARD = {
    "fvflops warm / bare": ("≤", 0.12),
    "fvflops cold / bare": ("≤", 0.6),
    "FlopCounterMode on meta / fvflops warm": ("≥", 12),
    "fvcore on weights / fvflops warm on weights": ("≥", 30),
}
_SMALL = ("resnet50", "vit_b_16")
# Section → figure → its bound.
AIMS: dict[str, dict[str, tuple[str, float]]] = {
    **{f"{case}, forward": _FORWARD for case in _SMALL},
    **{f"{case}, forward+backward": {"fvflops warm / bare": ("≤", 0.25)} for case in _SMALL},
    **{f"{case}, forward, in a new process": {"first fvflops / first bare": ("≤", 0.6)} for case in _SMALL},
    "llama3_405b, forward": {"fvflops cold, ms": ("≤", 200)},
    "llama3_405b, forward+backward": {"fvflops cold, ms": ("≤", 1500)},
    "llama3_405b, forward, in a new process": {"first fvflops, ms": ("≤", 200), "peak memory, MB": ("≤", 150)},
    "llama3_405b, forward+backward, in a new process": {
        "first fvflops, ms": ("≤", 1500),
        "peak memory, MB": ("≤", 150),
    },
    "resnet50, batch 8, training step": {"recorded / no-op mode": ("≤", 1.03), "metered / plain": ("≤", 1.01)},
    "small GPT, training step": {"recorded / no-op mode": ("≤", 1.05), "metered / plain": ("≤", 1.01)},
    "resnet50, batch 8, measured forward": {"time / plain": ("≤", 1.05), "time and memory / plain": ("≤", 1.10)},
    "first count": {
        "import fvflops / import torch": ("≤", 0.1),
        "import fvflops and count / import torch": ("≤", 0.25),
    },
    "growth with layers": {"warm, 512 / warm, 8": ("≤", 64), "cold, 512 / cold, 8": ("≤", 64)},
    "growth with batch": {"warm, 4096 / warm, 1": ("≤", 1.2)},
    "growth with sequence length": {"warm, 131072 / warm, 128": ("≤", 1.2)},
    "candidates": {"count, models/s": ("≥", 100), "build and count, models/s": ("≥", 25)},
    "repeated": _STEADY,
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
class Effort:
    """How many rounds: `rounds`, or fewer once `seconds` have passed, but three in any case; how many new processes."""

    rounds: int = 15
    seconds: float = 10.0
    processes: int = 3
    share: float = 1.0  # of repeated analyses

    @property
    def long(self) -> Effort:
        """The effort for real runs, which take seconds."""
        return Effort(2 * self.rounds, 60 * self.seconds)

    def count(self) -> Iterator[int]:
        """Yield the numbers of the rounds."""
        begun = time.perf_counter()
        for index in range(self.rounds):
            if index >= 3 and time.perf_counter() - begun > self.seconds:
                return
            yield index


@dataclass(slots=True)
class Section:
    """Results of a part of the benchmark; the aims of "first count: NAME" are those under "first count"."""

    name: str
    lines: list[str] = field(default_factory=list)

    def add(self, name: str, values: Sequence[float]) -> None:
        """Add a figure.

        >>> section = Section("first count: toy")
        >>> section.add("import fvflops / import torch", [0.3, 0.1, 0.2])
        >>> section.lines[0].split()[-7:]
        ['0.200', '[0.150,', '0.250]', '3', '≤', '0.1:', 'MISSED']
        """
        low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if values[1:] else [values[0]] * 3
        line = f"    {name:46}{middle:>14,.3f}"
        if len(values) > 1:
            line += f"  [{low:,.3f}, {high:,.3f}] {len(values)}"
        if aim := AIMS.get(self.name.partition(": ")[0], {}).get(name):
            at, bound = aim
            line += f"  {at} {bound:g}: {'met' if _HOLDS[at](middle, bound) else 'MISSED'}"
        self.lines.append(line)

    def add_times(self, seconds: Mapping[str, Sequence[float]], pairs: Iterable[tuple[str, str]]) -> None:
        """Add the ratios of pairs of contenders, both values of a round met the same noise, and the times."""
        for above, below in pairs:
            if above in seconds and below in seconds:
                self.add(f"{above} / {below}", [a / b for a, b in zip(seconds[above], seconds[below], strict=True)])
        for name, values in seconds.items():
            self.add(f"{name}, ms", [1e3 * value for value in values])

    def run_rounds(self, contenders: Mapping[str, Callable[[], Run | None]], effort: Effort) -> dict[str, list[float]]:
        """Return the seconds of contenders in rounds, in a shuffled order, after one warm-up of each.

        One that gives None does not take part, and one that raises when it is made or warmed up is left out. Garbage is
        collected before each round, and in a round of large models before a contender too, lest it pays for what
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
                self.lines.append(f"    {name} raised, and is left out: {type(error).__name__}: {str(error)[:120]}")
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        generator = random.Random(0)
        for _ in effort.count():
            collected = float("-inf")
            for name in generator.sample(list(runs), len(runs)):
                if time.perf_counter() - collected >= _COLLECT_AFTER:
                    gc.collect()
                    collected = time.perf_counter()
                seconds[name].append(runs[name].seconds())
        return seconds

    def print(self) -> None:
        print(f"  {self.name}", *self.lines, sep="\n")
