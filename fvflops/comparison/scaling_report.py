"""Report of a cost as a polynomial in input or model sizes, of its verification, and of the counts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from fractions import Fraction
from typing import Any

from fvflops.comparison.cost_functions import CostExpression, GenerationCost, Sizes
from fvflops.comparison.polynomial import Exponents, Polynomial, write_number
from fvflops.counting.metrics import METRICS
from fvflops.reports.document import (
    Column,
    Document,
    Items,
    Part,
    Table,
    Value,
    data_only,
    module_column,
    number_column,
    text_column,
)
from fvflops.reports.escaping import list_ops, plain_name
from fvflops.text import record_data
from fvflops.trace.records import RunInfo, list_run_notes, reads_of
from fvflops.units import format_quantity, format_share, format_short, format_thousands
from fvflops.views.summary_rows import depth_of

_MAX_TOKEN_ROWS = 8


def scaling_report(cost: CostExpression, *, title: str, depth: int = 1) -> Document:
    """Return the polynomials of a cost and of the modules down to a depth, and the counts.

    `title` names the counted model and the convention. JSON has every module and operator.
    """
    letters = [(cost.symbols[axis.name], axis) for axis in cost.axes]
    symbols = [f"{letter} = " * (letter != axis.name) + axis.describe() for letter, axis in letters]
    parts: list[Part] = [
        Items(_write_equation(METRICS[cost.metric].title, cost), symbols),
        f"{_describe_fit(cost)}.",
        _list_modules(cost, depth),
        _list_runs(cost),
        *_list_notes(cost),
    ]
    return Document("scaling", title, parts, main="runs", data={"title": title, **_encode(cost)})


def generation_report(cost: GenerationCost, *, title: str = "") -> Document:
    """Return the cost of generating text: the prefill, a token at a cache length, and the sum."""
    title = title or f"{format_thousands(cost.new)} new tokens after a prompt of {format_thousands(cost.prompt)}"
    total = "no polynomial in P and N" if cost.polynomial is None else cost.polynomial.write(cost.symbols)
    new = "N = new tokens: the prefill gives the first, the others are decoded at L = P ... P + N - 2"
    parts: list[Part] = [
        Items(_write_equation("prefill", cost.prefill), ["P = tokens of the prompt"]),
        Items(_write_equation("decode of one token", cost.decode), ["L = tokens in the KV cache before it"]),
        Items(f"total = {total}", [new]),
        Items("", [f"Prefill: {_describe_fit(cost.prefill)}.", f"Decode of one token: {_describe_fit(cost.decode)}."]),
        _list_stages(cost),
        *_list_notes(cost.decode),
    ]
    data = {
        "title": title,
        **record_data(cost, "metric", "batch", "prompt", "new", "total", "counted_up_to"),
        "whole": _encode_polynomial(cost.polynomial, cost.symbols),
        "prefill": _encode(cost.prefill),
        "decode": _encode(cost.decode),
    }
    return Document("generation", f"{title}: {format_short(cost.total)}", parts, data=data)


def _write_equation(name: str, cost: CostExpression) -> str:
    return f"{name} = {cost}" if cost.polynomial is not None else f"{name}: {cost}"


def _describe_fit(cost: CostExpression) -> str:
    runs = format_quantity(len(cost.counted), "run")
    if cost.polynomial is None:
        names = " and ".join(cost.without or cost.names)
        return (
            f"{runs}: no polynomial of degree 4 or less in {names} fits the counts: not over the whole range, not "
            "above a minimum size, and not at multiples of a step"
        )
    verified = f"{runs}: fitted to {len(cost.fitted)}, exact on {len(cost.held_out)} held out"
    if cost.everywhere:
        return verified
    others = len(cost.counted) - len(cost.fitted) - len(cost.held_out)
    return f"{verified}; valid only in this domain: {format_quantity(others, 'count')} outside"


def _list_modules(cost: CostExpression, depth: int) -> Table:
    """Return the coefficients of each module's polynomial; no row where only the model has a cost."""
    modules = {name: own for name, own in cost.modules.items() if depth_of(name) <= depth and any(own.counted.values())}
    polynomials = [own.polynomial for own in modules.values() if own.polynomial is not None]
    terms = {exponents for polynomial in polynomials for exponents, _ in polynomial.terms}
    ordered = sorted(terms, key=lambda exponents: (sum(exponents), exponents), reverse=True)
    rows = [(name, *_list_coefficients(own, ordered), _write_note(own)) for name, own in modules.items()]
    columns = (module_column(), *(_term_column(cost, exponents) for exponents in ordered), text_column("note"))
    shown = data_only(columns, [] if any(row[-1] for row in rows) else ["note"])
    title = f"{METRICS[cost.metric].title} by module: polynomial coefficients"
    return Table("modules", shown, rows if len(rows) > 1 else (), title=title, noun="module")


def _term_column(cost: CostExpression, exponents: Exponents) -> Column:
    named = [(name, exponent) for name, exponent in zip(cost.names, exponents, strict=True) if exponent]
    powers = [name if exponent == 1 else f"{name}^{exponent}" for name, exponent in named]
    heading = Polynomial.of(cost.names, {exponents: 1}).write(cost.symbols)
    return number_column("*".join(powers) or "1", heading, form=lambda value: write_number(value) if value else "")


def _list_coefficients(cost: CostExpression, terms: Sequence[Exponents]) -> list[Value]:
    if cost.polynomial is None:
        return [None] * len(terms)
    factors = dict(cost.polynomial.terms)
    values = [factors.get(exponents, Fraction(0)) for exponents in terms]
    return [value.numerator if value.denominator == 1 else value for value in values]


def _write_note(cost: CostExpression) -> str:
    if cost.polynomial is not None:
        return ""
    counts = set(cost.counted.values())
    return f"{format_thousands(counts.pop())} at all counted sizes" if len(counts) == 1 else "no polynomial"


def _runs_with_roles(cost: CostExpression) -> Iterator[tuple[Sizes, int, str]]:
    """Yield the sizes that were run, in order, with their counts and roles in the fit, such as "held out"."""
    roles = {**dict.fromkeys(cost.held_out, "held out"), **dict.fromkeys(cost.fitted, "fitted")}
    other = "" if cost.polynomial is None else "outside the domain"
    for sizes in sorted(cost.counted):
        yield sizes, cost.counted[sizes], roles.get(sizes, other)


def _list_runs(cost: CostExpression) -> Table:
    columns = (
        *(number_column(name, form=format_thousands) for name in cost.names),
        number_column(cost.metric, METRICS[cost.metric].title, form=format_thousands),
        text_column("used"),
    )
    rows: list[tuple[Value, ...]] = [(*sizes, count, role) for sizes, count, role in _runs_with_roles(cost)]
    return Table("runs", data_only(columns, ["used"] if cost.polynomial is None else []), rows, noun="run")


def _list_stages(cost: GenerationCost) -> Table:
    """Return the costs of the prefill, of some decoded tokens, and of all decoded tokens."""
    prefill = int(cost.prefill(prompt=cost.prompt))
    rows: list[tuple[str, int | None, int]] = [(f"prefill of {format_thousands(cost.prompt)}", None, prefill)]
    for step in _evenly_spaced(range(cost.new - 1)):
        value = _cost_of_token(cost, cost.prompt + step)
        if value is not None:
            rows.append((f"token {format_thousands(step + 2)}", cost.prompt + step, value))
    rows.append((f"all {format_thousands(cost.new - 1)} decoded tokens", None, cost.total - prefill))
    columns = (
        text_column("part"),
        number_column("cache", form=format_thousands),
        number_column(cost.metric, METRICS[cost.metric].title, form=format_thousands),
        number_column("share", form=format_share),
    )
    rows.append(("total", None, cost.total))
    *cells, total = [(*row, row[2] / cost.total if cost.total else None) for row in rows]
    return Table("parts", columns, cells, total=total, noun="part")


def _cost_of_token(cost: GenerationCost, length: int) -> int | None:
    """Return the cost of a token decoded at a cache length, None where only the sum over tokens is known."""
    in_domain = cost.decode.polynomial is not None and length in cost.decode.domain[0]
    return int(cost.decode(cache=length)) if in_domain or (length,) in cost.decode.counted else None


def _evenly_spaced(steps: Sequence[int]) -> Sequence[int]:
    """Return at most _MAX_TOKEN_ROWS of the steps: the first, the last, and some in between."""
    if len(steps) <= _MAX_TOKEN_ROWS:
        return steps
    return [steps[index * (len(steps) - 1) // (_MAX_TOKEN_ROWS - 1)] for index in range(_MAX_TOKEN_ROWS)]


def _list_notes(cost: CostExpression) -> list[str]:
    unsupported = f"Unsupported, so not counted: {list_ops(cost.unsupported)} in each run."
    return [unsupported] * bool(cost.unsupported) + list(list_run_notes(cost.about, plain_name))


def _encode(cost: CostExpression) -> dict[str, Any]:
    return {
        "metric": cost.metric,
        "axes": [asdict(axis) for axis in cost.axes],
        "holds_on": None if cost.polynomial is None else [asdict(axis) for axis in cost.domain],
        "polynomial": _encode_polynomial(cost.polynomial, cost.symbols),
        "counted": [
            {"sizes": dict(zip(cost.names, sizes, strict=True)), "count": count, "used": role}
            for sizes, count, role in _runs_with_roles(cost)
        ],
        "modules": {name: _encode_polynomial(item.polynomial, cost.symbols) for name, item in cost.modules.items()},
        "operators": {name: _encode_polynomial(item.polynomial, cost.symbols) for name, item in cost.operators.items()},
        "unsupported": dict(cost.unsupported),
        **reads_of(RunInfo.read(cost.about)),
    }


def _encode_polynomial(polynomial: Polynomial | None, symbols: Mapping[str, str]) -> dict[str, Any] | None:
    if polynomial is None:
        return None
    terms = [
        {"coefficient": str(factor), "exponents": dict(zip(polynomial.variables, exponents, strict=True))}
        for exponents, factor in polynomial.terms
    ]
    return {"text": polynomial.write(symbols), "terms": terms}
