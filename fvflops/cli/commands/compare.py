"""`fvflops compare`: count one model by several conventions and explain the differences."""

from __future__ import annotations

import argparse
from dataclasses import replace

from fvflops.cli.arguments import add_model, add_report, add_run, model_options, parse_assumptions
from fvflops.cli.outputs import write_report
from fvflops.features.conventions.compare import compare
from fvflops.features.conventions.report import comparison_report
from fvflops.sources.load import load_model
from fvflops.sources.loaded_model import with_input_hint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `fvflops compare`."""
    add_model(parser)
    add_run(parser)
    parser.add_argument(
        "--tables",
        metavar="A,B,...",
        help="conventions to compare with that of --table, which is always listed, first; default: all shipped ones",
    )
    add_report(parser)


def run(arguments: argparse.Namespace) -> int:
    """Count a model by the conventions that the arguments name and write the report; return the exit code."""
    names = [name for name in (arguments.tables or "").split(",") if name]
    if arguments.tables is not None and not names:
        raise ValueError(f"--tables {arguments.tables!r} names no convention: write default,fvcore,torch")
    subject = load_model(arguments.model, model_options(arguments, device=arguments.device))
    subject.model.train(arguments.train)
    # The reference is first, and listed once.
    tables = list(dict.fromkeys([arguments.table, *names])) if names else ()
    compared = with_input_hint(
        subject,
        lambda: compare(
            subject.model,
            subject.inputs,
            kwargs=subject.kwargs,
            tables=tables,
            execution=arguments.execution,
            assume=parse_assumptions(arguments.assume),
        ),
    )
    compared = replace(compared, subject=f"{arguments.model} on {compared.subject}")
    reference = arguments.table if arguments.table in compared.totals else next(iter(compared.totals))
    write_report(comparison_report(compared, against=reference), arguments)
    return 0
