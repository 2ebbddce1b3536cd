"""What a formula table says of its rows and of one op, and whether its examples hold."""

from __future__ import annotations

from collections.abc import Sequence

from fvflops.formulas import FormulaTable, Row
from fvflops.formulas.language.expression import Expression
from fvflops.formulas.schema import is_composite, schemas_of
from fvflops.reports.document import Document, Items, Table, Value, data_only, text_column
from fvflops.text import suggest

_FUNCTION = "prim::PythonOp."
_PARTS = ("shapes", "use", "macs", "flops", "activations", "label")
_COLUMNS = (
    text_column("op", shorten_last=True),
    text_column("formula"),
    text_column("kind"),
    *map(text_column, _PARTS),
    text_column("source"),
    text_column("example"),
)
_STATUSES = {"free": "zero-FLOP", "omitted": "ignored", "decompose": "decomposed"}


def rows_report(table: FormulaTable) -> Document:
    """Return a row for each op, function and module class of a table, with its formula or status."""
    rows = [_list_values(name, row) for name, row in sorted({**table.rows, **table.modules}.items())]
    title = f"{table.name}: {table.description}" if table.description else table.name
    notes = ("A formula that is shortened here: fvflops ops NAME.",)
    columns = data_only(_COLUMNS, [column.key for column in _COLUMNS[2:]])
    return Document("ops", title, [Table("rows", columns, rows, notes=notes, noun="op")])


def row_report(table: FormulaTable, name: str) -> Document:
    """Return what a table says of one op, function or module class; an unknown name raises ValueError."""
    if name in table.modules:
        row = table.modules[name]
        return _write_row(name, row, _describe_row(table, row, name))
    op = name if "::" in name else f"aten::{name}"
    found = table.row(op)
    schemas = {} if op.startswith(_FUNCTION) else schemas_of(op)
    if not schemas and (found is None or (found.name != op and "." in op)):
        raise ValueError(f"no op is called {op!r}{suggest(op, [*table.rows, *table.modules])}")
    lines = [("schema", str(schema)) for schema in schemas.values()]
    if found is not None:
        return _write_row(op, found, [*lines, *_describe_row(table, found, op)])
    composite = all(is_composite(overload) for overload in schemas)
    fate = "decomposed into the ops that run inside" if composite and not table.opaque else "unsupported"
    return _write_row(op, None, [*lines, (f"table {table.name}", f"no row, so it is {fate}")])


def examples_report(table: FormulaTable, results: Sequence[tuple[Row, ValueError | None]]) -> Document:
    """Return how many examples of a table hold, and what is wrong with the others."""
    problems = [str(problem) for _, problem in results if problem is not None]
    rows = [(row.name, row.example, None if problem is None else str(problem)) for row, problem in results]
    columns = text_column("op"), text_column("example"), text_column("problem")
    title = f"{table.name}: {len(results) - len(problems)} of {len(results)} examples hold"
    # Whole in sentences; a table would shorten them.
    examples = Table("examples", data_only(columns, [column.key for column in columns]), rows)
    return Document("examples", title, [Items("", problems), examples])


def _write_row(name: str, row: Row | None, lines: Sequence[tuple[str, str]]) -> Document:
    rows = [] if row is None else [_list_values(name, row)]
    table = Table("rows", data_only(_COLUMNS, [column.key for column in _COLUMNS]), rows, noun="op")
    return Document("ops", name, [Items("", [f"{key}: {value}" for key, value in lines]), table])


def _list_values(name: str, row: Row) -> tuple[Value, ...]:
    parts = dict(_list_parts(row))
    formula = [f"{key}: {value}" for key, value in parts.items() if key not in ("source", "example")]
    values = [parts.get(key) for key in (*_PARTS, "source", "example")]
    return name, ", ".join(formula) or _STATUSES.get(row.kind, row.kind), row.kind, *values


def _describe_row(table: FormulaTable, row: Row, name: str) -> list[tuple[str, str]]:
    lines = [("table", table.name)] if table.name != row.file else []
    lines.append(("row", f"{_STATUSES.get(row.kind, row.kind)}, at {row.file}:{row.line}"))
    if row.name != name:
        lines.append(("by the row", row.name))
    texts = [text for text in (row.macs, row.flops, row.activations) if text is not None]
    names = set().union(*(Expression.parse(text).names for text in texts)) & table.constants.keys()
    constants = ", ".join(f"{constant} = {table.constants[constant]}" for constant in sorted(names))
    return [*lines, *_list_parts(row), *([("constants", constants)] if constants else [])]


def _list_parts(row: Row) -> list[tuple[str, str]]:
    """Return what a row says, as (key, text) in the order of the table's format."""
    parts = [(key, getattr(row, key)) for key in (*_PARTS, "source", "example") if row.kind == "counted"]
    written = [(key, str(value)) for key, value in parts if value not in (None, "")]
    return written if row.covers else [*written, ("covers", "false, so ops inside are counted too")]
