"""`fvflops ops`: list the rows of a table, explain its row for one op, or check its examples."""

from __future__ import annotations

import argparse

from fvflops.analysis.table_examples import check_examples
from fvflops.cli.outputs import write_report
from fvflops.cli.progress import activity
from fvflops.cli.shared_options import add_convention, add_imports, add_report, import_modules
from fvflops.formulas import load_table
from fvflops.reports.formula_rows import examples_report, row_report, rows_report

EXAMPLES = (
    "fvflops ops linear",
    "fvflops ops --convention fvcore",
    "fvflops ops --check --table mine.yaml --import my_ops",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `fvflops ops`."""
    add_convention(parser)
    parser.add_argument("name", nargs="?", metavar="NAME", help="op or module class to explain: aten::linear, linear")
    parser.add_argument("--check", action="store_true", help="run and check the examples of the convention's rows")
    add_imports(parser, help="module that registers ops, so that their rows can be checked and explained")
    add_report(parser)


def run(arguments: argparse.Namespace) -> int:
    """List a table, explain one op, or check the examples; return 1 where one fails, else 0."""
    import_modules(arguments.imports)
    table = load_table(arguments.table)
    if arguments.check and arguments.name:
        raise ValueError(f"--check runs all examples of a table: omit {arguments.name}, or --check")
    if arguments.check:
        with activity(f"checking the examples of {arguments.table}"):
            results = list(check_examples(table))
        write_report(examples_report(table, results), arguments)
        return int(any(problem is not None for _, problem in results))
    write_report(row_report(table, arguments.name) if arguments.name else rows_report(table), arguments)
    return 0
