"""Counts of one metric, an entry per op and scope, and the Summary of counts that reports show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from operator import add, and_, attrgetter, eq, or_, sub
from typing import Any, NamedTuple

from fvflops.text import short_repr, shown_by_fields
from fvflops.trace.module_tree import ModuleTree, innermost, modules_above
from fvflops.trace.notebook_table import write_text_table


class Status(str, Enum):
    """How a table treats an op.

    COUNTED has a formula, ZERO_FLOP does no arithmetic, IGNORED does arithmetic that the convention ignores, and
    UNSUPPORTED has no row in the table: it is reported, never counted as zero. Saved files contain the values.
    """

    COUNTED = "counted"
    ZERO_FLOP = "zero_flop"
    IGNORED = "ignored"
    UNSUPPORTED = "unsupported"


_MAX_ROWS, _MAX_COLUMNS = 40, 3  # of a table that `__str__` returns


@shown_by_fields
class Entry(NamedTuple):
    """All calls of one signature in one scope and phase, under one label.

    `scope` has the names of the enclosing modules, root first. `value` is the metric summed over all calls. For the
    metric "flops", `macs` (multiply-adds) and `flops` (all other FLOPs) are its parts; for others they are 0.
    `elements` is the number of output elements of all calls. `dtype` is the compute dtype, "" without tensors; `group`
    is the parameter group that an optimizer step updates, else "". `recomputed` is the part of `macs` with which a
    fused backward op recomputes results of the forward pass.
    """

    scope: tuple[str, ...]
    phase: str
    op: str
    label: str
    status: Status
    calls: int
    value: int
    macs: int = 0
    flops: int = 0
    elements: int = 0
    dtype: str = ""
    group: str = ""
    recomputed: int = 0

    @property
    def other_flops(self) -> int:
        """FLOPs other than multiply-adds, for the metric "flops"; includes op handles' results, which are not split."""
        return self.flops if self.macs or self.flops else self.value


@dataclass(frozen=True, slots=True, repr=False)
class Counts:
    """The entries of one metric over one trace, and their sums.

    `ancestors` selects the modules that an entry counts for: "owner" the innermost module of its scope and that
    module's parents by name, "caller" every module of its scope.

    >>> from fvflops.trace import ModuleInfo
    >>> tree = ModuleTree({name: ModuleInfo(name, name, "Module") for name in ("", "a", "a.b")})
    >>> entry = Entry(("", "a.b"), "forward", "aten::mm", "mm", Status.COUNTED, calls=2, value=60, macs=60)
    >>> counts = Counts("flops", tree, (entry,))
    >>> counts.by_module_and_operator()["a"], counts.by_module_and_operator("caller")["a"]
    (Counter({'mm': 60}), Counter())
    """

    metric: str
    modules: ModuleTree
    entries: tuple[Entry, ...]
    _by_module_and_label: dict[str, dict[str, Counter[str]]] = field(init=False, compare=False, default_factory=dict)

    def __repr__(self) -> str:
        calls = sum(entry.calls for entry in self.entries)
        return short_repr(self, self.modules.root.class_name, f"{self.total():,} {self.metric}", f"{calls:,} op calls")

    def __str__(self) -> str:
        calls, values = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
        for entry in self.entries:
            key = entry.label, "zero-FLOP" if entry.status is Status.ZERO_FLOP else entry.status.value
            calls[key] += entry.calls
            values[key] += entry.value
        largest = sorted(calls, key=lambda key: (-values[key], -calls[key], key))
        rows = [[*key, f"{calls[key]:,}", f"{values[key]:,}"] for key in largest[:_MAX_ROWS]]
        shown = f"{len(rows)} of {len(calls):,} operators; " if len(rows) < len(calls) else ""
        caption = f"{self.metric} of {self.modules.root.class_name}"
        headings = ["operator", "status", "calls", self.metric]
        return write_text_table(caption, headings, rows, f"{shown}total {self.total():,}", text_columns=2)

    def of_scope(self, scope: tuple[str, ...], ancestors: str) -> Iterator[str]:
        """Yield each module that an entry of this scope counts for, once."""
        if ancestors == "caller":
            yield from dict.fromkeys(("", *scope))  # the loss and the optimizer run outside of all module calls
            return
        owner = innermost(scope)
        # A child set by setattr may have dots in its name that do not separate modules.
        yield from (name for name in modules_above(owner) if name in self.modules.by_name)
        yield owner

    def by_module_and_operator(self, ancestors: str = "owner") -> dict[str, Counter[str]]:
        """Return module name → Counter of labels, for every module of the tree, without zeros."""
        return {name: Counter(labels) for name, labels in self.labels_by_module(ancestors).items()}

    def labels_by_module(self, ancestors: str = "owner") -> Mapping[str, Counter[str]]:
        """Return the same as `by_module_and_operator`, cached, as Counters that must not be changed."""
        if ancestors not in self._by_module_and_label:
            self._by_module_and_label[ancestors] = self._by_module(ancestors, "label", "value", self.entries)
        return self._by_module_and_label[ancestors]

    def by_phase(self) -> dict[str, Counter[str]]:
        """Return phase → Counter of labels over the whole model, without zeros.

        The phases are "recompute", "backward", "optimizer", "other" (work without gradients between a backward pass or
        an optimizer step and the next call of the model, such as gradient clipping) and "forward" (everything else).
        """
        return self._labels_by("phase")

    def by_parameter_group(self) -> dict[str, Counter[str]]:
        """Return parameter group → Counter of labels, for the optimizer steps, without zeros."""
        return self._labels_by("group")

    def by_dtype(self) -> Counter[str]:
        """Return dtype → value over the whole model, without zeros."""
        return self._sums("dtype")

    def by_module_and_phase(self, ancestors: str = "owner") -> dict[str, Counter[str]]:
        """Return module name → Counter of phases, for every module of the tree, without zeros."""
        return self._by_module(ancestors, "phase", "value", self.entries)

    def calls_by_module(self, ancestors: str = "owner", *statuses: Status) -> dict[str, Counter[str]]:
        """Return module name → Counter of op → calls, for the ops of the given statuses."""
        return self._by_module(ancestors, "op", "calls", [entry for entry in self.entries if entry.status in statuses])

    def total(self) -> int:
        """Return the sum over all entries."""
        return sum(entry.value for entry in self.entries)

    def by_label(self) -> Counter[str]:
        """Return label → value over the whole model."""
        return self._sums("label")

    def ledger(self) -> Mapping[Status, Counter[str]]:
        """Return status → Counter of op → calls over the whole model."""
        ledger: dict[Status, Counter[str]] = {status: Counter() for status in Status}
        for entry in filter(attrgetter("calls"), self.entries):
            ledger[entry.status][entry.op] += entry.calls
        return ledger

    def unsupported_elements(self) -> Counter[str]:
        """Return op → output elements of all calls, for the unsupported ops."""
        elements: Counter[str] = Counter()
        for entry in self.entries:
            if entry.status is Status.UNSUPPORTED:
                elements[entry.op] += entry.elements
        return elements

    def _by_module(self, ancestors: str, key: str, amount: str, entries: Iterable[Entry]) -> dict[str, Counter[str]]:
        """Return module name → value of the entries' field `key` → sum of their field `amount`."""
        table: dict[str, Counter[str]] = {module.name: Counter() for module in self.modules.modules()}
        for entry in entries:
            if value := getattr(entry, amount):
                for name in self.of_scope(entry.scope, ancestors):
                    table[name][getattr(entry, key)] += value
        return table

    def _labels_by(self, key: str) -> dict[str, Counter[str]]:
        table: dict[str, Counter[str]] = {}
        for entry in self.entries:
            if entry.value and (name := getattr(entry, key)):
                table.setdefault(name, Counter())[entry.label] += entry.value
        return table

    def _sums(self, key: str) -> Counter[str]:
        sums: Counter[str] = Counter()
        for entry in self.entries:
            if entry.value:
                sums[getattr(entry, key)] += entry.value
        return sums


@dataclass(frozen=True, slots=True, repr=False)
class Summary:
    """One analysed model, ready for a report.

    `columns` maps a heading ("parameters", "flops", "activations" ...) to module (or parameter) name → count,
    headings in display order. `operators` maps a heading to label → count, `by_both` one to module → label → count.
    `uncalled` maps a heading to the modules in which no op ran. `ledger` maps a status ("counted", "zero_flop",
    "ignored", "unsupported") to op → calls, `unsupported_elements` an op to its output elements, and
    `unsupported_locations` an op to location (module and source line) → calls. `about` names the model, the table, its
    multiply_add, the inputs and the versions. `labels` maps a module whose row represents several modules, as in the
    result of `fvflops.reports.terminal.collapse`, to the text shown instead of its name.

    >>> from fvflops.trace import ModuleInfo
    >>> Summary(ModuleTree({"": ModuleInfo("", "", "Net")}), {"flops": {"": 12}}).columns["flops"][""]
    12
    """

    modules: ModuleTree
    columns: Mapping[str, Mapping[str, int]]
    operators: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    by_both: Mapping[str, Mapping[str, Mapping[str, int]]] = field(default_factory=dict)
    uncalled: Mapping[str, frozenset[str]] = field(default_factory=dict)
    ledger: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    unsupported_elements: Mapping[str, int] = field(default_factory=dict)
    unsupported_locations: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    about: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        totals = [f"{column.get('', 0):,} {heading}" for heading, column in self.columns.items()]
        return short_repr(self, self.modules.root.class_name, *totals)

    def __str__(self) -> str:
        """Return a table of the model and its direct children; `fvflops.reports.REPORTS` has reports of all modules."""
        headings = list(self.columns)[:_MAX_COLUMNS]
        names = [module.name for module in self.modules.modules() if "." not in module.name]
        rows = [
            [self.label(name) or "model", *(f"{self.columns[heading].get(name, 0):,}" for heading in headings)]
            for name in names[:_MAX_ROWS]
        ]
        shown = f"{len(rows):,} of {len(names):,} modules" if len(rows) < len(names) else ""
        return write_text_table(self.modules.root.class_name, ["module", *headings], rows, shown)

    def label(self, module: str) -> str:
        """Return the text shown for a module: its name, or the label of a collapsed row."""
        return self.labels.get(module, module)


def _plain(operation: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return an operation on plain Counters: Counter's own would look up missing keys, which raises KeyError."""

    def operate(own: Counter[str], other: object) -> Any:
        return operation(Counter(own), Counter(other) if isinstance(other, Counter) else other)

    return operate


class ModuleCounts(Counter[str]):
    """A Counter of module name → count that raises KeyError with the closest match for a name that no module has.

    All names of a shared module are accepted, as in `total`. Arithmetic, copies and pickles give plain Counters, which
    return 0 for a missing name.
    """

    def __init__(self, counts: Mapping[str, int], canonical_name: Callable[[str], str]) -> None:
        """Store the counts; `canonical_name` returns the name under which a module is counted, or raises KeyError."""
        super().__init__(counts)
        self._canonical_name = canonical_name

    def __missing__(self, name: str) -> int:
        """Return the count of a module by another of its names."""
        return self.get(self._canonical_name(name), 0)

    def __reduce__(self) -> tuple[Any, ...]:
        return Counter, (dict(self),)

    def __repr__(self) -> str:
        return repr(Counter(self))

    def copy(self) -> Counter[str]:  # type: ignore[override]
        return Counter(self)

    __eq__ = _plain(eq)
    __hash__ = None  # type: ignore[assignment]
    __add__ = __iadd__ = _plain(add)
    __radd__ = _plain(lambda own, other: other + own)
    __sub__ = __isub__ = _plain(sub)
    __rsub__ = _plain(lambda own, other: other - own)
    __or__ = __ior__ = _plain(or_)
    __ror__ = _plain(lambda own, other: other | own)
    __and__ = __rand__ = __iand__ = _plain(and_)
