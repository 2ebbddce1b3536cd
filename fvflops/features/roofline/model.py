"""Records of a roofline: FLOPs, bytes, what bounds them, and the least time on a device, for each op."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from fvflops.reports.display import Displayed
from fvflops.text import record_repr, short_repr
from fvflops.trace.counts import Counts
from fvflops.trace.module_tree import ModuleTree
from fvflops.units import format_seconds


class Load(NamedTuple):
    """Work of some op calls, and the least seconds they take on a device, one after the other.

    `flops` are floating-point operations, a multiply-add being 2; `bytes` are read and written. `compute_bound` is the
    part of `seconds` spent in compute-bound calls; the others are memory-bound.
    """

    calls: int = 0
    flops: int = 0
    bytes: int = 0
    seconds: float = 0.0
    compute_bound: float = 0.0

    def __repr__(self) -> str:
        return record_repr(self)

    @property
    def intensity(self) -> float:
        """The arithmetic intensity, FLOP/byte; infinite without memory traffic, 0 without FLOPs."""
        return self.flops / self.bytes if self.bytes else math.inf if self.flops else 0.0

    @property
    def bound(self) -> str:
        """What bounds most of the time: "compute" or "memory", "" if there is none."""
        if not self.seconds:
            return ""
        return "compute" if 2 * self.compute_bound > self.seconds else "memory"


def sum_loads(loads: Iterable[Load]) -> Load:
    """Return the sum of loads.

    >>> sum_loads([Load(1, 8, 4, 2.0, 2.0), Load(3, 0, 4, 1.0)])
    Load(calls=4, flops=8, bytes=8, seconds=3.0, compute_bound=2.0)
    """
    columns = list(zip(*loads, strict=True))
    if not columns:
        return Load()
    return Load(*map(sum, columns[:3]), *map(math.fsum, columns[3:]))


class Bounded(NamedTuple):
    """The load of all calls of one signature in one scope and phase.

    `scope` has the names of the modules that the calls ran under, root first; `dtype` is the short name of the dtype
    whose peak applies to its matrix products.
    """

    scope: tuple[str, ...]
    phase: str
    op: str
    label: str
    dtype: str
    load: Load

    def __repr__(self) -> str:
        return record_repr(self)


@dataclass(frozen=True, slots=True, repr=False)
class Roofline(Displayed):
    """What bounds each op call of a trace on a device, and the least time that it takes.

    `device` is its name, `bandwidth` in bytes/s, `peaks` in FLOP/s by dtype; `table` is the convention, which counts
    `convention_flops` with `multiply_add` for a MAC; all other FLOPs here have 2, as peaks do.
    `unsupported` is op → calls, `unknown_traffic` op of unknown memory traffic → calls, `without_peak` dtype without a
    peak on the device → FLOPs. The times do not include these.

    >>> from fvflops.trace import ModuleInfo
    >>> tree = ModuleTree({name: ModuleInfo(name, name, "Module") for name in ("", "fc")})
    >>> call = Bounded(("", "fc"), "forward", "aten::mm", "mm", "bf16", Load(1, 60, 40, 1e-9))
    >>> roofline = Roofline("mine", 10**12, {"bf16": 4 * 10**14}, "exact", tree, (call,))
    >>> roofline.ridge("bf16"), roofline.by_module()["fc"].intensity, roofline.by_module()["fc"].bound
    (400.0, 1.5, 'memory')
    """

    _report = "fvflops.features.roofline.report:roofline_report"

    device: str
    bandwidth: int
    peaks: Mapping[str, int]
    table: str
    modules: ModuleTree
    entries: tuple[Bounded, ...]
    unsupported: Mapping[str, int] = field(default_factory=Counter)
    unknown_traffic: Mapping[str, int] = field(default_factory=Counter)
    without_peak: Mapping[str, int] = field(default_factory=Counter)
    multiply_add: int = 2
    convention_flops: int = 0

    def __repr__(self) -> str:
        seconds = format_seconds(self.total().seconds)
        return short_repr(self, self.modules.root.class_name, f"at least {seconds} on {self.device}")

    def ridge(self, dtype: str) -> float:
        """Return the ridge point of a dtype, FLOP/byte: the intensity above which work is compute-bound."""
        return self.peaks[dtype] / self.bandwidth

    def total(self) -> Load:
        """Return the load of the whole run."""
        return sum_loads(entry.load for entry in self.entries)

    def by_module(self, ancestors: str = "owner") -> dict[str, Load]:
        """Return module name → load, for every module in which an op ran; `ancestors` is that of `Counts`."""
        counts = Counts("bytes", self.modules, ())
        loads: dict[str, list[Load]] = {}
        for entry in self.entries:
            for name in counts.of_scope(entry.scope, ancestors):
                loads.setdefault(name, []).append(entry.load)
        return {name: sum_loads(loads[name]) for name in self.modules.by_name if name in loads}

    def by_operator(self) -> dict[str, Load]:
        """Return operator label → load, the longest time first."""
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
