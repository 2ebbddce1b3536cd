"""An interactive HTML page in one file, of one model or two, with a zoomable plot of the module tree."""

from __future__ import annotations

import hashlib
import json
import re
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from html import escape
from importlib.resources import files
from itertools import pairwise
from string import Template
from typing import Any

from fvflops.reports.document import find_peaks
from fvflops.reports.escaping import printable
from fvflops.reports.html.script import join_scripts, minify_style
from fvflops.trace import PHASES
from fvflops.trace.calls import packet_of
from fvflops.trace.module_tree import modules_above
from fvflops.trace.timeline import PlacedSpan, Timeline
from fvflops.views.breakdown import Breakdown, Cell, Measure, MemoryCurve

FORMAT = "fvflops.report"
SCHEMA = 3  # since 2 a column of `modules`, `rows` and `measures` may be packed, since 3 words are values of `Status`
_PACKED = frozenset({"parent", "name", "class", "about", "module", "phase", "operator", "rows", "values"})


def render(breakdown: Breakdown) -> Iterator[str]:
    """Yield the text of the page, which contains its style, script and data and needs no network.

    >>> from fvflops.trace import ModuleInfo, ModuleTree
    >>> net = ModuleTree({"": ModuleInfo("", "", "</script>")})
    >>> page = "".join(render(Breakdown(net, {"flops": Measure("FLOPs", {Cell(""): 12})})))
    >>> page.count("</script>"), "\\\\u003c/script>" in page
    (2, True)
    """
    return _render_page(breakdown.title(), [breakdown])


def render_comparison(first: Breakdown, second: Breakdown) -> Iterator[str]:
    """Yield the text of a page that compares two models, such as a model before and after a change.

    Each is titled by its `name`: its source, or source and revision. Modules are matched by name.

    >>> from fvflops.trace import ModuleInfo, ModuleTree
    >>> net = ModuleTree({"": ModuleInfo("", "", "Net")})
    >>> before, after = (Breakdown(net, {"flops": Measure("FLOPs", {Cell(""): n})}, name=f"v{n}:net") for n in (1, 2))
    >>> "<title>v1:net → v2:net · fvflops</title>" in "".join(render_comparison(before, after))
    True
    """
    return _render_page(f"{first.title()} → {second.title()}", [first, second])


def _render_page(title: str, breakdowns: Sequence[Breakdown]) -> Iterator[str]:
    records = [make_record(breakdown) for breakdown in breakdowns]
    style, script = read_style("base.css") + read_style("report.css"), join_scripts(views=tuple(_views_of(records[0])))
    # No name can end its script element: JSON without `<`.
    texts = (json.dumps(record, allow_nan=False, separators=(",", ":"), default=int) for record in records)
    first, *others = (text.replace("<", "\\u003c") for text in texts)
    parts = {
        "title": escape(printable(title)[:200]),
        "policy": f"default-src 'none'; style-src {digest(style)}; script-src {digest(script)}; base-uri 'none'",
        "style": style,
        "script": script,
        "data": first,
        "other": "".join(f'<script type="application/json" id="data-other">{data}</script>\n' for data in others),
    }
    # Inserted text is not scanned for placeholders.
    yield _read_template().substitute(parts)


def _views_of(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of the views that a page has data for, besides the view of the modules."""
    if record.get("timeline", {}).get("start"):
        yield "timeline"
    if record.get("memory", {}).get("at"):
        yield "memory"
    if {"time", "bytes"} <= {measure["key"] for measure in record["measures"]}:
        yield "roofline"


def make_record(breakdown: Breakdown) -> dict[str, Any]:
    """Return the data of the page.

    `timeline`, `memory` and `peaks` are missing where unknown. Names are printable. `modules` is in columns: the index
    of the parent, and indexes into `strings` of name, class and description. `rows` is in columns too: the indexes of
    module, phase and operator. Each measure has a value for every row, or the indexes of the rows for which it has one.
    Columns are packed.
    """
    strings: dict[str, int] = {}
    modules = _write_modules(breakdown, strings)
    cells = dict.fromkeys(
        cell for measure in breakdown.measures.values() for cell in (*measure.values, *measure.unsupported)
    )
    phases = [phase for phase in ("", *PHASES) if any(cell.phase == phase for cell in cells)]
    operators = {name: index for index, name in enumerate(dict.fromkeys(cell.operator for cell in cells))}
    record = {
        "format": FORMAT,
        "schema": SCHEMA,
        "title": printable(" ".join(breakdown.title().split())),
        "about": {printable(key): printable(" ".join(text.split())) for key, text in breakdown.about.items()},
        "modules": modules,
        "phases": phases,
        "operators": [printable(name) for name in operators],
        "rows": {
            "module": [modules["index"].get(cell.module, 0) for cell in cells],
            "phase": [phases.index(cell.phase) for cell in cells],
            "operator": [operators[cell.operator] for cell in cells],
        },
        "measures": [_write_measure(key, measure, cells) for key, measure in breakdown.measures.items()],
        "ledger": {
            status: sorted(((printable(op), calls) for op, calls in ops.items()), key=lambda item: -item[1])
            for status, ops in breakdown.ledger.items()
        },
        "unsupported_elements": {
            printable(op): _write_number(count) for op, count in breakdown.unsupported_elements.items()
        },
        "unsupported_locations": {
            printable(op): [printable(location) for location in locations]
            for op, locations in breakdown.unsupported_locations.items()
        },
        "strings": list(strings),
        **_write_run(breakdown, modules["index"]),
    }
    del modules["index"]
    for columns in (record["modules"], record["rows"], *record["measures"]):
        columns.update({key: pack(column) for key, column in columns.items() if key in _PACKED})
    return record


def _write_run(breakdown: Breakdown, modules: Mapping[str, int]) -> dict[str, Any]:
    timeline, memory, peaks = breakdown.timeline, breakdown.memory, breakdown.peaks
    if memory is None and timeline is not None:
        memory = measured_memory(timeline)
    parts: dict[str, Any] = {}
    if timeline is not None and "time" in timeline.weights and timeline.spans:
        parts["timeline"] = write_timeline(timeline, modules)
    if memory is not None:
        parts["memory"] = write_memory(memory, modules)
    if peaks is not None:
        parts["peaks"] = asdict(peaks) | {"device": printable(peaks.device)}
    return parts


def _write_modules(breakdown: Breakdown, strings: dict[str, int]) -> dict[str, Any]:
    """Return the columns of the modules, each listed under its canonical name, and name → index."""
    index: dict[str, int] = {}
    columns: dict[str, list[int]] = {"parent": [], "name": [], "class": [], "about": []}
    for module in breakdown.modules.modules():
        parent = next((name for name in reversed(modules_above(module.name)) if name in index), "")
        leaf = module.name.rpartition(".")[2]
        index[module.name] = len(index)
        columns["parent"].append(index.get(parent, 0) if module.name else -1)
        for column, text in (("name", leaf), ("class", module.class_name), ("about", module.extra_repr)):
            columns[column].append(intern(text, strings))
    return {**columns, "index": index}


def _write_measure(key: str, measure: Measure, cells: Iterable[Cell]) -> dict[str, Any]:
    """Return a measure with a value for each row; if few rows have one, with these values and their indexes."""
    values = [_write_number(measure.values.get(cell, 0)) for cell in cells]
    filled = [index for index, value in enumerate(values) if value]
    record: dict[str, Any] = {"key": key, "title": measure.title, "unit": measure.unit, "note": measure.note}
    if len(filled) * 2 < len(values):
        record |= {"rows": filled, "values": [values[index] for index in filled]}
    else:
        record["values"] = values
    unsupported = [
        [index, measure.unsupported[cell]] for index, cell in enumerate(cells) if cell in measure.unsupported
    ]
    return {**record, "unsupported": unsupported}


def _write_number(count: Any) -> Any:
    # A handle of the program may have returned a NumPy integer or a float.
    if isinstance(count, float):
        return count
    # JavaScript's numbers are exact up to 2^53; the page reads larger ones as BigInt.
    return int(count) if abs(count) <= 2**53 else str(int(count))


@cache
def read_style(name: str) -> str:
    """Return a style of pages, made short: all have base.css, with the colours of both themes."""
    return minify_style(files(__package__).joinpath(name).read_text(encoding="utf-8"))


@cache
def _read_template() -> Template:
    text = files(__package__).joinpath("template.html").read_text(encoding="utf-8")
    return Template(re.sub(r"^\s+", "", text, flags=re.MULTILINE))


def digest(text: str) -> str:
    """Return the hash by which a content security policy permits exactly this script or style."""
    return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def pack(values: Sequence[Any]) -> list[Any] | dict[str, Any]:
    """Return a column as runs if these have at most half of its values, else as it is.

    A run is [repetitions, values] or [repetitions, values, steps]; the steps are added at each repetition.
    """
    runs: list[list[Any]] = []
    plain = 0  # the first value that is not in a run
    length = len(values)
    differences = [_difference(first, second) for first, second in pairwise(values)]
    # Equal at corresponding values of two repetitions.
    keys = list(zip(differences, differences[1:], differences[2:], strict=False))
    last: dict[tuple[Any, ...], int] = {}
    for position, key in enumerate(keys):
        start = last.get(key, -1)
        last[key] = position
        period = position - start
        if start < plain or position + period >= len(keys) or keys[position + period] != key:
            continue
        steps = list(map(_difference, values[start:position], values[position : position + period]))
        if None in steps:
            continue
        end = position + period
        while end < length and _difference(values[end - period], values[end]) == steps[(end - start) % period]:
            end += 1
        times = (end - start) // period
        if times < 3:
            continue
        if start > plain:
            runs.append([1, list(values[plain:start])])
        runs.append([times, list(values[start:position]), *([steps] if any(steps) else [])])
        plain = start + times * period
    if plain < length:
        runs.append([1, list(values[plain:])])
    size = sum(sum(map(len, run[1:])) for run in runs)
    return {"runs": runs} if size <= length / 2 else list(values)


def _difference(first: Any, second: Any) -> int | None:
    """Return the difference between two integers, 0 between equal values of any type, else None."""
    if first == second:
        return 0
    return second - first if type(first) is int and type(second) is int else None


# Limits of a page's contents: the longest calls, and the highest points of a curve.
MAX_SPANS = 20_000
MAX_POINTS = 1_500


def intern(text: str, indexes: dict[str, int]) -> int:
    """Return the index of a text, which is added if it is new."""
    return indexes.setdefault(printable(text), len(indexes))


def write_timeline(timeline: Timeline, modules: Mapping[str, int]) -> dict[str, Any]:
    """Return the calls of a timed run in columns, parents before children; times are in ns from the first call.

    `label` indexes `labels` for an op or a function, and is -1 for a call of `module`, an index of the page's modules.
    `track` numbers threads and ranks. `hidden` is the number of omitted calls, the shortest ones.
    """
    placed = [piece for piece in timeline.layout("time") if piece.end > piece.start]
    shown = _longest(placed)
    origin = min((piece.start for piece in shown), default=0)
    labels, phases, tracks = dict[str, int](), dict[str, int](), dict[tuple[int, int], int]()
    columns: dict[str, list[int]] = {
        key: [] for key in ("label", "module", "phase", "track", "depth", "start", "duration")
    }
    for span, start, end in shown:
        callee = timeline.callees[span.callee]
        is_module = callee.frame is not None and callee.kind == "module"
        owner = callee.name if is_module else _owner(timeline, span.event.stack)
        row = (
            -1 if is_module else intern(_short(callee.name), labels),
            modules.get(owner, 0),
            intern(span.event.phase, phases),
            tracks.setdefault(span.track, len(tracks)),
            span.depth,
            start - origin,
            end - start,
        )
        for column, value in zip(columns.values(), row, strict=True):
            column.append(value)
    names = [f"rank {rank}, thread {thread}" if rank else f"thread {thread}" for rank, thread in tracks]
    hidden = len(placed) - len(shown)
    return {**columns, "labels": list(labels), "phases": list(phases), "tracks": names, "hidden": hidden}


def _short(op: str) -> str:
    return packet_of(op).removeprefix("aten::")


def _longest(placed: Sequence[PlacedSpan]) -> Sequence[PlacedSpan]:
    """Return at most MAX_SPANS calls, the longest; a call is at least as long as the calls inside it."""
    if len(placed) <= MAX_SPANS:
        return placed
    shortest = sorted((piece.end - piece.start for piece in placed), reverse=True)[MAX_SPANS]
    return [piece for piece in placed if piece.end - piece.start > shortest]


def _owner(timeline: Timeline, stack: int) -> str:
    frames = [timeline.frames[index] for index in timeline.stacks[stack]]
    return next((frame.name for frame in reversed(frames) if frame.kind == "module"), "")


def measured_memory(timeline: Timeline) -> MemoryCurve | None:
    """Return the memory after each op of a run, None where it was not measured."""
    spans = [span for span in timeline.spans or () if span.event.memory_after is not None]
    ops = [span for span in spans if timeline.callees[span.callee].frame is None]
    if not any(span.event.memory_after for span in ops):
        return None
    return MemoryCurve(
        {"allocated": [max(span.event.memory_after or 0, span.event.memory_peak or 0) for span in ops]},
        [timeline.callees[span.callee].name for span in ops],
        [_owner(timeline, span.event.stack) for span in ops],
        [span.event.phase for span in ops],
        measured=True,
    )


def write_memory(curve: MemoryCurve, modules: Mapping[str, int]) -> dict[str, Any]:
    """Return a memory curve of at most MAX_POINTS points, the highest of their parts, `at` the indexes of their ops."""
    totals = curve.totals()
    points = find_peaks(totals, min(len(totals), MAX_POINTS)) if totals else []
    labels, phases = dict[str, int](), dict[str, int]()
    return {
        "layers": [
            [printable(name), [values[point] for point in points]]
            for name, values in curve.layers.items()
            if any(values)
        ],
        "at": points,
        "ops": len(totals),
        "label": [intern(_short(curve.ops[point]), labels) for point in points],
        "module": [modules.get(curve.modules[point], 0) for point in points],
        "phase": [intern(curve.phases[point], phases) for point in points],
        "labels": list(labels),
        "phases": list(phases),
        "measured": curve.measured,
    }
