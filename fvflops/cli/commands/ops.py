"""`fvflops ops`: list the rows of a table, explain its row for one op, check its examples, or time a call of an op."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from fvflops.analysis.table_examples import check_examples, sign_example
from fvflops.cli.outputs import write_report
from fvflops.cli.progress import activity
from fvflops.cli.shared_options import add_convention, add_imports, add_report, import_modules
from fvflops.devices.devices import load_peaks
from fvflops.formulas import FormulaTable, Row, load_table
from fvflops.formulas.language.expression import Expression
from fvflops.formulas.schema import is_composite, schemas_of
from fvflops.formulas.table import FUNCTION_PREFIX
from fvflops.plan.step_time.op_estimate import estimate_signature, op_report
from fvflops.reports.document import Document, Items, Table, Value, data_only, text_column
from fvflops.text import nearest, suggest

EXAMPLES = (
    "fvflops ops linear",
    "fvflops ops --convention fvcore",
    "fvflops ops mm --time '8192 4096, 4096 512' --device H100",
    "fvflops ops --check --table mine.yaml --import my_ops",
)
_MAX_SUGGESTED = 6  # ops in a message
_PARTS = ("shapes", "use", "macs", "flops", "activations", "label")
_KEYS = ("kind", *_PARTS, "source", "example")
_COLUMNS = data_only([text_column("op", shorten_last=True), *map(text_column, ("formula", *_KEYS))], _KEYS)
_STATUSES = {"zero_flop": "zero-FLOP", "decompose": "decomposed"}


def rows_report(table: FormulaTable) -> Document:
    """Return a row for each op, function and module class of a table, with its formula or status."""
    rows = [_list_values(name, row) for name, row in sorted({**table.rows, **table.modules}.items())]
    title = f"{table.name}: {table.description}" if table.description else table.name
    notes = ("`fvflops ops NAME` shows a truncated formula in full.",)
    return Document("ops", title, [Table("rows", _COLUMNS, rows, notes=notes, noun="op")])


def row_report(table: FormulaTable, name: str) -> Document:
    """Return the row of one op, function or module class; an unknown name raises ValueError."""
    if name in table.modules:
        return _write_row(name, table.modules[name], _describe_row(table, table.modules[name], name))
    op = _qualify(name)
    row = table.row(op)
    schemas = {} if op.startswith(FUNCTION_PREFIX) else schemas_of(op)
    if not schemas and (row is None or (row.name != op and "." in op)):
        raise ValueError(f"no op or module class is called {name!r} in table {table.name!r}{_suggest(table, name)}")
    lines = [("schema", str(schema)) for schema in schemas.values()]
    if row is not None:
        return _write_row(op, row, [*lines, *_describe_row(table, row, op)])
    composite = all(is_composite(overload) for overload in schemas)
    treatment = "decomposed into the ops that run inside" if composite and not table.opaque else "unsupported"
    return _write_row(op, None, [*lines, (f"table {table.name}", f"no row, so it is {treatment}")])


def _suggest(table: FormulaTable, name: str) -> str:
    """Return, as the end of a message, the ops that begin with a name or have it as label, else a similar name."""
    short_name = name.removeprefix("aten::")
    ops = [op for op in table.rows if op.startswith(f"aten::{short_name}")]
    ops = sorted(ops or [op for op, row in table.rows.items() if row.label == name], key=lambda op: (len(op), op))
    if ops:
        more = len(ops) - _MAX_SUGGESTED
        return f": ops are {', '.join(ops[:_MAX_SUGGESTED])}" + (f" and {more} more" if more > 0 else "")
    by_short_name = {op.removeprefix("aten::"): op for op in table.rows}  # a common prefix makes all names similar
    near = nearest(short_name.lower(), by_short_name, cutoff=0.75)
    return f": did you mean {by_short_name[near]!r}?" if near else suggest(name, table.modules, cutoff=0.8)


def examples_report(table: FormulaTable, results: Sequence[tuple[Row, ValueError | None]]) -> Document:
    """Return the number of examples with the expected result, and the errors of the others."""
    problems = [str(problem) for _, problem in results if problem is not None]
    rows = [(row.name, row.example, None if problem is None else str(problem)) for row, problem in results]
    keys = ("op", "example", "problem")
    title = f"{table.name}: {len(results) - len(problems)} of {len(results)} examples hold"
    # Problems are sentences above the table, which would truncate them.
    examples = Table("examples", data_only(map(text_column, keys), keys), rows)
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
        lines.append(("formula of", row.name))
    texts = [text for text in (row.macs, row.flops, row.activations) if text is not None]
    names = set().union(*(Expression.parse(text).names for text in texts)) & table.constants.keys()
    constants = ", ".join(f"{constant} = {table.constants[constant]}" for constant in sorted(names))
    return [*lines, *_list_parts(row), *([("constants", constants)] if constants else [])]


def _list_parts(row: Row) -> list[tuple[str, str]]:
    """Return the fields of a row as (key, text), in the order in which a table lists them."""
    parts = [(key, getattr(row, key)) for key in (*_PARTS, "source", "example") if row.kind == "counted"]
    written = [(key, str(value)) for key, value in parts if value not in (None, "")]
    return written if row.covers else [*written, ("covers", "false, so ops inside are counted too")]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_convention(parser)
    parser.add_argument("name", nargs="?", metavar="NAME", help="op or module class to explain: aten::linear, linear")
    parser.add_argument(
        "--check", action="store_true", help="run and check the examples of the convention's rows, or of NAME"
    )
    parser.add_argument(
        "--time",
        metavar="'SIZES, ...'",
        help="estimated time of a call with these tensors, written as in a row's example: '8192 4096 bfloat16, ...'",
    )
    parser.add_argument("--device", metavar="NAME", help="accelerator of --time: H100, or FILE.yaml:NAME")
    add_imports(parser, help="module that registers ops, so that their rows can be checked and explained")
    add_report(parser)


def run(arguments: argparse.Namespace) -> int:
    """List a table, explain or time one op, or check the examples; return 1 where one fails, else 0."""
    import_modules(arguments.imports)
    if arguments.time or arguments.device:
        if not (arguments.time and arguments.device and arguments.name) or arguments.check:
            example = "fvflops ops aten::mm --time '8 16, 16 4' --device H100"
            raise ValueError(f"--time and --device are for one op: {example}")
        signature = sign_example(_qualify(arguments.name), f"{arguments.time} = 0")
        write_report(op_report(estimate_signature(signature, load_peaks(arguments.device, "--device"))), arguments)
        return 0
    table = load_table(arguments.table)
    report = row_report(table, arguments.name) if arguments.name else rows_report(table)
    results: list[tuple[Row, ValueError | None]] = []
    if arguments.check:
        row = table.row(_qualify(arguments.name)) if arguments.name else None
        if arguments.name and (row is None or not row.example):
            raise ValueError(f"--check: {arguments.name} has no example in table {table.name!r}")
        with activity(f"checking the examples of {arguments.table}"):
            results = list(check_examples(table, None if row is None else [row]))
        report = examples_report(table, results)
    write_report(report, arguments)
    return int(any(problem is not None for _, problem in results))


def _qualify(name: str) -> str:
    return name if "::" in name else f"aten::{name}"
