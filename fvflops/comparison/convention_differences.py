"""Count one model by several conventions, and explain why their counts differ."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import permutations
from typing import Any

from fvflops.analysis.model_counts import FlopCountAnalysis
from fvflops.analysis.model_run import InputSize, inputs_of_size
from fvflops.capture.model_call import RunOptions
from fvflops.capture.run import Model
from fvflops.counting.uncounted_work import describe_ignored_work
from fvflops.formulas import FormulaTable, resolve_table, shipped_tables
from fvflops.reports.display import Displayed
from fvflops.reports.document import Document, Items, Table, Value, number_column, text_column
from fvflops.reports.escaping import plain_name
from fvflops.reports.terminal.op_coverage import describe_ignored
from fvflops.text import Unpack, explaining_arguments, short_repr, shown_by_fields, suggest
from fvflops.trace import Counts, Entry, Status, TraceError
from fvflops.units import format_quantity, format_short, format_signed


@dataclass(frozen=True, slots=True, repr=False)
@shown_by_fields
class ConventionTotal:
    """The count by one convention: multiply_add * macs + flops in total; `unsupported` are the unsupported ops.

    `ignored_work` is the share of the model's arithmetic, as `exact` counts it, that the convention ignores, as text:
    "all", or "86%"; "" up to a half.
    """

    name: str
    description: str
    multiply_add: int
    macs: int
    flops: int
    unsupported: tuple[str, ...] = ()
    ignored_work: str = ""

    @property
    def total(self) -> int:
        """The total that the convention reports."""
        return self.multiply_add * self.macs + self.flops


@dataclass(frozen=True, slots=True)
class Difference:
    """One reason why a second convention counts more, or fewer, FLOPs than a first.

    `first` and `second` are labels of ops, `value` is the second count minus the first, with the second's FLOPs per
    multiply-add, and `calls` is how often the op ran. `kind` is one of

    - "unit": a multiply-add is another number of FLOPs;
    - "only_first": the first counts `first`, the second does not;
    - "unsupported": the same, since `first` is unsupported by the second;
    - "only_second": the second counts `second`, the first does not;
    - "different_count": both count the op, with different results.
    """

    kind: str
    value: int
    first: str = ""
    second: str = ""
    calls: int = 0


@dataclass(frozen=True, slots=True, repr=False)
class Comparison(Displayed):
    """The totals of one model by several conventions, and the differences of each pair.

    `subject` describes the inputs. `differences` maps the names of a first and a second convention to the reasons,
    largest first; they add up to the second's total minus the first's. `left_out` are conventions by which a loaded
    Trace cannot be counted.
    """

    _report = "fvflops.comparison.convention_differences:comparison_report"

    subject: str
    totals: Mapping[str, ConventionTotal]
    differences: Mapping[tuple[str, str], tuple[Difference, ...]]
    left_out: tuple[str, ...] = ()

    def __repr__(self) -> str:
        totals = [f"{name} {format_short(item.total)}" for name, item in self.totals.items()]
        return short_repr(self, "", *totals)

    def between(self, first: str, second: str) -> tuple[Difference, ...]:
        """Return the reasons why a second convention differs from a first; a name not compared raises KeyError."""
        for name in (first, second):
            if name not in self.totals:
                hint = suggest(name, self.totals) or f": there are {', '.join(self.totals)}"
                raise KeyError(f"no convention {name!r} was compared{hint}")
        return self.differences.get((first, second), ())


Scope = tuple[str, ...]
Sums = dict[str, tuple[int, int]]  # label → FLOPs and calls


def explain_differences(first: Counts, second: Counts, *, units: tuple[int, int]) -> tuple[Difference, ...]:
    """Return why the second counts differ from the first, largest reason first.

    `units` are the FLOPs per multiply-add of each. The values add up to `second.total() - first.total()`. Ops are
    matched within each module, since conventions count at different ops: `linear` in one is `addmm` in another. An op
    without a match is ignored by the other convention, zero-FLOP or unsupported.
    """
    first_unit, second_unit = units
    macs = sum(entry.macs for entry in first.entries)
    values: Counter[tuple[str, str]] = Counter()
    calls: Counter[tuple[str, str]] = Counter()
    modules_with_formula = _scopes_with_formula(first) | _scopes_with_formula(second)
    first_sums, second_sums = (
        _sum_by_scope(counts.entries, modules_with_formula, second_unit) for counts in (first, second)
    )
    for scope in first_sums.keys() | second_sums.keys():
        for pair, value, count in _match(first_sums.get(scope, {}), second_sums.get(scope, {})):
            values[pair] += value
            calls[pair] += count
    unsupported = {entry.label for entry in second.entries if entry.status is Status.UNSUPPORTED}
    reasons = [Difference("unit", (second_unit - first_unit) * macs)] if second_unit != first_unit and macs else []
    for (left, right), value in values.items():
        if value:
            kind = "only_second" if not left else "unsupported" if left in unsupported else "only_first"
            kind = "different_count" if left and right else kind
            reasons.append(Difference(kind, value, left, right, calls[left, right]))
    return tuple(sorted(reasons, key=lambda reason: -abs(reason.value)))


def _scopes_with_formula(counts: Counts) -> set[Scope]:
    """Return the scopes of modules that a formula table counts by a formula for the module instead of by their ops."""
    return {entry.scope for entry in counts.entries if "::" not in entry.op}


def _sum_by_scope(entries: Iterable[Entry], modules_with_formula: set[Scope], unit: int) -> dict[Scope, Sums]:
    """Return the sums of each scope; ops inside one of `modules_with_formula` are attributed to it."""
    sums: dict[Scope, Sums] = defaultdict(dict)
    for entry in entries:
        scope = entry.scope
        scope = next((scope[:end] for end in range(1, len(scope)) if scope[:end] in modules_with_formula), scope)
        flops, calls = sums[scope].get(entry.label, (0, 0))
        sums[scope][entry.label] = flops + unit * entry.macs + entry.flops, calls + entry.calls
    return sums


def _match(first: Sums, second: Sums) -> Iterable[tuple[tuple[str, str], int, int]]:
    """Match the labels of one module's costs in two conventions.

    Yield (first label, second label), the second's FLOPs minus the first's, and the calls; a label is "" where the work
    is not counted. Labels of equal FLOPs on both sides count the same work, and are not yielded.
    """
    for label in first.keys() & second.keys():
        (first_flops, first_calls), (second_flops, second_calls) = first[label], second[label]
        pair = label if first_flops else "", label if second_flops else ""
        yield pair, second_flops - first_flops, max(first_calls, second_calls)
    left = {label: cost for label, cost in first.items() if cost[0] and label not in second}
    right = {label: cost for label, cost in second.items() if cost[0] and label not in first}
    for label, (flops, _) in list(left.items()):
        equal = next((right_label for right_label, (right_flops, _) in right.items() if right_flops == flops), None)
        if equal is not None:
            del left[label], right[equal]
    if sum(flops for flops, _ in left.values()) == sum(flops for flops, _ in right.values()):
        return
    if len(left) == len(right) == 1:
        ((left_label, (left_flops, calls)),) = left.items()
        ((right_label, (right_flops, _)),) = right.items()
        yield (left_label, right_label), right_flops - left_flops, calls
        return
    yield from (((label, ""), -flops, calls) for label, (flops, calls) in left.items())
    yield from ((("", label), flops, calls) for label, (flops, calls) in right.items())


@explaining_arguments
def compare(
    model: Model,
    inputs: Any = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    input_size: InputSize | None = None,
    tables: Sequence[str | FormulaTable] = (),
    **run: Unpack[RunOptions],
) -> Comparison:
    """Return the counts of a model's forward pass by several conventions, and why each pair differs.

    `tables` are conventions: names, paths or FormulaTables; by default all shipped ones. The other arguments are as for
    FlopCountAnalysis. A duplicate convention raises ValueError.

    >>> import torch
    >>> from torch import nn
    >>> comparison = compare(nn.Linear(3, 2), torch.ones(4, 3), tables=["default", "torch"])
    >>> {name: count.total for name, count in comparison.totals.items()}
    {'default': 24, 'torch': 48}
    >>> comparison.between("default", "torch")
    (Difference(kind='unit', value=24, first='', second='', calls=0),)
    """
    resolved = [resolve_table(table) for table in tables or shipped_tables()]
    names = [table.name for table in resolved]
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise ValueError(f"compare: duplicate tables: {', '.join(duplicates)}")
    inputs, kwargs = inputs_of_size(model, inputs, kwargs, input_size)
    analyse = partial(FlopCountAnalysis, model, inputs, kwargs=kwargs, warn=False, **run)
    return compare_by(resolved, lambda table: analyse(table=table))


def compare_by(
    tables: Sequence[FormulaTable], analyse: Callable[[FormulaTable], FlopCountAnalysis], *, may_leave_out: bool = False
) -> Comparison:
    """Return the counts of one model by several conventions; `analyse` returns its analysis by one of them.

    A loaded Trace cannot be counted by every convention. TraceError is raised then; with `may_leave_out` such
    conventions after the first are left out.
    """
    counts: dict[str, Counts] = {}
    totals: dict[str, ConventionTotal] = {}
    left_out: list[str] = []
    inputs_text = ""
    for table in tables:
        analysis = analyse(table)
        try:
            counts[table.name] = analysis.counts()
        except TraceError:
            if not may_leave_out or not counts:
                raise
            left_out.append(table.name)
            continue
        trace, own = analysis.trace(), counts[table.name]
        inputs_text = trace.info.inputs
        macs, flops = (sum(getattr(entry, part) for entry in own.entries) for part in ("macs", "flops"))
        rest = tuple(own.ledger()[Status.UNSUPPORTED]), describe_ignored_work(trace, own, table)
        totals[table.name] = ConventionTotal(table.name, table.description, table.multiply_add, macs, flops, *rest)
    units = {table.name: table.multiply_add for table in tables}
    differences = {
        (first, second): explain_differences(counts[first], counts[second], units=(units[first], units[second]))
        for first, second in permutations(counts, 2)
    }
    return Comparison(inputs_text, totals, differences, tuple(left_out))


MAX_REASONS = 5  # for each convention
_PREFACE = (
    "A FLOP is one floating-point operation: an addition, a multiplication, a comparison and so on. A MAC "
    "(multiply-add) is a multiplication and the addition of its product. Conventions differ in whether a MAC counts as "
    "one FLOP or two, and in which other operations they count. K, M, G and T are 10^3, 10^6, 10^9 and 10^12."
)
_TOTALS = (
    text_column("convention"),
    number_column("total"),
    number_column("multiply_add", "FLOPs per MAC", form=str),
    number_column("macs", "MACs", missing="-"),
    number_column("flops", "other FLOPs"),
)


def comparison_report(comparison: Comparison, *, against: str | None = None, shown: int = MAX_REASONS) -> Document:
    """Return the totals of all conventions, then why each differs from `against`, by default the first.

    For each convention the `shown` largest reasons are listed, and the sum of the others. A name that was not compared
    raises KeyError.
    """
    against = next(iter(comparison.totals)) if against is None else against
    comparison.between(against, against)  # raises KeyError for an unknown name
    base = comparison.totals[against]
    counts = comparison.totals.values()
    descriptions = [
        f"{name}: {convention.description.partition(';')[0]}." for name, convention in comparison.totals.items()
    ]
    # One that counts FLOPs only, where others count multiply-adds too.
    without_macs = [count.name for count in counts if not count.macs and count.flops and any(c.macs for c in counts)]
    rows = [
        (count.name, count.total, count.multiply_add, None if count.name in without_macs else count.macs, count.flops)
        for count in counts
    ]
    notes = [f"{', '.join(without_macs)}: multiply-adds are among the other FLOPs."] if without_macs else []
    by_share: dict[str, list[str]] = {}
    for count in counts:
        if count.ignored_work:
            by_share.setdefault(count.ignored_work, []).append(count.name)
    notes += [describe_ignored(share, ", ".join(names)) for share, names in by_share.items()]
    unsupported = set.intersection(*(set(count.unsupported) for count in counts))
    if unsupported:
        notes.append(f"Unsupported, so counted by none: {', '.join(map(plain_name, sorted(unsupported)))}.")
    if comparison.left_out:
        notes.append(f"Not by {', '.join(comparison.left_out)}: the Trace was recorded by another convention.")
    reasons: list[tuple[Value, ...]] = []
    for name, convention in comparison.totals.items():
        if name != against:
            reasons += _list_reasons(base, convention, comparison.between(against, name), shown)
    parts: list[Any] = [Table("conventions", _TOTALS, rows, noun="convention", notes=notes), Items("", descriptions)]
    if reasons:
        columns = (text_column("convention"), number_column("difference", form=format_signed), text_column("reason"))
        title = f"Why the others do not report {format_short(base.total)}, as {against} does"
        parts.append(Table("reasons", columns, reasons, title=title, noun="reason"))
    totals = [count.total for count in counts]
    title = f"{comparison.subject}: {format_short(base.total)} FLOPs by {against}"
    if min(totals) < max(totals):
        title += f", {format_short(min(totals))} to {format_short(max(totals))} by {len(totals)} conventions"
    return Document("comparison", title, [*parts, _PREFACE], data=_encode(comparison))


def _list_reasons(
    base: ConventionTotal, convention: ConventionTotal, reasons: Sequence[Difference], shown: int
) -> list[tuple[Value, ...]]:
    if not reasons:
        return [(convention.name, 0, "no difference")]
    rows = [(reason.value, _describe(reason, base, convention)) for reason in reasons[:shown]]
    if rest := reasons[shown:]:
        rows.append((sum(reason.value for reason in rest), format_quantity(len(rest), "smaller difference")))
    return [(convention.name, *row) for row in rows]


def _describe(reason: Difference, base: ConventionTotal, convention: ConventionTotal) -> str:
    if reason.kind == "unit":
        return f"a MAC is {format_quantity(convention.multiply_add, 'FLOP')}, not {base.multiply_add}"
    same = f"counts {'more' if reason.value > 0 else 'less'} for {reason.first}"
    texts = {
        "only_first": f"ignores {reason.first}",
        "unsupported": f"no formula for {reason.first}",
        "only_second": f"also counts {reason.second}",
        "different_count": same if reason.first == reason.second else f"counts {reason.second}, not {reason.first}",
    }
    return f"{texts[reason.kind]} ({format_quantity(reason.calls, 'call')})"


def _encode(comparison: Comparison) -> dict[str, Any]:
    totals = {name: {**asdict(count), "total": count.total} for name, count in comparison.totals.items()}
    differences = [
        {"from": first, "to": second, "reasons": [asdict(reason) for reason in reasons]}
        for (first, second), reasons in comparison.differences.items()
    ]
    return {"subject": comparison.subject, "conventions": totals, "differences": differences}
