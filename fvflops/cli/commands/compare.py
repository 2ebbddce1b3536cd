"""`fvflops compare`: count one model by several conventions and explain the differences."""

from __future__ import annotations

import argparse
from dataclasses import replace

from fvflops.cli.open_analysis import open_model
from fvflops.cli.outputs import write_report
from fvflops.cli.parser import add_options
from fvflops.cli.shared_options import add_backward, add_convention, add_model, add_report, add_run
from fvflops.comparison.convention_differences import compare_by, comparison_report
from fvflops.formulas import load_table, shipped_tables

EXAMPLES = ("fvflops compare zoo:resnet50", "fvflops compare zoo:resnet50 --conventions default,fvcore,torch")
FIRST = ("--conventions", "--batch", "--seq", "--input", "--backward")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_convention(parser)
    add_model(parser)
    add_run(parser)
    add_backward(parser)
    text = "conventions to compare with --convention, which is listed first; default: all shipped ones"
    # `--tables` is its name in version 1.0.
    add_options(parser, f"--conventions, --tables CONVENTION,...  {text}", dest={"conventions": "tables"})
    add_report(parser)


def run(arguments: argparse.Namespace) -> int:
    """Count a model by the conventions that the arguments name and write the report; return the exit code."""
    names = [name for name in (arguments.tables or "").split(",") if name]
    if arguments.tables is not None and not names:
        raise ValueError(f"--conventions {arguments.tables!r} names no convention: write default,fvcore,torch")
    # The reference is first, and listed once.
    chosen = dict.fromkeys([arguments.table, *(names or shipped_tables())])
    tables = [load_table(name) for name in chosen]
    compared = compare_by(tables, open_model(arguments.model, arguments), may_leave_out=not names)
    compared = replace(compared, subject=f"{arguments.model} on {compared.subject}")
    reference = arguments.table if arguments.table in compared.totals else next(iter(compared.totals))
    write_report(comparison_report(compared, against=reference), arguments)
    return 0
