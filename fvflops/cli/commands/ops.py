"""`fvflops ops`: list the rows of a table, explain its row for one op, check its examples, or time a call of an op."""

from __future__ import annotations

import argparse

from fvflops.analysis.table_examples import check_examples, sign_example
from fvflops.cli.outputs import write_report
from fvflops.cli.progress import activity
from fvflops.cli.shared_options import add_convention, add_imports, add_report, import_modules
from fvflops.devices.devices import load_peaks
from fvflops.formulas import load_table
from fvflops.plan.step_time.op_estimate import estimate_signature, op_report
from fvflops.reports.document import Document
from fvflops.reports.formula_rows import examples_report, row_report, rows_report

EXAMPLES = (
    "fvflops ops linear",
    "fvflops ops --convention fvcore",
    "fvflops ops mm --time '8192 4096, 4096 512' --device H100",
    "fvflops ops --check --table mine.yaml --import my_ops",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `fvflops ops`."""
    add_convention(parser)
    parser.add_argument("name", nargs="?", metavar="NAME", help="op or module class to explain: aten::linear, linear")
    parser.add_argument("--check", action="store_true", help="run and check the examples of the convention's rows")
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
        write_report(_time(arguments), arguments)
        return 0
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


def _time(arguments: argparse.Namespace) -> Document:
    """Return the estimated time of the call that --time describes."""
    if not (arguments.time and arguments.device and arguments.name) or arguments.check:
        raise ValueError("--time and --device are for one op: fvflops ops aten::mm --time '8 16, 16 4' --device H100")
    op = arguments.name if "::" in arguments.name else f"aten::{arguments.name}"
    signature = sign_example(op, f"{arguments.time} = 0")
    return op_report(estimate_signature(signature, load_peaks(arguments.device, "--device")))
