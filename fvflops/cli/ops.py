"""`fvflops ops`: what a table says of every op, or of one."""

from __future__ import annotations

import argparse
from difflib import get_close_matches

from fvflops.formulas import FormulaTable, Row, load_table


def run(arguments: argparse.Namespace) -> int:
    """Print the rows of a table, or explain one op; return the exit code."""
    table = load_table(arguments.table)
    print(explain(table, arguments.name) if arguments.name else list_rows(table))
    return 0


def list_rows(table: FormulaTable) -> str:
    """Return one line for each row: the op, and its formula or status."""
    width = max(len(op) for op in table.rows)
    rows = [f"{op:<{width}}  {_formula(row)}" for op, row in sorted(table.rows.items())]
    return "\n".join([f"{table.name}: {table.description}", "", *rows])


def explain(table: FormulaTable, name: str) -> str:
    """Return what a table says of one op: schemas, formula, source, example; an unknown name raises ValueError."""
    import torch

    op = name if "::" in name else f"aten::{name}"
    row = table.row(op)
    packet, _, overload = op.partition(".") if not op.startswith("prim::PythonOp.") else (op, "", "")
    schemas = [
        str(schema)
        for schema in torch._C._jit_get_schemas_for_operator(packet)
        if not overload or schema.overload_name == overload
    ]
    if row is None and not schemas:
        near = get_close_matches(op, table.rows, n=1, cutoff=0.0)
        raise ValueError(f"no op is called {op!r}" + (f": the nearest in the table is {near[0]!r}" if near else ""))
    lines = [op, *(f"  schema:      {schema}" for schema in schemas)]
    if row is None:
        return "\n".join([*lines, f"  table {table.name}: no row; a composite op is counted by what runs inside it"])
    lines.append(f"  table {table.name}: {row.kind}, from {row.file}:{row.line}")
    if row.name != op:
        lines.append(f"  by the row:  {row.name}")
    lines.extend(f"  {key + ':':<12} {value}" for key, value in _parts(row))
    return "\n".join(lines)


def _formula(row: Row) -> str:
    parts = [f"{key}: {value}" for key, value in _parts(row) if key not in ("source", "example")]
    return ", ".join(parts) or row.kind


def _parts(row: Row) -> list[tuple[str, str]]:
    """Return what a row says, as (key, text) in the order of the table's format."""
    keys = ("shapes", "use", "macs", "flops", "activations", "label", "source", "example")
    parts = [(key, getattr(row, key)) for key in keys if row.kind == "counted"]
    return [(key, str(value)) for key, value in parts if value not in (None, "")]
