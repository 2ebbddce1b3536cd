"""The scaling report: a cost as a polynomial in sizes, how it was tried, and the table of what was counted."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from textwrap import wrap
from typing import Any

from fvflops.features.scaling.model import CostExpression, GenerationCost, Sizes
from fvflops.features.scaling.polynomial import Polynomial
from fvflops.reports import names
from fvflops.reports.text.pipe_table import pipe_table
from fvflops.units import format_percent, format_quantity, format_size, format_thousands
from fvflops.views.summary_rows import depth_of

FORMATS = ("text", "json")
SCHEMA = 1
_WIDTH = 100
_ROWS = 24  # of the table of what was counted; JSON holds all
_TOKENS = 8  # of the decoded tokens that are shown


def render(cost: CostExpression, *, title: str, depth: int = 1) -> str:
    """Return a cost as text: its polynomial, those of the modules down to a depth, and what was counted.

    `title` says what was counted, and in which convention.
    """
    blocks = [
        _fill(title),
        "\n".join([_write_law(cost.metric, cost), *_explain_symbols(cost)]),
        _fill(_tell_trial(cost)),
        *_draw_modules(cost, depth),
        _draw_runs(cost),
        *_tell_unknown(cost),
    ]
    return "\n\n".join(blocks)


def render_generation(cost: GenerationCost, *, title: str) -> str:
    """Return what a generation costs as text: the prefill, a token at a cache length, the whole, and a table."""
    laws = [
        _write_law("prefill", cost.prefill),
        "  P = tokens of the prompt",
        _write_law("one token", cost.decode),
        "  L = tokens in the cache before it",
        f"whole = {'no polynomial in P and N' if cost.whole is None else cost.whole.write(cost.symbols)}",
        "  N = new tokens: the prefill gives the first, and the others are decoded at L = P ... P + N - 2",
    ]
    trials = [
        _fill(f"{name}: {_tell_trial(part)}") for name, part in (("Prefill", cost.prefill), ("Token", cost.decode))
    ]
    blocks = [_fill(title), "\n".join(laws), "\n".join(trials), _draw_generation(cost), *_tell_unknown(cost.decode)]
    return "\n\n".join(blocks)


def render_json(cost: CostExpression, *, title: str) -> str:
    """Return a cost as JSON, with all that was counted and the polynomial of every module and operator."""
    record = {"format": "fvflops.scaling", "schema": SCHEMA, "title": title, **_encode(cost)}
    return _write_json(record)


def render_generation_json(cost: GenerationCost, *, title: str) -> str:
    """Return what a generation costs as JSON."""
    record = {
        "format": "fvflops.generation",
        "schema": SCHEMA,
        "title": title,
        "metric": cost.metric,
        "batch": cost.batch,
        "prompt": cost.prompt,
        "new": cost.new,
        "total": cost.total,
        "counted_up_to": cost.counted_up_to,
        "whole": _encode_polynomial(cost.whole, cost.symbols),
        "prefill": _encode(cost.prefill),
        "decode": _encode(cost.decode),
    }
    return _write_json(record)


def _fill(text: str) -> str:
    return "\n".join(wrap(text, _WIDTH))


def _write_json(record: Mapping[str, Any]) -> str:
    # The powers in a polynomial stay readable; what a terminal would obey is escaped as JSON does it.
    text = json.dumps(record, indent=1, ensure_ascii=False)
    return "\n".join(_escape_json(line) for line in text.split("\n"))


def _escape_json(line: str) -> str:
    if line.isprintable():
        return line
    return "".join(mark if mark.isprintable() else json.dumps(mark)[1:-1] for mark in line)


def _write_law(name: str, cost: CostExpression) -> str:
    return f"{name} = {cost}" if cost.polynomial is not None else f"{name} is {cost}"


def _explain_symbols(cost: CostExpression) -> list[str]:
    """Return for each size its letter and its range."""
    return [
        f"  {cost.symbols[axis.name]} = {axis.describe()}"
        if cost.symbols[axis.name] != axis.name
        else f"  {axis.describe()}"
        for axis in cost.axes
    ]


def _tell_trial(cost: CostExpression) -> str:
    runs = format_quantity(len(cost.counted), "run")
    if cost.polynomial is None:
        where = " and ".join(cost.without or cost.names)
        return (
            f"{runs}. No polynomial of the fourth degree or less in {where} gives all counts, neither for all sizes, "
            "nor for the larger ones or the multiples of a number: the table has what was counted."
        )
    made = f"{runs}: fitted to {len(cost.fitted)}, and equal to the count at {len(cost.held_out)} held out"
    if cost.everywhere:
        return f"{made}."
    off = len(cost.counted) - len(cost.fitted) - len(cost.held_out)
    return f"{made}; at other sizes, of which {off} were counted, it is no polynomial."


def _draw_modules(cost: CostExpression, depth: int) -> list[str]:
    rows = [
        (" " * depth_of(name) + (names.printable_short(name) or "model"), _say_part(part, cost))
        for name, part in cost.modules.items()
        if depth_of(name) <= depth and any(part.counted.values())
    ]
    return [pipe_table(("module", cost.metric), rows)] if len(rows) > 1 else []


def _say_part(part: CostExpression, cost: CostExpression) -> str:
    if part.polynomial is not None:
        return part.polynomial.write(cost.symbols)
    counts = set(part.counted.values())
    return f"{format_thousands(counts.pop())} in each run" if len(counts) == 1 else "no polynomial"


def _list_runs(cost: CostExpression) -> Iterator[tuple[Sizes, int, str]]:
    """Yield the sizes that were run, in order, with what was counted and what that was for."""
    roles = {**dict.fromkeys(cost.held_out, "held out"), **dict.fromkeys(cost.fitted, "fitted")}
    other = "" if cost.polynomial is None else "not of these"
    for sizes in sorted(cost.counted):
        yield sizes, cost.counted[sizes], roles.get(sizes, other)


def _draw_runs(cost: CostExpression) -> str:
    runs = list(_list_runs(cost))
    shown = runs if len(runs) <= _ROWS else [runs[place * (len(runs) - 1) // (_ROWS - 1)] for place in range(_ROWS)]
    rows = [
        (*(format_thousands(size) for size in sizes), format_thousands(count), format_size(count), role)
        for sizes, count, role in shown
    ]
    headers = (*cost.names, cost.metric, "", "used")
    if cost.polynomial is None:  # and no run was used for one
        headers, rows = headers[:-1], [row[:-1] for row in rows]
    table = pipe_table(headers, rows)
    left = len(runs) - len(shown)
    return table + (f"\nand {format_quantity(left, 'run')} more, which --format json holds." if left else "")


def _draw_generation(cost: GenerationCost) -> str:
    prefill = cost.prefill(prompt=cost.prompt)
    rows = [_row(f"prefill of {format_thousands(cost.prompt)}", "", int(prefill), cost.total)]
    places = _thin_out(range(cost.new - 1))
    for place in places:
        length = cost.prompt + place
        value = _decoded(cost, length)
        if value is not None:
            rows.append(_row(f"token {format_thousands(place + 2)}", format_thousands(length), value, cost.total))
    decoded = cost.total - int(prefill)
    rows.append(_row(f"all {format_thousands(cost.new - 1)} decoded", "", decoded, cost.total))
    rows.append(_row("whole", "", cost.total, cost.total))
    return pipe_table(("part", "cache", cost.metric, "", "share"), rows)


def _decoded(cost: GenerationCost, length: int) -> int | None:
    """Return what a token costs, None where it is only known as a part of the sum."""
    holds = cost.decode.polynomial is not None and length in cost.decode.holds_on[0]
    return int(cost.decode(cache=length)) if holds or (length,) in cost.decode.counted else None


def _thin_out(places: Sequence[int]) -> Sequence[int]:
    """Return the first, the last, and some in between."""
    if len(places) <= _TOKENS:
        return places
    return [places[index * (len(places) - 1) // (_TOKENS - 1)] for index in range(_TOKENS)]


def _row(part: str, cache: str, count: int, total: int) -> tuple[str, ...]:
    return part, cache, format_thousands(count), format_size(count), format_percent(count, total)


def _tell_unknown(cost: CostExpression) -> list[str]:
    if not cost.unknown:
        return []
    listed = ", ".join(
        f"{names.printable_short(op)} ({format_quantity(calls, 'call')} a run)" for op, calls in cost.unknown.items()
    )
    return [_fill(f"UNKNOWN, so missing from the numbers: {listed}.")]


def _encode(cost: CostExpression) -> dict[str, Any]:
    return {
        "metric": cost.metric,
        "axes": [_encode_axis(axis) for axis in cost.axes],
        "holds_on": None if cost.polynomial is None else [_encode_axis(axis) for axis in cost.holds_on],
        "polynomial": _encode_polynomial(cost.polynomial, cost.symbols),
        "counted": [
            {"sizes": dict(zip(cost.names, sizes, strict=True)), "count": count, "used": role}
            for sizes, count, role in _list_runs(cost)
        ],
        "modules": {name: _encode_part(part, cost) for name, part in cost.modules.items()},
        "operators": {name: _encode_part(part, cost) for name, part in cost.operators.items()},
        "unknown": dict(cost.unknown),
    }


def _encode_part(part: CostExpression, cost: CostExpression) -> Any:
    return _encode_polynomial(part.polynomial, cost.symbols)


def _encode_axis(axis: Any) -> dict[str, Any]:
    return {"name": axis.name, "first": axis.first, "last": axis.last, "step": axis.step}


def _encode_polynomial(polynomial: Polynomial | None, symbols: Mapping[str, str]) -> dict[str, Any] | None:
    if polynomial is None:
        return None
    terms = [
        {"coefficient": str(factor), "exponents": dict(zip(polynomial.variables, exponents, strict=True))}
        for exponents, factor in polynomial.terms
    ]
    return {"text": polynomial.write(symbols), "terms": terms}
