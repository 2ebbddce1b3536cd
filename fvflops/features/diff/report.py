"""The difference report: what a change of a model changed in its cost, largest first, as text, Markdown or JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from fvflops.features.diff.model import (
    MEASURES,
    Change,
    Figures,
    ModelDifference,
    ModuleChange,
    OperatorChange,
    sum_figures,
)
from fvflops.reports.names import markdown_name, plain_name
from fvflops.reports.terminal.layer_ranges import find_pattern, format_range
from fvflops.reports.text.text_table import text_table
from fvflops.units import format_quantity, format_ratio, format_short, format_thousands

SCHEMA = 1
TOP = 20
_FORMAT = "fvflops.difference"
_NAMED = 6  # names in one sentence
_LONGEST = 120  # characters of a name
_ARROW = " → "

Escape = Callable[[str], str]
_Table = tuple[list[str], list[list[str]]]


class _Row(NamedTuple):
    """Modules that changed alike, such as those of all layers of a model: they stand in one row with their sum."""

    name: str
    modules: tuple[ModuleChange, ...]

    @property
    def before(self) -> Figures:
        return sum_figures(module.before for module in self.modules)

    @property
    def after(self) -> Figures:
        return sum_figures(module.after for module in self.modules)

    def change(self, measure: str) -> Change:
        return Change(getattr(self.before, measure), getattr(self.after, measure))


def render(difference: ModelDifference, *, measure: str = "flops", top: int = TOP) -> str:
    """Return the difference as text: the totals, then the `top` modules and operators of which `measure` changed most.

    Modules that changed alike, and whose names differ in numbers only, are one row. An unknown measure raises
    ValueError.
    """
    _check(measure)
    blocks = [*_write_heads(difference, plain_name), _draw(_list_totals(difference))]
    if not difference:
        return "\n\n".join(["\n".join(blocks[:-1]), blocks[-1], _say_nothing(difference)])
    heads, totals = "\n".join(blocks[:-1]), blocks[-1]
    blocks = [heads, totals]
    for title, table, more in _list_tables(difference, measure, top, plain_name):
        blocks.append("\n".join([title, _draw(table, left=3 if table[0][0] == "change" else 1), *more]))
    return "\n\n".join([*blocks, "\n".join(_write_sentences(difference, plain_name))])


def render_markdown(difference: ModelDifference, *, measure: str = "flops", top: int = TOP) -> str:
    """Return the difference in GitHub's Markdown, as the summary of a step; the arguments are those of `render`."""
    _check(measure)
    flops = difference.total(measure)
    verdict = f"{measure} {_sign(flops)} ({_percent(flops)})" if flops.difference else f"{measure} unchanged"
    lines = [
        f"### Cost of the model: {verdict}",
        "",
        *(f"- {head}" for head in _write_heads(difference, markdown_name)),
        "",
    ]
    lines += _pipe(_list_totals(difference))
    if not difference:
        return "\n".join([*lines, "", _say_nothing(difference)])
    for title, table, more in _list_tables(difference, measure, top, markdown_name):
        lines += ["", f"**{title}**", "", *_pipe(table, words=3 if table[0][0] == "change" else 1)]
        lines += ["", *more] if more else []
    return "\n".join([*lines, "", *(f"- {sentence}" for sentence in _write_sentences(difference, markdown_name))])


def render_json(difference: ModelDifference) -> str:
    """Return the difference as JSON text, every number exact."""
    return json.dumps(
        {
            "format": _FORMAT,
            "schema": SCHEMA,
            "table": difference.table,
            "multiply_add": difference.multiply_add,
            "before": _encode_side(difference.before),
            "after": _encode_side(difference.after),
            "total": {name: _encode(difference.total(name)) for name in (*MEASURES, "calls")},
            "modules": [_encode_module(module) for module in difference.by_module()],
            "operators": [_encode_operator(operator) for operator in difference.by_operator()],
            "unchanged": {
                "modules": len(difference.modules) - len(difference.by_module()),
                "operators": len(difference.operators) - len(difference.by_operator()),
            },
        },
        indent=2,
    )


def _check(measure: str) -> None:
    if measure not in MEASURES:
        raise ValueError(f"a difference is ranked by one of {', '.join(MEASURES)}, not by {measure!r}")


def _write_heads(difference: ModelDifference, escape: Escape) -> list[str]:
    heads = []
    for word, side in (("before", difference.before), ("after", difference.after)):
        name = "" if side.name == word else f" {escape(side.name)}"
        heads.append(f"{word}:{name}{f' on {escape(side.inputs)}' if side.inputs else ''}")
    flops = format_quantity(difference.multiply_add, "flop")
    return [*heads, f"Counted by the table {escape(difference.table)}, in which one multiply-add is {flops}."]


def _say_nothing(difference: ModelDifference) -> str:
    modules, operators = len(difference.modules), len(difference.operators)
    same = f"{format_quantity(modules, 'module')} and {format_quantity(operators, 'operator')}"
    return f"No difference: {same} are as before."


def _list_totals(difference: ModelDifference) -> _Table:
    rows = [[measure, *_numbers(difference.total(measure))] for measure in MEASURES]
    return ["total", "before", "after", "difference", "ratio"], rows


def _list_tables(
    difference: ModelDifference, measure: str, top: int, escape: Escape
) -> Iterable[tuple[str, _Table, list[str]]]:
    """Yield a title, a table and what is said below it, for modules and for operators."""
    rows = [row for row in _group(difference.by_module(measure), measure) if _counts(row)]
    if rows:
        others = _others(rows, measure, MEASURES)
        cells = [
            [
                row.modules[0].kind,
                escape(row.name or "(model)"),
                _class_of(row.modules[0], escape),
                *_numbers(row.change(measure)),
                *(_sign(row.change(other)) for other in others),
            ]
            for row in rows[:top]
        ]
        headers = ["change", "module", "class", *_headers(measure), *others]
        title = "Modules, each without its submodules, by difference:"
        yield title, (headers, cells), _tell_rest(rows, top, measure)
    operators = difference.by_operator(measure)
    if operators:
        others = _others(operators, measure, (*MEASURES[:3], "calls"))
        cells = [
            [
                escape(operator.label) + ("" if operator.status in ("counted", "free") else f" ({operator.status})"),
                *_numbers(operator.change(measure)),
                *(_sign(operator.change(other)) for other in others),
            ]
            for operator in operators[:top]
        ]
        yield (
            "Operators, by difference:",
            (["operator", *_headers(measure), *others], cells),
            _tell_rest(operators, top, measure),
        )


def _headers(measure: str) -> list[str]:
    return [f"{measure} before", "after", "difference", "ratio"]


def _others(rows: Sequence[_Row | OperatorChange], measure: str, measures: Sequence[str]) -> list[str]:
    """Return the measures that get a column: those that tell more than what stands there already."""
    told = [[row.change(measure).difference for row in rows]]
    others = []
    for other in measures:
        column = [row.change(other).difference for row in rows]
        if other != measure and any(column) and not (column in told and {other, measure} == {"flops", "macs"}):
            others.append(other)
    return others


def _numbers(change: Change) -> list[str]:
    ratio = "" if change.ratio is None or not change.after else f"×{format_ratio(change.ratio)}"
    return [format_short(change.before), format_short(change.after), _sign(change), ratio]


def _sign(change: Change) -> str:
    return f"{'+' if change.difference > 0 else ''}{format_short(change.difference)}" if change.difference else "0"


def _percent(change: Change) -> str:
    if change.ratio is None:
        return "from nothing"
    return f"{100 * change.difference / change.before:+.3g}%"


def _tell_rest(rows: Sequence[_Row | OperatorChange], top: int, measure: str) -> list[str]:
    rest = rows[top:]
    if not rest:
        return []
    value = sum(row.change(measure).difference for row in rest)
    return [f"and {format_quantity(len(rest), 'more row')}, with {_sign(Change(0, value))} {measure} together"]


def _counts(row: _Row) -> bool:
    return any(row.change(measure).difference for measure in MEASURES)


def _group(modules: Sequence[ModuleChange], measure: str) -> list[_Row]:
    """Return the modules in rows: those alike in all but the numbers in their names share one."""
    alike: dict[tuple[Any, ...], list[ModuleChange]] = {}
    for module in modules:
        key = (
            find_pattern(module.before_name), find_pattern(module.after_name), module.before_class, module.after_class,
            module.before, module.after, module.operators, module.kind, module.follows,
        )  # fmt: skip
        alike.setdefault(key, []).append(module)
    rows = [_Row(_name_rows(group), tuple(group)) for group in alike.values()]
    return sorted(rows, key=lambda row: -abs(row.change(measure).difference))


def _name_rows(group: Sequence[ModuleChange]) -> str:
    before = format_range([module.before_name for module in group if module.before_name is not None])
    after = format_range([module.after_name for module in group if module.after_name is not None])
    name = after if before in ("", after) else before if not after else f"{before or '(model)'}{_ARROW}{after}"
    if group[0].before_name == "" and after:
        name = f"(model){_ARROW}{after}"
    if group[0].after_name == "" and before:
        name = f"{before}{_ARROW}(model)"
    return name + (f" × {len(group)}" if len(group) > 1 else "")


def _class_of(module: ModuleChange, escape: Escape) -> str:
    before, after = escape(module.before_class), escape(module.after_class)
    return before + _ARROW + after if before and after and before != after else after or before


def _write_sentences(difference: ModelDifference, escape: Escape) -> list[str]:
    modules = difference.by_module()
    quiet = [row for row in _group(modules, "flops") if not _counts(row)]
    sentences = []
    for kind, text in (
        ("changed", "Changed, with the same figures"),
        ("added", "Added, without parameters and counts"),
        ("removed", "Removed, without parameters and counts"),
        ("renamed", "Renamed, and otherwise as before"),
    ):
        told = [
            row for row in quiet if row.modules[0].kind == kind and not (kind == "renamed" and row.modules[0].follows)
        ]
        if told:
            sentences.append(f"{text}: {_list_names(told, escape)}.")
    follow = sum(module.follows for module in modules if module.kind == "renamed")
    if follow:
        sentences.append(f"Renamed with a module around them: {format_quantity(follow, 'module')}.")
    if any(operator.status == "omitted" for operator in difference.by_operator()):
        sentences.append(
            f"Omitted is arithmetic that the table {escape(difference.table)} leaves out; the table exact counts it."
        )
    sentences.append(_tell_unchanged(difference))
    for word, side in (("before", difference.before), ("after", difference.after)):
        if side.unknown:
            named = ", ".join(f"{escape(op)} ({format_quantity(calls, 'call')})" for op, calls in side.unknown.items())
            sentences.append(f"UNKNOWN {word}, so missing from the numbers: {named}.")
        sentences += [f"Of {word}: {escape(note)}." for note in side.notes]
    return sentences


def _tell_unchanged(difference: ModelDifference) -> str:
    same = [module for module in difference.modules if module.kind in ("unchanged", "renamed")]
    flops = sum(module.after.flops for module in same)
    labels = len(difference.operators) - len(difference.by_operator())
    return (
        f"As before: {format_quantity(len(same), 'module')} of {format_thousands(len(difference.modules))}, with "
        f"{format_short(flops)} of {format_short(difference.total().after)} flops, and "
        f"{format_quantity(labels, 'operator')} of {format_thousands(len(difference.operators))}."
    )


def _list_names(rows: Sequence[_Row], escape: Escape) -> str:
    named = []
    for row in rows[:_NAMED]:
        module = row.modules[0]
        told = [_class_of(module, escape)] if module.kind != "renamed" else []
        gone = [operator.label for operator in module.operators if not operator.after.calls]
        new = [operator.label for operator in module.operators if not operator.before.calls]
        if module.kind == "changed":
            told += [f"without {escape(label)}" for label in gone] + [f"with {escape(label)}" for label in new]
        named.append(escape(row.name or "(model)") + (f" ({', '.join(told)})" if told else ""))
    rest = sum(len(row.modules) for row in rows[_NAMED:])
    return ", ".join(named) + (f" and {format_quantity(rest, 'more module')}" if rest else "")


def _draw(table: _Table, *, left: int = 1) -> str:
    return text_table(*table, left=range(left))


def _pipe(table: _Table, *, words: int = 1) -> list[str]:
    headers, rows = table
    rules = [":---"] * words + ["---:"] * (len(headers) - words)
    return [f"| {' | '.join(cells)} |" for cells in (headers, rules, *rows)]


def _encode(change: Change) -> dict[str, Any]:
    return {**change._asdict(), "difference": change.difference, "ratio": change.ratio}


def _encode_side(side: Any) -> dict[str, Any]:
    return {"name": side.name, "inputs": side.inputs, "unknown": dict(side.unknown), "notes": list(side.notes)}


def _encode_operator(operator: OperatorChange) -> dict[str, Any]:
    return {
        "operator": operator.label,
        "status": operator.status,
        **{name: _encode(operator.change(name)) for name in (*MEASURES[:3], "calls")},
    }


def _encode_module(module: ModuleChange) -> dict[str, Any]:
    return {
        "change": module.kind,
        "before_name": module.before_name,
        "after_name": module.after_name,
        "before_class": module.before_class,
        "after_class": module.after_class,
        **{name: _encode(module.change(name)) for name in (*MEASURES, "calls")},
        "operators": [_encode_operator(operator) for operator in module.operators],
    }
