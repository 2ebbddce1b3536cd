"""JSON: the exact data of a document."""

from __future__ import annotations

import json
import math
from typing import Any

from fvflops.reports.document import Chart, Command, Document, Gantt, Items, Scatter, Table, Value

SCHEMA = 2  # since 2 "zero_flop", "ignored" and "unsupported", before "free", "omitted" and "unknown"
_POINTS = 1000  # of a chart, each with the largest total of its part


def write(document: Document, *, width: int | None = None) -> str:
    """Return a document as JSON text: `format`, `schema`, `about`, and its `data` or its tables and sentences."""
    header = {"format": f"fvflops.{document.kind}", "schema": SCHEMA}
    data = {**header, **document.about, **(document.data or _encode(document))}
    return json.dumps(data, indent=2, allow_nan=False, default=str)


def _encode(document: Document) -> dict[str, Any]:
    notes: list[str] = []
    for part in document.parts:
        if isinstance(part, Items):
            notes += part.items
        elif isinstance(part, Command):
            notes.append(f"{part.heading} {part.command}")
        else:
            notes += [part] if isinstance(part, str) else part.notes
    tables = {table.name: _encode_table(table) for table in document.tables()}
    charts = {part.name: _encode_picture(part) for part in document.parts if isinstance(part, (Chart, Gantt, Scatter))}
    return {"title": document.title, "tables": tables, **({"charts": charts} if charts else {}), "notes": notes}


def _encode_table(table: Table) -> dict[str, Any]:
    encoded: dict[str, Any] = {
        "rows": [{key: _encode_value(value) for key, value in record.items()} for record in table.records()]
    }
    if table.total is not None:
        encoded["total"] = {
            column.key: _encode_value(value)
            for column, value in zip(table.columns, table.total, strict=True)
            if value is not None and not column.is_text
        }
    return encoded


def _encode_picture(picture: Chart | Gantt | Scatter) -> dict[str, Any]:
    if isinstance(picture, Chart):
        sampled = picture.sample(min(_POINTS, len(picture.totals())))
        layers = {name: list(values) for name, values in sampled.layers.items() if any(values)}
        return {"layers": layers, "sections": [list(section) for section in sampled.sections]}
    if isinstance(picture, Gantt):
        return {
            lane: [{"kind": piece.kind, "start": piece.start, "end": piece.end, "note": piece.note} for piece in slices]
            for lane, slices in picture.lanes.items()
        }
    x, y = picture.x, picture.y
    points = [{"label": point.label, x: point.x, y: point.y, "marked": point.marked} for point in picture.points]
    return {"points": points}


def _encode_value(value: Value) -> Value:
    # JSON has no infinity, such as the arithmetic intensity of an op that moves no bytes.
    return None if isinstance(value, float) and not math.isfinite(value) else value
