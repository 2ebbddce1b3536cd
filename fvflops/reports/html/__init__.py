"""An interactive page in one file, with a picture of the module tree that zooms."""

from __future__ import annotations

import hashlib
import json
import re
from base64 import b64encode
from collections.abc import Iterable, Iterator
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

from fvflops.reports.names import printable
from fvflops.trace import PHASES
from fvflops.trace.module_tree import modules_above
from fvflops.views.breakdown import Breakdown, Cell, Measure

FORMAT = "fvflops.report"
SCHEMA = 1
# JavaScript's numbers are exact up to here; what is larger is written as text, which the page reads exactly.
_EXACT = 2**53
_PLACE = re.compile(r"\{\{(\w+)\}\}")


def render(breakdown: Breakdown) -> Iterator[str]:
    """Yield the pieces of the page, which contains its style, script and data and needs no network.

    >>> from fvflops.trace import ModuleInfo, ModuleTree
    >>> net = ModuleTree({"": ModuleInfo("", "", "</script>")})
    >>> page = "".join(render(Breakdown(net, {"flops": Measure("FLOPs", {Cell(""): 12})})))
    >>> page.count("</script>"), "\\\\u003c/script>" in page
    (2, True)
    """
    title = printable(breakdown.modules.root.class_name) or "model"
    style, script = _read("report.css"), _read("report.js")
    parts = {
        "title": escape(title[:200]),
        "policy": f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(script)}; base-uri 'none'",
        "style": style,
        "script": script,
        "data": write_data(breakdown),
    }
    # One pass over the template: inserted text is not scanned for placeholders.
    for index, piece in enumerate(_PLACE.split(_read("template.html"))):
        yield parts[piece] if index % 2 else piece


def write_data(breakdown: Breakdown) -> str:
    """Return the data of the page as JSON without any `<`, so that nothing in it can end its script element.

    Names are as `fvflops.reports.names.printable` writes them. Modules are columns: the index of the parent, and
    indexes into `strings` of name, class and description. `rows` are columns too: indexes of module, phase and
    operator; each measure has a value for every row, or the rows that it has values for.
    """
    strings: dict[str, int] = {}
    modules = _write_modules(breakdown, strings)
    cells = dict.fromkeys(
        cell for measure in breakdown.measures.values() for cell in (*measure.values, *measure.unknown)
    )
    phases = [phase for phase in ("", *PHASES) if any(cell.phase == phase for cell in cells)]
    operators = {name: index for index, name in enumerate(dict.fromkeys(cell.operator for cell in cells))}
    record = {
        "format": FORMAT,
        "schema": SCHEMA,
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
        "unknown_elements": {printable(op): _write_number(count) for op, count in breakdown.unknown_elements.items()},
        "unknown_places": {
            printable(op): [printable(place) for place in places] for op, places in breakdown.unknown_places.items()
        },
        "strings": list(strings),
    }
    del modules["index"]
    text = json.dumps(record, allow_nan=False, separators=(",", ":"), default=int)
    return text.replace("<", "\\u003c")


def _write_modules(breakdown: Breakdown, strings: dict[str, int]) -> dict[str, Any]:
    """Return the columns of the modules, each under its first name, and the index of each by its name."""
    index: dict[str, int] = {}
    columns: dict[str, list[int]] = {"parent": [], "name": [], "class": [], "about": []}
    for place in breakdown.modules.modules():
        parent = next((above for above in reversed(modules_above(place.name)) if above in index), "")
        leaf = place.name.rpartition(".")[2]
        index[place.name] = len(index)
        columns["parent"].append(index.get(parent, 0) if place.name else -1)
        for column, text in (("name", leaf), ("class", place.class_name), ("about", place.extra_repr)):
            columns[column].append(strings.setdefault(printable(text), len(strings)))
    return {**columns, "index": index}


def _write_measure(key: str, measure: Measure, cells: Iterable[Cell]) -> dict[str, Any]:
    """Return a measure with its values by row; where few rows have one, with the indexes of these rows."""
    values = [_write_number(measure.values.get(cell, 0)) for cell in cells]
    filled = [index for index, value in enumerate(values) if value]
    record: dict[str, Any] = {"key": key, "title": measure.title, "unit": measure.unit, "note": measure.note}
    if len(filled) * 2 < len(values):
        record |= {"rows": filled, "values": [values[index] for index in filled]}
    else:
        record["values"] = values
    unknown = [[index, measure.unknown[cell]] for index, cell in enumerate(cells) if cell in measure.unknown]
    return {**record, "unknown": unknown}


def _write_number(count: Any) -> Any:
    # A handle that a program set may have returned a number of numpy, or a mean.
    if isinstance(count, float):
        return count
    return int(count) if abs(count) <= _EXACT else str(int(count))


@cache
def _read(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    """Return what a content security policy calls a script or style that may stand in the page, and no other."""
    return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


__all__ = ["FORMAT", "SCHEMA", "render", "write_data"]
