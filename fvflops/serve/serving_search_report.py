"""Report of a search for a serving layout: the best within the limits, the trade-off, and layouts that do not fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from fvflops.devices.measured_errors import expect_serving_error
from fvflops.reports.document import (
    Column,
    Command,
    Document,
    Items,
    Part,
    Point,
    Scatter,
    Table,
    number_column,
    text_column,
)
from fvflops.reports.escaping import plain_name
from fvflops.serve.serve_report import ENGINES
from fvflops.serve.serving_layout import ServingLayout
from fvflops.serve.serving_search import RejectedLayout, ServingPoint, ServingSearch
from fvflops.text import record_data
from fvflops.units import format_quantity, format_seconds, format_short, format_thousands

_SHOWN = 10
_LOAD = "each client sends a request after the last one's answer, lengths vary by 20 %"
_ASSUMPTIONS = (
    "latencies are without the first requests of all clients, which are sent at once",
    "A + B × tp: A engines compute prompts, B decode, and the cache is sent from one to the other",
)


def serving_search_report(search: ServingSearch, *, name: str = "", command: str = "") -> Document:
    """Return the report of a search for the model `name`; `command` estimates the first layout in full."""
    best = search.best()
    parts: list[Part] = [_describe_load(search)]
    if best:
        rows = [(_name(item), item.layout, *(getattr(item, column.key) for column in _NUMBERS)) for item in best]
        parts.append(_tabulate("best", "Most throughput within the limits", _NUMBERS, rows))
        if command:
            parts.append(Command("The first in full:", command))
    else:
        parts.append("No layout serves the load within the limits.")
    if search.points:
        parts.append(_draw(search))
    parts.append(expect_serving_error(search.engine, search.device))
    if search.rejected:
        lacking = [(describe_layout(item.layout), item.layout, item.reason) for item in search.rejected]
        parts.append(_tabulate("rejected", "Layouts that do not fit", [text_column("reason")], lacking))
    parts.append(Items("Assumptions:", [f"{ENGINES[search.engine]}; {_LOAD}", *_ASSUMPTIONS]))
    title = f"{plain_name(name or search.model.name)} on {search.gpus} × {plain_name(search.device.name)}: "
    title += f"{format_short(best[0].per_gpu)} tokens/s a GPU" if best else "nothing within the limits"
    loads = [f"{name}=load.{name}" for name in ("input_tokens", "output_tokens", "hit_rate")]
    about = record_data(search, "device=device.name", "gpus", "engine", *loads, "limits")
    about["limits"] = {key: None if value == float("inf") else value for key, value in about["limits"].items()}
    return Document("serving_search", title, parts, main="best", data=_encode(search), about=about)


def _describe_load(search: ServingSearch) -> str:
    load, limits = search.load, search.limits
    wanted = [
        f"{what} of at most {format_seconds(limit)}"
        for what, limit in (("time to first token", limits.ttft), ("time per output token", limits.tpot))
        if limit < float("inf")
    ]
    within = f", {' and '.join(wanted)} ({limits.at})" if wanted else ""
    tokens = f"Prompts of {format_thousands(load.input_tokens)} tokens, {format_thousands(load.output_tokens)} out"
    return f"{tokens}{within}; {format_quantity(len(search.points), 'simulation')}."


_NUMBERS = (
    number_column("clients"),
    number_column("ttft", "TTFT", form=format_seconds),
    number_column("tpot", "TPOT", form=format_seconds),
    number_column("per_user", "tok/s/user"),
    number_column("per_gpu", "tok/s/GPU"),
    number_column("requests_per_second", only_for="data"),
)


def _tabulate(name: str, title: str, columns: Sequence[Column], rows: Sequence[tuple[Any, ...]]) -> Table:
    """Return the first rows as a table; each is a layout in words, the layout, and the values of `columns`."""
    notes = [f"{format_quantity(len(rows) - _SHOWN, 'further layout')} in JSON."] if len(rows) > _SHOWN else []
    cells = [(words, _describe_precision(layout), *values) for words, layout, *values in rows[:_SHOWN]]
    columns = (text_column("layout"), text_column("precision"), *columns)
    return Table(name, columns, cells, title=title, notes=notes, noun="layout")


def describe_layout(layout: ServingLayout, engines: int = 1, prefill: int = 0) -> str:
    """Return a layout in words.

    >>> describe_layout(ServingLayout(tensor=4), 2), describe_layout(ServingLayout(tensor=2, data=4, expert=8), 1)
    ('2 × tp4', 'tp2 dp4 ep8')
    """
    sizes = {"tp": layout.tensor, "pp": layout.pipeline, "dp": layout.data, "ep": layout.expert}
    text = " ".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1) or "tp1"
    if prefill:
        return f"{prefill} + {engines - prefill} × {text}"
    return f"{engines} × {text}" if engines > 1 else text


def _name(point: ServingPoint) -> str:
    return describe_layout(point.layout, point.engines, point.prefill)


def _describe_precision(layout: ServingLayout) -> str:
    return layout.weights if layout.weights == layout.cache else f"{layout.weights}, cache {layout.cache}"


def _draw(search: ServingSearch) -> Scatter:
    front = set(search.front())
    points = [
        Point(point.per_user, point.per_gpu, f"{_name(point)}, {point.clients} clients", point in front)
        for point in search.points
    ]
    title = "Throughput of a GPU against the speed that a user sees"
    return Scatter("throughput", points, "tokens/s/user", "tokens/s/GPU", title=title)


def _encode(search: ServingSearch) -> dict[str, Any]:
    def encode(item: ServingPoint | RejectedLayout) -> dict[str, Any]:
        return {**asdict(item.layout), **record_data(item, *item._fields[1:])}

    front = set(search.front())
    return {
        "best": [encode(point) for point in search.best()],
        "points": [{**encode(point), "front": point in front} for point in search.points],
        "rejected": [encode(item) for item in search.rejected],
    }
