"""Where the time of a step went: rows of work and of idle time that add up to it, to the nanosecond."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from fvflops.text import shown_by_fields

# Cause of idle time → its name.
CAUSES = {
    "launch": "host dispatches ops",
    "host": "host outside of ops",
    "data": "data loading",
    "compilation": "compilation",
    "garbage": "garbage collection",
    "saving": "saving of checkpoints",
    "synchronisation": "after a synchronisation",
    "runtime": "allocation and loading of kernels",
    "start": "from launch to start",
    "queue": "between queued kernels",
    "unknown": "no launch recorded",
}


@dataclass(frozen=True, slots=True, repr=False)
@shown_by_fields
class WorkRow:
    """Kernels of one class, op, name, arguments, phase and module in a step; of a CPU trace the ops themselves.

    `ns` is their share of the step: where kernels overlap, a moment belongs to compute before communication before
    copies, and to the kernel that started first. `kernel_ns` is the sum of their durations, `hidden_ns` the part that
    other kernels hide. `calls` are calls of the op `op`, and `macs`, `flops` (2 per multiply-add, and all others) and
    `nbytes` (memory traffic without cache reuse; of a collective its larger message) are theirs, None where unknown; a
    call is counted with its longest kernel, and by the ops inside it if they do the work. `expected_ns` is the time of
    such calls by the device's kernel model, None if unknown. `counted_ns` and `modelled_ns` are the time of the kernels
    whose FLOPs and expected time are known. `kind` is a key of KINDS, `group` "compute", "communication" or "memcpy".
    `op` is "" where no op launched it; `is_graph` is whether a captured graph did. `details` are arguments of a
    collective or a copy, as recorded.
    """

    kind: str
    group: str
    op: str
    kernel: str
    phase: str
    module: str
    inputs: tuple[Any, ...] = ()
    details: tuple[tuple[str, Any], ...] = ()
    is_graph: bool = False
    calls: int = 0
    kernels: int = 0
    kernel_ns: int = 0
    ns: int = 0
    macs: int | None = None
    flops: int | None = None
    nbytes: int | None = None
    expected_ns: float | None = None
    counted_ns: int = 0
    modelled_ns: int = 0

    @property
    def hidden_ns(self) -> int:
        """Time of the kernels that is hidden by others."""
        return self.kernel_ns - self.ns

    @property
    def lost_ns(self) -> float | None:
        """Time of the modelled kernels over the expected time; negative if they are faster."""
        return None if self.expected_ns is None else self.modelled_ns - self.expected_ns

    @property
    def flops_per_second(self) -> float | None:
        """Achieved FLOP/s of the kernels whose FLOPs are known; None where there are none."""
        return self.flops * 1e9 / self.counted_ns if self.flops and self.counted_ns else None

    @property
    def bytes_per_second(self) -> float | None:
        """Achieved bytes/s of the kernels; None where unknown."""
        return self.nbytes * 1e9 / self.kernel_ns if self.nbytes and self.kernel_ns else None


@dataclass(frozen=True, slots=True, repr=False)
@shown_by_fields
class IdleRow:
    """Idle time of one cause, a key of CAUSES; `name` is the op, Python frame or call at which the host was, in
    as many `intervals`; a gap between kernels may have several.
    """

    cause: str
    name: str
    intervals: int = 0
    ns: int = 0


@dataclass(frozen=True, slots=True, repr=False)
@shown_by_fields
class StepTimeline:
    """One step of a rank: a window of its GPU's time, in nanoseconds from the trace's first event.

    A window is from the step's first kernel to the next step's, or to the end of the trace's last kernel, so that
    windows add up to the trace. Times are as in TraceLens and HTA: `compute_ns` is the union of kernels that are no
    communication (memset included), `exposed_communication_ns` the communication that no compute hides,
    `exposed_memcpy_ns` the copies that neither hides; `busy_ns` is the sum of these three, `idle_ns` the rest.
    `communication_ns` and `memcpy_ns` are unions, hidden parts included. `host_ns` is the step's time on the host, None
    without steps. `work` rows add up to `busy_ns`, `idle` rows to `idle_ns`.
    """

    name: str
    start_ns: int
    end_ns: int
    compute_ns: int
    exposed_communication_ns: int
    exposed_memcpy_ns: int
    communication_ns: int
    memcpy_ns: int
    host_ns: int | None
    work: tuple[WorkRow, ...]
    idle: tuple[IdleRow, ...]

    @property
    def total_ns(self) -> int:
        """Length of the window."""
        return self.end_ns - self.start_ns

    @property
    def busy_ns(self) -> int:
        """Time in which something runs."""
        return self.compute_ns + self.exposed_communication_ns + self.exposed_memcpy_ns

    @property
    def idle_ns(self) -> int:
        """Time in which nothing runs."""
        return self.total_ns - self.busy_ns


Row = TypeVar("Row", WorkRow, IdleRow)
_NAMES = ("kind", "group", "op", "kernel", "phase", "module", "inputs", "details", "is_graph", "cause", "name")


def sum_rows(rows: Iterable[Row], key: Callable[[Row], Hashable]) -> list[Row]:
    """Return a row for each key, the longest first: numbers are summed, differing values are left empty."""
    groups: dict[Hashable, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return sorted((_sum(group) for group in groups.values()), key=lambda row: -row.ns)


def _sum(rows: Sequence[Row]) -> Row:
    if len(rows) == 1:
        return rows[0]
    summed: dict[str, Any] = {}
    for name in (field.name for field in fields(rows[0])):
        values = [value for row in rows if (value := getattr(row, name)) is not None]
        if name in _NAMES:
            summed[name] = values[0] if values.count(values[0]) == len(values) else type(values[0])()
        else:
            summed[name] = sum(values) if values else None
    return replace(rows[0], **summed)
