"""Profile of a run: measured time and memory of modules and operators, with their FLOPs and bytes."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from fvflops.counting.count_trace import CostModel, RegionCost, find_covered, name_region, region_costs
from fvflops.counting.nested_timeline import BY_OWNER, sum_times
from fvflops.counting.traffic.byte_costs import split_by_aliasing
from fvflops.measure.op_roofline import Roofline
from fvflops.reports.display import Displayed
from fvflops.text import short_repr, shown_by_fields
from fvflops.trace import PHASES, Counts, Event, Status, Trace, TraceError, check_phase
from fvflops.trace.module_tree import ModuleTree, innermost, modules_above
from fvflops.trace.trace import RegionCall, walk_events
from fvflops.units import format_seconds, format_short

# A row is an outlier if its shares of the time and of the FLOPs differ by this factor and by this difference.
FACTOR = 2
EXCESS = 0.05


@dataclass(frozen=True, slots=True, repr=False)
@shown_by_fields
class ProfileRow:
    """Time, FLOPs, memory traffic and memory of some calls: times in ns, FLOPs in a convention, the others in bytes.

    `flops` are counted by the convention; `hardware_flops` count a MAC as 2 in every convention, as the peaks of
    devices do; FLOP/s and FLOP/byte use these. `self_ns` excludes submodules. `read` and `written` are memory traffic
    without cache reuse or fusion, `least_seconds` the least time by a device's roofline. `unsupported` is the number of
    calls of unsupported ops, `unknown_traffic` of calls with unknown traffic. `before` and `after` are the memory
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

    @property
    def bytes(self) -> int:
        return self.read + self.written

    @property
    def flops_per_second(self) -> float:
        """FLOP/s with a MAC as 2; 0 if no time was measured."""
        return self.hardware_flops * 1e9 / self.total_ns if self.total_ns else 0.0

    @property
    def intensity(self) -> float:
        """The arithmetic intensity, FLOP/byte with a MAC as 2; infinite without memory traffic, 0 without FLOPs."""
        return self.hardware_flops / self.bytes if self.bytes else math.inf if self.hardware_flops else 0.0

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
    the phase, including `outside_ns` outside all module calls. `by_operator` is phase → op → row. `columns` is which
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
        """Return called module → row of a phase or of all, in tree order; TraceError for an unrecorded phase."""
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


def measure_rows(trace: Trace, counts: Counts, cost_model: CostModel, roofline: Roofline | None = None) -> Profile:
    """Return the time and memory of the modules and operators of a measured Trace, with their FLOPs and bytes.

    A module's row has all ops that ran during its calls, whichever module owns them, as its time does. In the backward
    pass and the optimizer's step, where no module is called, it has the ops of the module and its submodules by name. A
    module that is never called, such as a ModuleList, has the sums of its submodules. Ops outside all module calls are
    in the root's row. Where the cost model counts a module as a whole, its ops are one operator, named by its class. A
    Trace without measured columns raises TraceError.
    """
    columns = tuple(name for name in ("time", "memory") if name in trace.info.measured)
    if not columns or trace.events is None:
        raise TraceError('this trace has no measured times or memory: record it with measure={"time", "memory"}')
    rows = _Rows(trace, cost_model)
    rows.walk()
    for entry in counts.entries:
        unsupported = entry.calls if entry.status is Status.UNSUPPORTED else 0
        hardware_flops = 2 * entry.macs + entry.flops
        sums = {"flops": entry.value, "hardware_flops": hardware_flops, "unsupported": unsupported}
        rows.add(entry.scope, entry.phase, entry.op, sums)
    unknown_traffic = _add_bytes(trace, rows)
    if roofline is not None:
        for bounded in roofline.entries:
            rows.add(bounded.scope, bounded.phase, bounded.op, {"least_seconds": bounded.load.seconds})
    by_module, by_operator = (
        {phase: {name: ProfileRow(**row) for name, row in table.items()} for phase, table in tables.items()}
        for tables in (rows.modules, rows.operators)
    )
    return Profile(
        trace.modules,
        by_module,
        by_operator,
        columns,
        outside_ns=rows.outside_ns,
        peaks="" if roofline is None else roofline.device,
        unsupported=dict(counts.ledger()[Status.UNSUPPORTED]),
        unknown_traffic=dict(unknown_traffic),
        without_peak={} if roofline is None else dict(roofline.without_peak),
        about=trace.about,
    )


def _add_bytes(trace: Trace, rows: _Rows) -> Counter[str]:
    """Add the memory traffic of ops, and return op → calls for ops whose traffic is unknown."""
    moved, cost_model = split_by_aliasing(trace)
    scopes = moved.scopes()
    unknown_traffic: Counter[str] = Counter()
    for (index, stack, phase), calls in moved.calls.items():
        op = moved.signatures[index].packet
        traffic = cost_model.op_traffic(moved.signatures[index])
        if traffic is None:
            unknown_traffic[op] += calls
            sums = {"unknown_traffic": calls}
        else:
            sums = {"read": traffic[0] * calls, "written": traffic[1] * calls}
        rows.add(scopes[stack], phase, rows.covering.get((stack, phase), op), sums)
    return unknown_traffic


class _Row(Counter[str]):
    """The fields of a ProfileRow so far."""

    def add_memory(self, before: int, after: int, peak: int | None) -> None:
        """Add the allocated bytes before, after and during a call."""
        self.setdefault("before", before)
        self["after"] = after
        self["retained"] += after - before
        if peak is not None:
            self["peak"] = max(peak, self.get("peak", peak))


class _Rows:
    """Rows by phase and module or operator; `covering` is (stack, phase) → operator that includes all ops there."""

    def __init__(self, trace: Trace, cost_model: CostModel) -> None:
        self._trace = trace
        self._region_costs = region_costs(trace, cost_model)
        self.covering = _find_covering(trace, self._region_costs)
        self._scopes = trace.scopes()
        self._modules_by_scope: dict[tuple[tuple[str, ...], str], tuple[str, ...]] = {}
        # Open region → the peak memory of ops in it so far.
        self._peaks: dict[RegionCall | None, int] = {}
        self.modules: dict[str, dict[str, _Row]] = defaultdict(lambda: defaultdict(_Row))
        self.operators: dict[str, dict[str, _Row]] = defaultdict(lambda: defaultdict(_Row))
        self.outside_ns = 0
        # Thread → the rows of the modules of its last op in a backward pass or optimizer step, and the bytes
        # allocated after that op.
        self._last_backward_op: dict[int, tuple[list[_Row], int]] = {}
        for phase, timings in sum_times(trace).modules.items():
            for name, timing in timings.items():
                # Where no module is called, the timings count the calls of ops.
                calls = 0 if phase in BY_OWNER else timing.calls
                self.modules[phase][name].update(calls=calls, total_ns=timing.total, self_ns=timing.own)
        self._called_modules = {phase: frozenset(rows) for phase, rows in self.modules.items()}

    def walk(self) -> None:
        """Add the times of operators and of uncalled modules, and the memory of both."""
        for kind, event, call, _ in walk_events(self._trace):
            if kind == "op":
                self._add_op(event, call)
            elif kind == "exit" and call is not None:
                self._exit_region(event, call)
            elif kind == "unfinished" and call is not None:
                self._record_peak(call.parent, self._peaks.pop(call, None))

    def add(self, scope: tuple[str, ...], phase: str, op: str, sums: Mapping[str, Any]) -> None:
        """Add op calls of a scope to all modules that include it, and to their operator."""
        modules = self.modules[phase]
        for row in (*[modules[name] for name in self._modules_of(scope, phase)], self.operators[phase][op]):
            row.update(sums)  # which adds

    def _modules_of(self, scope: tuple[str, ...], phase: str) -> tuple[str, ...]:
        """Return the modules that include the ops of a scope, the root first."""
        if (scope, phase) not in self._modules_by_scope:
            owner = innermost(scope)
            names = [*modules_above(owner), owner]
            if phase not in BY_OWNER:
                names = ["", *(name for inner in scope for name in (*self._uncalled_above(inner, phase), inner))]
            self._modules_by_scope[scope, phase] = tuple(dict.fromkeys(names))
        return self._modules_by_scope[scope, phase]

    def _uncalled_above(self, name: str, phase: str) -> Iterator[str]:
        called = self._called_modules.get(phase, frozenset())
        return (above for above in modules_above(name) if above not in called)

    def _record_peak(self, call: RegionCall | None, peak: int | None) -> None:
        if peak is not None:
            self._peaks[call] = max(peak, self._peaks.get(call, peak))

    def _add_op(self, event: Event, region_call: RegionCall | None) -> None:
        scope, phase, duration = self._scopes[event.stack], event.phase, event.duration_ns or 0
        covering = self.covering.get((event.stack, phase))
        operator = self.operators[phase][self._trace.signatures[event.item].packet if covering is None else covering]
        operator["calls"] += covering is None
        operator["total_ns"] += duration
        operator["self_ns"] += duration
        is_outside = not scope and phase not in BY_OWNER
        if is_outside:
            # Outside all module calls, such as a loss: in the root's row, though not in the time of its calls.
            self.modules[phase][""].update(total_ns=duration, self_ns=duration)
            self.outside_ns += duration
        if event.memory_before is None or event.memory_after is None:
            return
        memory = event.memory_before, event.memory_after, event.memory_peak
        operator.add_memory(*memory)
        # Memory that autograd frees after an op is freed before the next one.
        previous, allocated = self._last_backward_op.pop(event.thread, ([], 0))
        for row in previous:
            row["retained"] += event.memory_before - allocated
        if phase in BY_OWNER:
            rows = [self.modules[phase][name] for name in self._modules_of(scope, phase)]
            for row in rows:
                row.add_memory(*memory)
            self._last_backward_op[event.thread] = rows, event.memory_after
            return
        if is_outside:
            self.modules[phase][""].add_memory(*memory)
        self._record_peak(region_call, event.memory_peak)

    def _exit_region(self, event: Event, call: RegionCall) -> None:
        region = self._trace.regions[call.region]
        self._record_peak(call, event.memory_peak)
        peak = self._peaks.pop(call, None)
        self._record_peak(call.parent, peak)
        if event.item in self._region_costs and (event.stack, event.phase) not in self.covering and not event.raised:
            self.operators[event.phase][name_region(self._trace, region)]["calls"] += 1
        if region.kind != "module" or event.phase in BY_OWNER:
            return
        rows = [self.modules[event.phase][region.name]]
        regions = [self._trace.regions[outer.region] for outer in call.enclosing()]
        enclosing = [outer.name for outer in regions if outer.kind == "module"]
        for name in self._uncalled_above(region.name, event.phase):
            if not any(name in (*modules_above(inner), inner) for inner in enclosing):
                rows.append(self.modules[event.phase][name])
                rows[-1]["total_ns"] += event.duration_ns or 0
        if event.memory_before is not None and event.memory_after is not None:
            for row in rows:
                row.add_memory(event.memory_before, event.memory_after, peak)


def _find_covering(trace: Trace, costs: Mapping[int, RegionCost]) -> dict[tuple[int, str], str]:
    """Return (stack, phase) → the operator that covers its ops."""
    regions = {trace.region_signatures[index].region for index, cost in costs.items() if cost.exclusive}
    return {
        (stack, phase): name_region(trace, trace.regions[next(item for item in trace.stacks[stack] if item in regions)])
        for stack, phase in find_covered(trace, costs)
    }


def fit_ops(trace: Trace) -> Trace:
    """Return a Trace in which the ops of each forward module call take no longer than the call without its children."""
    own: Counter[RegionCall] = Counter()
    ops: dict[RegionCall, list[int]] = defaultdict(list)
    for kind, event, region_call, index in walk_events(trace):
        call = _innermost_module(trace, region_call)
        if call is None or event.phase != "forward":
            continue
        if kind == "op":
            ops[call].append(index)
        elif kind == "exit" and call is region_call:
            own[call] += event.duration_ns or 0
            caller = _innermost_module(trace, call.parent)
            if caller is not None:
                own[caller] -= event.duration_ns or 0
    events = list(trace.events or ())
    for call, indexes in ops.items():
        taken, available = sum(events[index].duration_ns or 0 for index in indexes), max(own[call], 0)
        for index in indexes if taken > available else ():
            events[index] = events[index]._replace(duration_ns=(events[index].duration_ns or 0) * available // taken)
    return replace(trace, events=tuple(events))


def _innermost_module(trace: Trace, call: RegionCall | None) -> RegionCall | None:
    """Return a region call if it is a module's, else the innermost module call around it."""
    while call is not None and trace.regions[call.region].kind != "module":
        call = call.parent
    return call
