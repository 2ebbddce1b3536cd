"""`fvflops ops`: list the rows of a table, explain its row for one op, or check its examples."""

from __future__ import annotations

import argparse

from fvflops.analysis.table_examples import check_examples
from fvflops.cli.arguments import add_report
from fvflops.cli.outputs import write_report
from fvflops.formulas import load_table
from fvflops.reports.formula_rows import examples_report, row_report, rows_report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `fvflops ops`."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="op or module class to explain: aten::linear, linear")
    parser.add_argument("--check", action="store_true", help="run and check the examples of the table's rows")
    add_report(parser)


def run(arguments: argparse.Namespace) -> int:
    """List a table, explain one op, or check the examples; return 1 where one fails, else 0."""
    table = load_table(arguments.table)
    if arguments.check:
        results = list(check_examples(table))
        write_report(examples_report(table, results), arguments)
        return int(any(problem is not None for _, problem in results))
    write_report(row_report(table, arguments.name) if arguments.name else rows_report(table), arguments)
    return 0
