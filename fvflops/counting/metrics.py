"""Registry of metrics: names, units, descriptions, and how each is counted from a Trace.

All tables, HTML pages, files, sort keys, budgets and help texts read METRICS: a new metric is one more entry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from fvflops.counting.cost_models import TableCostModel
from fvflops.counting.count_trace import count
from fvflops.counting.traffic.byte_costs import split_by_aliasing
from fvflops.formulas import FormulaTable
from fvflops.trace import Counts, Entry, Status, Trace


class MetricCounts:
    """Counts of one run by metric, computed on first access.

    `table` is None where no table is used. `existing` are counts to reuse, such as an analysis with handles has.
    """

    def __init__(self, trace: Trace, table: FormulaTable | None, existing: Counts | None = None) -> None:
        self.trace = trace
        self.table = table
        self._counts = {} if existing is None else {existing.metric: existing}

    def names(self) -> tuple[str, ...]:
        return tuple(name for name, metric in METRICS.items() if metric.can_count(self))

    def is_counted(self, name: str) -> bool:
        return name in self._counts

    def __getitem__(self, name: str) -> Counts:
        if name not in self._counts:
            self._counts[name] = METRICS[name].count(self)
        return self._counts[name]

    def by_table(self, metric: str) -> Counts:
        """Return the counts of "flops" or "activations" by the table."""
        if self.table is None:
            raise ValueError(f"counting {metric} needs a formula table")
        return count(self.trace, TableCostModel(self.table, metric), metric)


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric with its `title`, `short` title, description (`note`) and `unit`: "", or "B" for bytes.

    `count` computes its Counts. `column` is whether the tables of `fvflops count` show it, `paper` the power of ten of
    the unit in which papers report it. `of` is the metric from which it is derived, or "table" where it needs one.
    """

    title: str
    short: str
    note: str
    count: Callable[[MetricCounts], Counts]
    unit: str = ""
    column: bool = False
    paper: int = 6
    of: str = ""

    def can_count(self, counts: MetricCounts) -> bool:
        if self.of in METRICS:
            return counts.is_counted(self.of) or METRICS[self.of].can_count(counts)
        return self.of != "table" or counts.table is not None


def derive(counts: Counts, metric: str, value: Callable[[Entry], int]) -> Counts:
    """Return counts of another metric, computed entry by entry."""
    entries = tuple(entry._replace(value=value(entry), macs=0, flops=0) for entry in counts.entries)
    return replace(counts, metric=metric, entries=entries)


def _count_parameters(counts: MetricCounts) -> Counts:
    modules = counts.trace.modules
    entries = []
    for parameter in modules.parameters():
        module, _, name = parameter.name.rpartition(".")
        entries.append(Entry((module,), "", "", name, Status.COUNTED, calls=0, value=parameter.spec.numel))
    return Counts("parameters", modules, tuple(entries))


METRICS: Mapping[str, Metric] = {
    "flops": Metric(
        "FLOPs",
        "FLOPs",
        "floating-point operations, as the convention counts them",
        lambda counts: counts.by_table("flops"),
        column=True,
        paper=9,
        of="table",
    ),
    "macs": Metric(
        "MACs",
        "MACs",
        "multiply-adds, the same in every convention",
        lambda counts: derive(counts["flops"], "macs", lambda entry: entry.macs),
        paper=9,
        of="flops",
    ),
    "activations": Metric(
        "Activations",
        "Acts",
        "output elements of the ops that the convention names",
        lambda counts: counts.by_table("activations"),
        column=True,
        of="table",
    ),
    "parameters": Metric(
        "Parameters",
        "Params",
        "elements of parameters; a tied one counts once, at its first name",
        _count_parameters,
        column=True,
    ),
    "bytes": Metric(
        "Bytes",
        "Bytes",
        "memory traffic of each op, without cache reuse or fusion",
        lambda counts: count(*split_by_aliasing(counts.trace), "bytes"),
        unit="B",
        paper=9,
    ),
}
