"""`fvflops ops`: what a table says of every op, or of one, and whether its examples hold."""

from __future__ import annotations

import argparse

from fvflops.analysis.table_examples import check_examples
from fvflops.formulas import FormulaTable, Row, load_table
from fvflops.formulas.language.expression import Expression
from fvflops.formulas.schema import is_composite, schemas_of
from fvflops.text import suggest

_FUNCTION = "prim::PythonOp."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `fvflops ops`."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="the op to explain, such as aten::linear or linear")
    parser.add_argument("--check", action="store_true", help="run the examples of the table's rows")


def run(arguments: argparse.Namespace) -> int:
    """Print the rows of a table, explain one op, or check the examples; return the exit code."""
    table = load_table(arguments.table)
    if arguments.check:
        return check(table)
    print(explain(table, arguments.name) if arguments.name else list_rows(table))
    return 0


def check(table: FormulaTable) -> int:
    """Run the example of each row, print those that do not hold, and return 1 if there are any."""
    results = list(check_examples(table))
    problems = [problem for _, problem in results if problem is not None]
    for problem in problems:
        print(problem)
    print(f"{table.name}: {len(results) - len(problems)} of {len(results)} examples hold")
    return 1 if problems else 0


def list_rows(table: FormulaTable) -> str:
    """Return one line for each row: the op, function or module class, and its formula or status."""
    rows = {**table.rows, **table.modules}
    width = max(map(len, rows), default=0)
    lines = [f"{name:<{width}}  {_formula(row)}" for name, row in sorted(rows.items())]
    title = f"{table.name}: {table.description}" if table.description else table.name
    return "\n".join([title, "", *lines])


def explain(table: FormulaTable, name: str) -> str:
    """Return what a table says of one op, function or module class; an unknown name raises ValueError."""
    if name in table.modules:
        return "\n".join([name, *_describe_row(table, table.modules[name], name)])
    op = name if "::" in name else f"aten::{name}"
    row = table.row(op)
    schemas = {} if op.startswith(_FUNCTION) else schemas_of(op)
    if not schemas and (row is None or (row.name != op and "." in op)):
        raise ValueError(f"no op is called {op!r}{suggest(op, [*table.rows, *table.modules])}")
    lines = [op, *(f"  schema:      {schema}" for schema in schemas.values())]
    if row is not None:
        return "\n".join([*lines, *_describe_row(table, row, op)])
    composite = all(is_composite(overload) for overload in schemas)
    fate = "looked into, and counted by the ops that run inside" if composite and not table.opaque else "unknown"
    return "\n".join([*lines, f"  table {table.name}: no row, so it is {fate}"])


def _describe_row(table: FormulaTable, row: Row, name: str) -> list[str]:
    lines = [f"  table {table.name}: {row.kind}, from {row.file}:{row.line}"]
    if row.name != name:
        lines.append(f"  by the row:  {row.name}")
    texts = [text for text in (row.macs, row.flops, row.activations) if text is not None]
    names = set().union(*(Expression.parse(text).names for text in texts)) & table.constants.keys()
    said = ", ".join(f"{constant} = {table.constants[constant]}" for constant in sorted(names))
    parts = [*_parts(row), *([("constants", said)] if said else [])]
    return lines + [f"  {key + ':':<12} {value}" for key, value in parts]


def _formula(row: Row) -> str:
    parts = [f"{key}: {value}" for key, value in _parts(row) if key not in ("source", "example")]
    return ", ".join(parts) or row.kind


def _parts(row: Row) -> list[tuple[str, str]]:
    """Return what a row says, as (key, text) in the order of the table's format."""
    keys = ("shapes", "use", "macs", "flops", "activations", "label", "source", "example")
    parts = [(key, getattr(row, key)) for key in keys if row.kind == "counted"]
    said = [(key, str(value)) for key, value in parts if value not in (None, "")]
    return said if row.covers else [*said, ("covers", "false, what runs inside is counted too")]
