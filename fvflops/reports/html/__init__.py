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
from string import Template
from typing import Any

from fvflops.reports.escaping import printable
from fvflops.reports.html.run_data import intern, measured_memory, pack, write_memory, write_timeline
from fvflops.reports.html.script import join_scripts, minify_style
from fvflops.trace import PHASES
from fvflops.trace.module_tree import modules_above
from fvflops.views.breakdown import Breakdown, Cell, Measure

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

    `timeline`, `memory` and `peaks` are as returned by `fvflops.reports.html.run_data`, and missing where unknown.
    Names are printable. `modules` is in columns: the index of the parent, and indexes into `strings` of name, class and
    description. `rows` is in columns too: the indexes of module, phase and operator. Each measure has a value for every
    row, or the indexes of the rows for which it has a value. Columns are packed by `fvflops.reports.html.run_data`.
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
