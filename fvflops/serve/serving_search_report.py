"""Report of a search for a serving layout: the best within the limits, the trade-off, and layouts that do not fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fvflops.devices.measured_errors import expect_serving_error
from fvflops.reports.document import (
    Command,
    Document,
    Items,
    Part,
    Point,
    Scatter,
    Table,
    data_only,
    number_column,
    text_column,
)
from fvflops.reports.escaping import plain_name
from fvflops.serve.serve_report import ENGINES
from fvflops.serve.serving_layout import ServingLayout
from fvflops.serve.serving_search import ServingPoint, ServingSearch
from fvflops.text import record_data
from fvflops.units import format_quantity, format_seconds, format_short, format_thousands

_LAYOUT = ("tensor", "pipeline", "expert", "data", "weights", "cache")
_SHOWN = 10


def serving_search_report(search: ServingSearch, *, name: str = "", command: str = "") -> Document:
    """Return the report of a search for the model `name`; `command` estimates the first layout in full."""
    best = search.best()
    parts: list[Part] = [_describe_load(search)]
    if best:
        parts.append(_tabulate(best[:_SHOWN], len(best)))
        if command:
            parts.append(Command("The first in full:", command))
    else:
        parts.append("No layout serves the load within the limits.")
    if search.points:
        parts.append(_draw(search))
    parts.append(expect_serving_error(search.engine, search.device))
    parts += _list_unfit(search)
    parts.append(Items("Assumptions:", list(_list_assumptions(search))))
    title = f"{plain_name(name or search.model.name)} on {search.gpus} × {plain_name(search.device.name)}: "
    title += f"{format_short(best[0].per_gpu)} tokens/s a GPU" if best else "nothing within the limits"
    return Document("serving_search", title, parts, main="best", data=_encode(search), about=_about(search))


def _about(search: ServingSearch) -> dict[str, Any]:
    limits: dict[str, Any] = record_data(search.limits, "ttft", "tpot", "at")
    limits = {key: None if value == float("inf") else value for key, value in limits.items()}
    load = record_data(search.load, "input_tokens", "output_tokens", "hit_rate")
    return {"device": search.device.name, "gpus": search.gpus, "engine": search.engine, **load, "limits": limits}


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


def _columns() -> tuple[Any, ...]:
    return (
        text_column("layout"),
        text_column("precision"),
        number_column("clients"),
        number_column("ttft", "TTFT", form=format_seconds),
        number_column("tpot", "TPOT", form=format_seconds),
        number_column("per_user", "tok/s/user", form=format_short),
        number_column("per_gpu", "tok/s/GPU", form=format_short),
        *data_only([number_column("requests_per_second")], ["requests_per_second"]),
    )


def _tabulate(points: Sequence[ServingPoint], found: int) -> Table:
    rows = [
        (
            describe_layout(point.layout, point.engines, point.prefill),
            _describe_precision(point.layout),
            point.clients,
            *(point.ttft, point.tpot, point.per_user, point.per_gpu, point.requests_per_second),
        )
        for point in points
    ]
    notes = [f"{format_quantity(found - len(points), 'further layout')} in JSON."] if found > len(points) else []
    return Table("best", _columns(), rows, title="Most throughput within the limits", notes=notes, noun="layout")


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


def _describe_precision(layout: ServingLayout) -> str:
    return layout.weights if layout.weights == layout.cache else f"{layout.weights}, cache {layout.cache}"


def _draw(search: ServingSearch) -> Scatter:
    front = set(search.front())
    points = [
        Point(
            point.per_user,
            point.per_gpu,
            f"{describe_layout(point.layout, point.engines, point.prefill)}, {point.clients} clients",
            point in front,
        )
        for point in search.points
    ]
    return Scatter(
        *("throughput", points, "tokens/s/user", "tokens/s/GPU"),
        title="Throughput of a GPU against the speed that a user sees",
    )


def _list_unfit(search: ServingSearch) -> Iterator[Part]:
    if search.unfit:
        columns = (text_column("layout"), text_column("precision"), text_column("reason"))
        rows = [(describe_layout(item.layout), _describe_precision(item.layout), item.reason) for item in search.unfit]
        left = len(rows) - _SHOWN
        notes = [f"{format_quantity(left, 'further layout')} in JSON."] if left > 0 else []
        yield Table("unfit", columns, rows[:_SHOWN], title="Layouts that do not fit", notes=notes, noun="layout")


def _list_assumptions(search: ServingSearch) -> Iterator[str]:
    yield f"{ENGINES[search.engine]}; each client sends a request after the last one's answer, lengths vary by 20 %"
    yield "latencies are without the first requests of all clients, which are sent at once"
    yield "A + B × tp: A engines compute prompts, B decode, and the cache is sent from one to the other"


def _encode(search: ServingSearch) -> dict[str, Any]:
    def layout(item: Any) -> dict[str, Any]:
        return record_data(item.layout, *_LAYOUT)

    rest = ("engines", "prefill", "clients", "ttft", "tpot", "per_gpu", "per_user", "requests_per_second", "holds")
    front = set(search.front())
    return {
        "best": [{**layout(point), **record_data(point, *rest)} for point in search.best()],
        "points": [{**layout(point), **record_data(point, *rest), "front": point in front} for point in search.points],
        "unfit": [{**layout(item), "reason": item.reason} for item in search.unfit],
    }
