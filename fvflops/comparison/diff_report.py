"""Report of the differences in cost between two models, largest first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fvflops.comparison.differences import (
    MEASURES,
    Change,
    Changed,
    Costs,
    ModelDifference,
    ModuleChange,
    OperatorChange,
    sum_costs,
)
from fvflops.counting.metrics import METRICS
from fvflops.reports import document as doc
from fvflops.reports.document import Column, Document, Items, Part, Table, Value, data_only, text_column
from fvflops.reports.escaping import list_ops, plain_name, printable_short, show_status
from fvflops.reports.terminal.collapse import find_pattern, format_range
from fvflops.text import record_data
from fvflops.units import format_change, format_quantity, format_ratio, format_short, format_signed, format_thousands

TOP = 20  # rows of a table
_MAX_NAMES = 6  # in one sentence
_ARROW = " → "
_HEADINGS = {**{measure: METRICS[measure].short for measure in MEASURES}, "calls": "Calls"}
_USUAL_STATUSES = ("counted", "zero-FLOP")  # the column of statuses is hidden if there are no others


@dataclass(frozen=True, slots=True)
class _Row(Changed):
    """The sum of modules with equal changes, such as repeated layers."""

    name: str
    modules: tuple[ModuleChange, ...]
    before: Costs
    after: Costs


def shortened_report(difference: ModelDifference) -> Document:
    return difference_report(difference).ranked(top=TOP)


def difference_report(difference: ModelDifference, *, measure: str = "flops") -> Document:
    """Return the totals, and the modules and operators that differ, the largest change of `measure` first.

    Equal changes of modules whose names differ in numbers only are one row. An unknown measure raises ValueError.
    """
    if measure not in MEASURES:
        raise ValueError(f"measure must be one of {', '.join(MEASURES)}; got {measure!r}")
    total, title = difference.total(measure), METRICS[measure].title
    relative = "from 0" if total.ratio is None else format_change(total.difference / total.before)
    verdict = f"{title} {format_signed(total.difference)} ({relative})" if total.difference else f"{title} unchanged"
    totals = [(METRICS[one].title, *_list_numbers(difference.total(one))) for one in MEASURES]
    parts: list[Part] = [
        Items("", _describe_sides(difference)),
        Table("totals", (text_column("metric"), *_number_columns()), totals, noun="metric"),
        _list_modules(difference, measure),
        _list_operators(difference, measure),
        Items("", _write_sentences(difference)) if difference else _describe_equality(difference),
    ]
    data, title = _encode_difference(difference), f"Cost of the model: {verdict}"
    return Document("difference", title, parts, main="modules", also=("operators",), data=data)


def _describe_sides(difference: ModelDifference) -> list[str]:
    lines = []
    for label, side in (("before", difference.before), ("after", difference.after)):
        name = "" if side.name == label else f" {plain_name(side.name)}"
        lines.append(f"{label}:{name}{f' on {plain_name(side.inputs)}' if side.inputs else ''}")
    unit = format_quantity(difference.multiply_add, "FLOP")
    return [*lines, f"convention: {plain_name(difference.table)} (a MAC is {unit})"]


def _describe_equality(difference: ModelDifference) -> str:
    modules, operators = len(difference.modules), len(difference.operators)
    return f"No difference in {format_quantity(modules, 'module')} and {format_quantity(operators, 'operator')}."


def _list_modules(difference: ModelDifference, measure: str) -> Table:
    rows = [row for row in _group(difference.by_module(measure), measure) if _has_difference(row)]
    columns = (
        text_column("module", form=lambda name: printable_short(name) or "model", shorten_last=True),
        text_column("change"),
        text_column("class", form=printable_short),
    )
    cells = [(row.name, row.modules[0].kind, _class_of(row.modules[0])) for row in rows]
    hidden = [] if {row.modules[0].kind for row in rows} - {"changed"} else ["change"]
    table = _tabulate_changes(columns, cells, rows, measure, MEASURES, hidden)
    title = f"Modules without their submodules, by {METRICS[measure].title}"
    return replace(table, name="modules", title=title)


def _list_operators(difference: ModelDifference, measure: str) -> Table:
    operators = difference.by_operator(measure)
    statuses = [show_status(operator.status) for operator in operators]
    columns = text_column("operator", form=printable_short), text_column("status")
    cells = [(operator.label, status) for operator, status in zip(operators, statuses, strict=True)]
    hidden = [] if set(statuses) - set(_USUAL_STATUSES) else ["status"]
    table = _tabulate_changes(columns, cells, operators, measure, (*MEASURES[:3], "calls"), hidden)
    return replace(table, name="operators", title=f"Operators, by {METRICS[measure].title}")


def _tabulate_changes(
    columns: Sequence[Column],
    cells: Sequence[tuple[Value, ...]],
    items: Sequence[Changed],
    measure: str,
    measures: Sequence[str],
    hidden: Sequence[str],
) -> Table:
    """Return rows of cells, each followed by an item's change of a measure and its differences in the others."""
    # FLOPs and MACs last, since they largely repeat each other.
    others = sorted((other for other in measures if other != measure), key=lambda other: other in ("flops", "macs"))
    rows = [
        (*first, *_list_numbers(item.change(measure)), *(item.change(other).difference for other in others))
        for first, item in zip(cells, items, strict=True)
    ]
    differences = (doc.difference_column(one, f"Δ {_HEADINGS[one]}") for one in others)
    all_columns = (*columns, *_number_columns(), *differences)
    redundant = [*_find_redundant(items, measure, others), *hidden]
    return Table("changes", data_only(all_columns, redundant), rows, summed="difference")


def _number_columns() -> tuple[Column, ...]:
    ratio = doc.number_column("ratio", form=lambda ratio: f"×{format_ratio(ratio)}" if ratio else "")
    return doc.number_column("before"), doc.number_column("after"), doc.difference_column("difference"), ratio


def _list_numbers(change: Change) -> tuple[Value, ...]:
    return change.before, change.after, change.difference, change.ratio


def _find_redundant(rows: Sequence[Changed], measure: str, others: Sequence[str]) -> list[str]:
    """Return the measures without a difference, and FLOPs or MACs if equal to the column of the other."""
    columns = {key: [row.change(key).difference for row in rows] for key in (measure, *others)}
    equal = [other for other in others if columns[other] == columns[measure] and {other, measure} == {"flops", "macs"}]
    return [other for other in others if not any(columns[other]) or other in equal]


def _has_difference(row: _Row) -> bool:
    return any(row.change(measure).difference for measure in MEASURES)


def _group(modules: Sequence[ModuleChange], measure: str) -> list[_Row]:
    """Return the modules in rows; equal changes share a row if their names differ in digits only."""
    groups: dict[tuple[Any, ...], list[ModuleChange]] = {}
    for module in modules:
        key = (
            find_pattern(module.before_name), find_pattern(module.after_name), module.before_class, module.after_class,
            module.before, module.after, module.operators, module.kind, module.parent_renamed,
        )  # fmt: skip
        groups.setdefault(key, []).append(module)
    rows = []
    for group in groups.values():
        before, after = (sum_costs(getattr(module, side) for module in group) for side in ("before", "after"))
        rows.append(_Row(_name_row(group), tuple(group), before, after))
    return sorted(rows, key=lambda row: -abs(row.change(measure).difference))


def _name_row(group: Sequence[ModuleChange]) -> str:
    before = format_range([module.before_name for module in group if module.before_name is not None])
    after = format_range([module.after_name for module in group if module.after_name is not None])
    name = after if before in ("", after) else before if not after else f"{before or 'model'}{_ARROW}{after}"
    if group[0].before_name == "" and after:
        name = f"model{_ARROW}{after}"
    if group[0].after_name == "" and before:
        name = f"{before}{_ARROW}model"
    return name + (f" × {len(group)}" if len(group) > 1 else "")


def _class_of(module: ModuleChange) -> str:
    before, after = module.before_class, module.after_class
    return before + _ARROW + after if before and after and before != after else after or before


def _write_sentences(difference: ModelDifference) -> list[str]:
    modules = difference.by_module()
    equal_cost = [row for row in _group(modules, "flops") if not _has_difference(row)]
    sentences = []
    for kind, text in (
        ("changed", "Changed at the same cost"),
        ("added", "Added without cost or parameters"),
        ("removed", "Removed without cost or parameters"),
        ("renamed", "Renamed only"),
    ):
        rows = [row for row in equal_cost if row.modules[0].kind == kind]
        if kind == "renamed":
            rows = [row for row in rows if not row.modules[0].parent_renamed]
        if rows:
            sentences.append(f"{text}: {_list_names(rows)}.")
    with_parent = sum(module.parent_renamed for module in modules if module.kind == "renamed")
    if with_parent:
        sentences.append(f"Renamed with their parents: {format_quantity(with_parent, 'module')}.")
    if any(operator.status == "ignored" for operator in difference.by_operator()):
        sentences.append(
            f"Ignored: arithmetic that the convention {plain_name(difference.table)} does not count; exact does."
        )
    sentences.append(_describe_unchanged(difference))
    for label, side in (("before", difference.before), ("after", difference.after)):
        if side.unsupported:
            sentences.append(f"Unsupported {label}, so not counted: {list_ops(side.unsupported)}.")
        sentences += [f"{label.capitalize()}: {note}." for note in side.notes]
    return sentences


def _describe_unchanged(difference: ModelDifference) -> str:
    same = [module for module in difference.modules if module.kind in ("unchanged", "renamed")]
    flops = sum(module.after.flops for module in same)
    operators = len(difference.operators) - len(difference.by_operator())
    return (
        f"Unchanged: {format_thousands(len(same))} of {format_quantity(len(difference.modules), 'module')} "
        f"({format_short(flops)} of {format_short(difference.total().after)} FLOPs), "
        f"{format_thousands(operators)} of {format_quantity(len(difference.operators), 'operator')}."
    )


def _list_names(rows: Sequence[_Row]) -> str:
    names = []
    for row in rows[:_MAX_NAMES]:
        module = row.modules[0]
        details = [plain_name(_class_of(module))] if module.kind != "renamed" else []
        if module.kind == "changed":
            details += [f"without {plain_name(item.label)}" for item in module.operators if not item.after.calls]
            details += [f"with {plain_name(item.label)}" for item in module.operators if not item.before.calls]
        names.append(plain_name(row.name or "model") + (f" ({', '.join(details)})" if details else ""))
    rest = sum(len(row.modules) for row in rows[_MAX_NAMES:])
    return ", ".join(names) + (f" and {format_quantity(rest, 'more module')}" if rest else "")


def _encode_difference(difference: ModelDifference) -> dict[str, Any]:
    return {
        **record_data(difference, "table", "multiply_add", "before", "after"),
        "total": {name: _encode_change(difference.total(name)) for name in (*MEASURES, "calls")},
        "modules": [_encode_module(module) for module in difference.by_module()],
        "operators": [_encode_operator(operator) for operator in difference.by_operator()],
        "unchanged": {
            "modules": len(difference.modules) - len(difference.by_module()),
            "operators": len(difference.operators) - len(difference.by_operator()),
        },
    }


def _encode_change(change: Change) -> dict[str, Any]:
    return {**change._asdict(), "difference": change.difference, "ratio": change.ratio}


def _encode_operator(operator: OperatorChange) -> dict[str, Any]:
    changes = {name: _encode_change(operator.change(name)) for name in (*MEASURES[:3], "calls")}
    return {**record_data(operator, "operator=label", "status"), **changes}


def _encode_module(module: ModuleChange) -> dict[str, Any]:
    names = ("change=kind", "before_name", "after_name", "before_class", "after_class")
    changes = {name: _encode_change(module.change(name)) for name in (*MEASURES, "calls")}
    operators = [_encode_operator(operator) for operator in module.operators]
    return {**record_data(module, *names), **changes, "operators": operators}
