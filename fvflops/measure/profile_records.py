"""Records of a profile: measured time and memory of modules and operators, with their FLOPs and bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from fvflops.reports.display import Displayed
from fvflops.text import record_repr, short_repr
from fvflops.trace import PHASES, check_phase
from fvflops.trace.module_tree import ModuleTree
from fvflops.units import format_seconds, format_short

# A row is an outlier if its shares of the time and of the FLOPs differ by this factor and by this difference.
FACTOR = 2
EXCESS = 0.05


@dataclass(frozen=True, slots=True, repr=False)
class ProfileRow:
    """Time, FLOPs, memory traffic and memory of some calls: times in ns, FLOPs in a convention, the others in bytes.

    `flops` are those of the convention; `hardware_flops` have a MAC as 2 in every convention, as the peaks of devices
    do, and FLOP/s and FLOP/byte are of these. `self_ns` excludes submodules. `read` and `written` are memory traffic
    without cache reuse or fusion, `least_seconds` the least time by a device's roofline. `unsupported` is the number of
    calls of unsupported ops, `unknown_traffic` that of ops with unknown traffic. `before` and `after` are the memory
    allocated before the first and after the last call, `retained` the bytes that the calls allocated and did not free,
    `peak` the most allocated during them; None where memory was not measured.
    """

    calls: int = 0
    total_ns: int = 0
    self_ns: int = 0
    flops: int = 0
    hardware_flops: int = 0
    unsupported: int = 0
    read: int = 0
    written: int = 0
    unknown_traffic: int = 0
    least_seconds: float = 0.0
    before: int | None = None
    after: int | None = None
    retained: int | None = None
    peak: int | None = None

    def __repr__(self) -> str:
        return record_repr(self)

    @property
    def bytes(self) -> int:
        """The bytes read and written."""
        return self.read + self.written

    @property
    def flops_per_second(self) -> float:
        """FLOP/s with a MAC as 2; 0 if no time was measured."""
        return self.hardware_flops * 1e9 / self.total_ns if self.total_ns else 0.0

    @property
    def intensity(self) -> float:
        """The arithmetic intensity, FLOP/byte with a MAC as 2; infinite without memory traffic, 0 without FLOPs."""
        flops = self.hardware_flops
        return flops / self.bytes if self.bytes else math.inf if flops else 0.0

    @property
    def roofline_share(self) -> float:
        """The least time divided by the measured time; 0 if no time was measured."""
        return self.least_seconds * 1e9 / self.total_ns if self.total_ns else 0.0

    def __add__(self, other: ProfileRow) -> ProfileRow:
        return sum_rows((self, other))


def sum_rows(rows: Iterable[ProfileRow]) -> ProfileRow:
    """Return the sum of rows that ran in this order.

    >>> first = ProfileRow(calls=1, flops=8, before=0, after=4, retained=4, peak=6)
    >>> sum_rows([first, ProfileRow(calls=2, before=4, after=1, retained=-3)])
    ProfileRow(calls=3, flops=8, before=0, after=1, retained=1, peak=6)
    """
    parts = list(rows)
    retained = [row.retained for row in parts if row.retained is not None]
    counts: dict[str, Any] = {name: sum(getattr(row, name) for row in parts) for name in _COUNTS}
    return ProfileRow(
        **counts,
        least_seconds=math.fsum(row.least_seconds for row in parts),
        before=next((row.before for row in parts if row.before is not None), None),
        after=next((row.after for row in reversed(parts) if row.after is not None), None),
        retained=sum(retained) if retained else None,
        peak=max((row.peak for row in parts if row.peak is not None), default=None),
    )


_COUNTS = [field.name for field in fields(ProfileRow) if field.type == "int"]


@dataclass(frozen=True, slots=True, repr=False)
class Profile(Displayed):
    """A measured run as plain data.

    `by_module` is phase → a module's canonical name → its row, with all that ran inside its calls; the root's is all of
    the phase, `outside_ns` of which ran outside all module calls. `by_operator` is phase → op → row. `columns` is which
    of "time" and "memory" were measured. `peaks` names the device of the roofline, "" for none. `unsupported` is
    unsupported op → calls, `unknown_traffic` op of unknown memory traffic → calls, `without_peak` dtype without a peak
    on the device → FLOPs. `about` describes the run and the table.
    """

    _report = "fvflops.measure.profile_report:profile_report"

    modules: ModuleTree
    by_module: Mapping[str, Mapping[str, ProfileRow]]
    by_operator: Mapping[str, Mapping[str, ProfileRow]]
    columns: tuple[str, ...] = ("time",)
    outside_ns: int = 0
    peaks: str = ""
    unsupported: Mapping[str, int] = field(default_factory=dict)
    unknown_traffic: Mapping[str, int] = field(default_factory=dict)
    without_peak: Mapping[str, int] = field(default_factory=dict)
    about: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        total = self.total()
        time = format_seconds(total.total_ns / 1e9) if total.total_ns else ""
        return short_repr(self, self.modules.root.class_name, time, f"{format_short(total.flops)} FLOPs")

    @property
    def phases(self) -> tuple[str, ...]:
        """The phases in which an op ran, in the order of a training step."""
        return tuple(phase for phase in PHASES if phase in self.by_module)

    def total(self, phase: str | None = None) -> ProfileRow:
        """Return the sum of one phase, or of all."""
        return sum_rows(self.by_module[name].get("", ProfileRow()) for name in self._choose_phases(phase))

    def module_rows(self, phase: str | None = None) -> dict[str, ProfileRow]:
        """Return module name → row in one phase or in all, in the order of the tree, without modules that did not run.

        A phase that was not recorded raises TraceError.
        """
        return self._rows(self.by_module, phase, self.modules.by_name)

    def operator_rows(self, phase: str | None = None) -> dict[str, ProfileRow]:
        """Return op → row in one phase or in all; a phase that was not recorded raises TraceError."""
        names = dict.fromkeys(name for rows in self.by_operator.values() for name in rows)
        return self._rows(self.by_operator, phase, names)

    def _rows(
        self, rows: Mapping[str, Mapping[str, ProfileRow]], phase: str | None, names: Iterable[str]
    ) -> dict[str, ProfileRow]:
        tables = [rows[name] for name in self._choose_phases(phase) if name in rows]
        by_name = {name: [table[name] for table in tables if name in table] for name in names}
        return {name: parts[0] if len(parts) == 1 else sum_rows(parts) for name, parts in by_name.items() if parts}

    def _choose_phases(self, phase: str | None) -> tuple[str, ...]:
        return self.phases if phase is None else (check_phase(phase, self.phases),)


def outlier(row: ProfileRow, total: ProfileRow) -> str:
    """Return "slow" for a row with far more of the time than of the FLOPs, "fast" for one with far less, else ""."""
    if row.unsupported or not total.total_ns or not total.flops:
        return ""
    time, flops = row.total_ns / total.total_ns, row.flops / total.flops
    if time >= FACTOR * flops and time - flops >= EXCESS:
        return "slow"
    return "fast" if flops >= FACTOR * time and flops - time >= EXCESS else ""


def time_flop_ratio(row: ProfileRow, total: ProfileRow) -> float | None:
    """Return a row's share of the time divided by its share of the FLOPs, None if one of them is unknown."""
    if row.unsupported or not total.total_ns or not total.flops:
        return None
    if not row.flops:
        return math.inf if row.total_ns else None
    return row.total_ns * total.flops / (total.total_ns * row.flops)
