"""Cost of each module without its submodules, by phase and operator, in several measures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fvflops import __version__
from fvflops.counting.metrics import METRICS, MetricCounts
from fvflops.counting.nested_timeline import BY_OWNER, read_times
from fvflops.counting.uncounted_work import find_unsupported_locations
from fvflops.trace import Counts, Entry, Status, Trace
from fvflops.trace.module_tree import ModuleTree, innermost, modules_above
from fvflops.trace.timeline import Timeline
from fvflops.units import format_seconds, format_short
from fvflops.views.analysed_run import AnalysedRun, describe_run


@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """Allocated bytes after each op of a run.

    `layers` is kind of memory → bytes after each op, the lowest layer first. `ops`, `modules` and `phases`
    name each op, its module and its phase. `measured`: the bytes were measured, not predicted.
    """

    layers: Mapping[str, Sequence[int]]
    ops: Sequence[str]
    modules: Sequence[str]
    phases: Sequence[str]
    measured: bool = False

    def totals(self) -> list[int]:
        """Return the sum of the layers after each op."""
        return [sum(values) for values in zip(*self.layers.values(), strict=True)]


@dataclass(frozen=True, slots=True)
class Peaks:
    """The peaks of a device: its memory's `bandwidth` in bytes/s, and FLOP/s by dtype."""

    device: str
    bandwidth: int
    flops: Mapping[str, int] = field(default_factory=dict)


# Time of a module outside of ops: Python, and hooks.
BETWEEN_OPS = "(between ops)"


class Cell(NamedTuple):
    """A module (its canonical name; submodules excluded), a phase and an operator, "" where a measure has none."""

    module: str
    phase: str = ""
    operator: str = ""


@dataclass(frozen=True, slots=True)
class Measure:
    """A counted or measured quantity: its title, its unit ("", "B" or "ns") and its value in each cell.

    `unsupported` is the number of unsupported op calls in a cell, which `values` omit. `note` describes the quantity.
    """

    title: str
    values: Mapping[Cell, int]
    unit: str = ""
    note: str = ""
    unsupported: Mapping[Cell, int] = field(default_factory=dict)

    def total(self) -> int:
        return sum(self.values.values())


@dataclass(frozen=True, slots=True)
class Breakdown:
    """One analysed model in several measures, by module, phase and operator.

    `measures` maps a key ("flops", "macs", "activations", "parameters", "bytes", "calls", "time" ...) to its measure,
    in the order in which they are shown. `ledger`, `unsupported_elements`, `unsupported_locations` and `about` are as
    in Summary. `name` is the model as the user named it, such as "timm:resnet50", "" for its class. `timeline` has the
    calls of a timed run, `memory` the memory after each op, `peaks` the peaks for a roofline.
    """

    modules: ModuleTree
    measures: Mapping[str, Measure]
    ledger: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    unsupported_elements: Mapping[str, int] = field(default_factory=dict)
    unsupported_locations: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    about: Mapping[str, str] = field(default_factory=dict)
    name: str = ""
    timeline: Timeline | None = None
    memory: MemoryCurve | None = None
    peaks: Peaks | None = None

    def title(self) -> str:
        """Return the model's name, else its class."""
        return self.name or self.modules.root.class_name or "model"


def read_breakdown(run: AnalysedRun) -> Breakdown:
    """Return the counts of a run in all measures that its Trace and table provide.

    These are FLOPs, MACs and activations where there is a table, parameters, bytes, op calls, and time where it was
    measured. An op belongs to the innermost module around it.
    """
    trace, counts = run.trace, run.counts
    counted = MetricCounts(trace, run.table, counts)
    # All measures name an op as the counts of the run do.
    labels = {entry.op: entry.label for entry in reversed(counts.entries)}
    measures = {}
    if counts.metric not in METRICS:
        measures[counts.metric] = _measure("Count", counts, {}, "", "counted by the handles of this analysis")
    for name in counted.names():
        metric = METRICS[name]
        measures[name] = _measure(metric.title, counted[name], labels, metric.unit, metric.note)
    measures["calls"] = Measure("Op calls", _sum_cells(counts, lambda entry: entry.calls, {}), "", "calls of operators")
    if trace.events is not None and "time" in trace.about.get("measured", ""):
        measures["time"] = _measure_time(trace, labels)
    return Breakdown(
        modules=trace.modules,
        measures=measures,
        ledger={status.value: dict(calls) for status, calls in counts.ledger().items()},
        unsupported_elements=dict(counts.unsupported_elements()),
        unsupported_locations=find_unsupported_locations(trace, counts),
        about={"fvflops": __version__, **describe_run(run)},
    )


def _sum_cells(counts: Counts, weigh: Callable[[Entry], int], labels: Mapping[str, str]) -> dict[Cell, int]:
    """Return the sum of `weigh` over the entries of each cell; `labels` renames ops."""
    sums: Counter[Cell] = Counter()
    for entry in counts.entries:
        if value := weigh(entry):
            sums[Cell(innermost(entry.scope), entry.phase, labels.get(entry.op, entry.label))] += value
    return dict(sums)


def _measure(title: str, counts: Counts, labels: Mapping[str, str], unit: str, note: str) -> Measure:
    values = _sum_cells(counts, lambda entry: entry.value, labels)
    unsupported = _sum_cells(counts, lambda entry: entry.calls * (entry.status is Status.UNSUPPORTED), labels)
    return Measure(title, values, unit, note, unsupported)


def _measure_time(trace: Trace, labels: Mapping[str, str]) -> Measure:
    """Return the times of ops by owner; the rest of a module's time is the operator BETWEEN_OPS."""
    scopes, sums = trace.scopes(), Counter[Cell]()
    inside: Counter[tuple[str, str]] = Counter()
    for event in trace.events or ():
        if event.kind == "op" and event.duration_ns:
            scope = scopes[event.stack]
            op = trace.signatures[event.item].packet
            label = labels.get(op, op.removeprefix("aten::"))
            sums[Cell(innermost(scope), event.phase, label)] += event.duration_ns
            if scope:  # else it ran outside of all calls, such as the loss
                inside[scope[-1], event.phase] += event.duration_ns
    for phase, timings in read_times(trace).modules.items():
        for name, timing in timings.items():
            rest = timing.own - inside[name, phase]
            # On an asynchronous device ops can take longer than the host measures for their module.
            if phase not in BY_OWNER and rest > 0:
                sums[Cell(name, phase, BETWEEN_OPS)] = rest
    return Measure("Time", dict(sums), unit="ns", note="measured: ops, and modules between their ops")


def sum_measures(values: Mapping[Cell, int]) -> Counter[str]:
    """Return module name → sum of the values, submodules included; "" is the model."""
    sums: Counter[str] = Counter()
    for cell, value in values.items():
        for name in (*modules_above(cell.module), cell.module):
            sums[name] += value
    return sums


def format_value(measure: Measure, value: int) -> str:
    """Return a value with its unit, rounded to three digits."""
    return format_seconds(value / 1e9) if measure.unit == "ns" else format_short(value) + measure.unit
