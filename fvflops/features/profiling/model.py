"""Records of a profile: measured time and memory of modules and operators beside their FLOPs and bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fvflops.trace import PHASES, check_phase
from fvflops.trace.module_tree import ModuleTree

# A row is an outlier if its shares of the time and of the FLOPs differ by this factor and by this part of the whole.
FACTOR = 2
EXCESS = 0.05


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """Time, FLOPs, memory traffic and memory of some calls: times in ns, FLOPs in a convention, the others in bytes.

    `own_ns` excludes submodules. `read` and `written` are memory traffic without cache reuse or fusion, `least_seconds`
    the least time by a device's roofline. `unknown` op calls are unsupported, `unmoved` ones have unknown traffic.
    `before` and `after` are the memory allocated before the first and after the last call, `kept` what the calls left
    allocated, `peak` the most allocated meanwhile; None where memory was not measured.

    >>> line = ProfileRow(calls=1, total_ns=2000, flops=6000, read=1000, written=500, least_seconds=5e-7)
    >>> line.flops_per_second, line.intensity, line.roofline_share
    (3000000000.0, 4.0, 0.25)
    """

    calls: int = 0
    total_ns: int = 0
    own_ns: int = 0
    flops: int = 0
    unknown: int = 0
    read: int = 0
    written: int = 0
    unmoved: int = 0
    least_seconds: float = 0.0
    before: int | None = None
    after: int | None = None
    kept: int | None = None
    peak: int | None = None

    @property
    def bytes(self) -> int:
        """The bytes read and written."""
        return self.read + self.written

    @property
    def flops_per_second(self) -> float:
        """FLOP/s; 0 if no time was measured."""
        return self.flops * 1e9 / self.total_ns if self.total_ns else 0.0

    @property
    def intensity(self) -> float:
        """The arithmetic intensity, FLOP/byte; infinite without memory traffic, 0 without FLOPs."""
        return self.flops / self.bytes if self.bytes else math.inf if self.flops else 0.0

    @property
    def roofline_share(self) -> float:
        """The least time divided by the measured time; 0 if no time was measured."""
        return self.least_seconds * 1e9 / self.total_ns if self.total_ns else 0.0

    def __add__(self, other: ProfileRow) -> ProfileRow:
        return sum_rows((self, other))


def sum_rows(lines: Iterable[ProfileRow]) -> ProfileRow:
    """Return the sum of rows that ran in this order.

    >>> first = ProfileRow(calls=1, flops=8, before=0, after=4, kept=4, peak=6)
    >>> sum_rows([first, ProfileRow(calls=2, before=4, after=1, kept=-3)])
    ProfileRow(calls=3, total_ns=0, own_ns=0, flops=8, unknown=0, read=0, written=0, unmoved=0, least_seconds=0.0, \
before=0, after=1, kept=1, peak=6)
    """
    parts = list(lines)
    kept = [line.kept for line in parts if line.kept is not None]
    counts: dict[str, Any] = {name: sum(getattr(line, name) for line in parts) for name in _COUNTS}
    return ProfileRow(
        **counts,
        least_seconds=math.fsum(line.least_seconds for line in parts),
        before=next((line.before for line in parts if line.before is not None), None),
        after=next((line.after for line in reversed(parts) if line.after is not None), None),
        kept=sum(kept) if kept else None,
        peak=max((line.peak for line in parts if line.peak is not None), default=None),
    )


_COUNTS = ("calls", "total_ns", "own_ns", "flops", "unknown", "read", "written", "unmoved")


@dataclass(frozen=True, slots=True)
class Profile:
    """A measured run as plain data.

    `by_module` is phase → a module's canonical name → its row, with all that ran inside its calls; the root's is all of
    the phase, `outside_ns` of which ran outside all module calls. `by_operator` is phase → op → row. `columns` is which
    of "time" and "memory" were measured. `peaks` names the device of the roofline, "" for none. `unknown` is
    unsupported ops → calls, `unmoved` ops of unknown memory traffic → calls, `without_peak` dtypes without a peak on
    the device → FLOPs. `about` describes the run and the table.
    """

    modules: ModuleTree
    by_module: Mapping[str, Mapping[str, ProfileRow]]
    by_operator: Mapping[str, Mapping[str, ProfileRow]]
    columns: tuple[str, ...] = ("time",)
    outside_ns: int = 0
    peaks: str = ""
    unknown: Mapping[str, int] = field(default_factory=dict)
    unmoved: Mapping[str, int] = field(default_factory=dict)
    without_peak: Mapping[str, int] = field(default_factory=dict)
    about: Mapping[str, str] = field(default_factory=dict)

    @property
    def phases(self) -> tuple[str, ...]:
        """The phases in which an op ran, in the order of a training step."""
        return tuple(phase for phase in PHASES if phase in self.by_module)

    def whole(self, phase: str | None = None) -> ProfileRow:
        """Return the row of one phase, or of all."""
        return sum_rows(self.by_module[name].get("", ProfileRow()) for name in self._choose(phase))

    def module_lines(self, phase: str | None = None) -> dict[str, ProfileRow]:
        """Return module name → row in one phase or in all, in the order of the tree, without modules that did not run.

        A phase that was not recorded raises TraceError.
        """
        return self._lines(self.by_module, phase, self.modules.by_name)

    def operator_lines(self, phase: str | None = None) -> dict[str, ProfileRow]:
        """Return op → row in one phase or in all; a phase that was not recorded raises TraceError."""
        names = dict.fromkeys(name for lines in self.by_operator.values() for name in lines)
        return self._lines(self.by_operator, phase, names)

    def _lines(
        self, lines: Mapping[str, Mapping[str, ProfileRow]], phase: str | None, names: Iterable[str]
    ) -> dict[str, ProfileRow]:
        tables = [lines[name] for name in self._choose(phase) if name in lines]
        found = {name: [table[name] for table in tables if name in table] for name in names}
        return {name: parts[0] if len(parts) == 1 else sum_rows(parts) for name, parts in found.items() if parts}

    def _choose(self, phase: str | None) -> tuple[str, ...]:
        return self.phases if phase is None else (check_phase(phase, self.phases),)


def outlier(line: ProfileRow, whole: ProfileRow) -> str:
    """Return "slow" for a row with a far larger share of the time than of the FLOPs, "fast" for a far smaller, else "".

    >>> whole = ProfileRow(total_ns=100, flops=100)
    >>> [outlier(ProfileRow(total_ns=ns, flops=flops), whole) for ns, flops in ((30, 10), (30, 40), (3, 1), (10, 40))]
    ['slow', '', '', 'fast']
    """
    if line.unknown or not whole.total_ns or not whole.flops:
        return ""
    time, flops = line.total_ns / whole.total_ns, line.flops / whole.flops
    if time >= FACTOR * flops and time - flops >= EXCESS:
        return "slow"
    return "fast" if flops >= FACTOR * time and flops - time >= EXCESS else ""


def time_flop_ratio(line: ProfileRow, whole: ProfileRow) -> float | None:
    """Return a row's share of the time divided by its share of the FLOPs, None if one of them is unknown.

    >>> time_flop_ratio(ProfileRow(total_ns=30, flops=10), ProfileRow(total_ns=100, flops=100))
    3.0
    """
    if line.unknown or not whole.total_ns or not whole.flops:
        return None
    if not line.flops:
        return math.inf if line.total_ns else None
    return line.total_ns * whole.flops / (whole.total_ns * line.flops)
