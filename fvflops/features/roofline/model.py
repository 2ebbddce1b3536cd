"""The roofline: of each op call the least time that a device needs for it, by its FLOPs and by its bytes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from fvflops.trace.counts import Counts
from fvflops.trace.module_tree import ModuleTree


class Load(NamedTuple):
    """What some op calls ask of a device, and the least seconds that they take one after the other.

    `flops` are floating-point operations, a multiply-add being 2; `bytes` what is read and written. `compute_bound` are
    those of the `seconds` that go to calls which the device's peak bounds, rather than its memory.
    """

    calls: int = 0
    flops: int = 0
    bytes: int = 0
    seconds: float = 0.0
    compute_bound: float = 0.0

    @property
    def intensity(self) -> float:
        """The arithmetic intensity, FLOP/byte; infinite where nothing moves, 0 where nothing is done."""
        return self.flops / self.bytes if self.bytes else math.inf if self.flops else 0.0

    @property
    def bound(self) -> str:
        """What bounds most of the seconds: "compute" or "memory"; "" where there are none."""
        if not self.seconds:
            return ""
        return "compute" if 2 * self.compute_bound > self.seconds else "memory"


def sum_loads(loads: Iterable[Load]) -> Load:
    """Return what all these loads come to together.

    >>> sum_loads([Load(1, 8, 4, 2.0, 2.0), Load(3, 0, 4, 1.0)])
    Load(calls=4, flops=8, bytes=8, seconds=3.0, compute_bound=2.0)
    """
    columns = list(zip(*loads, strict=True))
    if not columns:
        return Load()
    return Load(*map(sum, columns[:3]), *map(math.fsum, columns[3:]))


class Bounded(NamedTuple):
    """All calls of one signature in one scope and phase.

    `scope` holds the names of the modules it ran under, root first; `dtype` is that at whose peak its products run, by
    the device's name for it.
    """

    scope: tuple[str, ...]
    phase: str
    op: str
    label: str
    dtype: str
    load: Load


@dataclass(frozen=True, slots=True)
class Roofline:
    """What bounds each op call of a trace on a device, and the least time that it takes.

    `device` is its name, `bandwidth` in bytes/s, `peaks` in FLOP/s by dtype; `table` the convention that counted the
    FLOPs. `unknown` are the ops without a formula, `unmoved` those of which the bytes are not known, by their calls;
    `without_peak` holds the FLOPs in dtypes that the device has no peak for. What all these take is not in the times.

    >>> from fvflops.trace import ModuleInfo
    >>> tree = ModuleTree({name: ModuleInfo(name, name, "Module") for name in ("", "fc")})
    >>> call = Bounded(("", "fc"), "forward", "aten::mm", "mm", "bf16", Load(1, 60, 40, 1e-9))
    >>> roofline = Roofline("mine", 10**12, {"bf16": 4 * 10**14}, "exact", tree, (call,))
    >>> roofline.ridge("bf16"), roofline.by_module()["fc"].intensity, roofline.by_module()["fc"].bound
    (400.0, 1.5, 'memory')
    """

    device: str
    bandwidth: int
    peaks: Mapping[str, int]
    table: str
    modules: ModuleTree
    entries: tuple[Bounded, ...]
    unknown: Mapping[str, int] = field(default_factory=Counter)
    unmoved: Mapping[str, int] = field(default_factory=Counter)
    without_peak: Mapping[str, int] = field(default_factory=Counter)

    def ridge(self, dtype: str) -> float:
        """Return the ridge point of a dtype, FLOP/byte: the intensity above which the peak bounds, not the memory."""
        return self.peaks[dtype] / self.bandwidth

    def total(self) -> Load:
        """Return what the whole run comes to."""
        return sum_loads(entry.load for entry in self.entries)

    def by_module(self, ancestors: str = "owner") -> dict[str, Load]:
        """Return module name → load, for every module in which anything ran; `ancestors` is that of `Counts`."""
        counts = Counts("bytes", self.modules, ())
        loads: dict[str, list[Load]] = {}
        for entry in self.entries:
            for name in counts.of_scope(entry.scope, ancestors):
                loads.setdefault(name, []).append(entry.load)
        return {name: sum_loads(loads[name]) for name in self.modules.places if name in loads}

    def by_operator(self) -> dict[str, Load]:
        """Return operator label → load, that with the longest time first."""
        return _by_time((entry.label, entry.load) for entry in self.entries)

    def by_phase(self) -> dict[str, Load]:
        """Return phase → load."""
        return _by_time((entry.phase, entry.load) for entry in self.entries)


def _by_time(items: Iterable[tuple[str, Load]]) -> dict[str, Load]:
    loads: dict[str, list[Load]] = {}
    for name, load in items:
        loads.setdefault(name, []).append(load)
    sums = {name: sum_loads(parts) for name, parts in loads.items()}
    return dict(sorted(sums.items(), key=lambda item: (-item[1].seconds, item[0])))
