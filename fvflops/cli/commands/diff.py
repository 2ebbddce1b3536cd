"""`fvflops diff`: differences in cost between two models, by module and operator."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from typing import Any

from fvflops.cli import shared_options
from fvflops.cli.argument_values import refuse
from fvflops.cli.open_analysis import open_analysis
from fvflops.cli.outputs import write, write_report
from fvflops.cli.parser import add_options
from fvflops.cli.planning.accelerator import built_on
from fvflops.comparison.diff_models import diff_traces
from fvflops.comparison.diff_report import TOP, difference_report
from fvflops.comparison.differences import MEASURES
from fvflops.formulas import load_table
from fvflops.sources.load import contains_inputs, find_source, keep_applicable

EXAMPLES = (
    "fvflops diff zoo:lenet5 zoo:lenet5 --arg-b classes=100",
    "fvflops diff zoo:gpt2 zoo:gpt2 --input 1,128:int64 --input-b 1,1024:int64",
    "fvflops diff HEAD~1:net.py:build net.py:build",
)
FIRST = ("--measure", "--batch", "--seq", "--input", "--format")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared_options.add_convention(parser)
    add_options(
        parser,
        """
        model A  a MODEL as for count, a Trace (from count --save-trace), or REV:file.py:FACTORY of a git revision
        other B  the same, after the change
        """,
    )
    shared_options.add_inputs(parser)
    add_options(
        parser,
        """
        the second model:
        --input-b INPUT ...  inputs of B where they differ from A's
        --config-b JSON  configuration of B where it differs from A's
        --arg-b NAME=VALUE ...  arguments of B where they or its source differ
        """,
    )
    shared_options.add_assume(parser)
    shared_options.add_run(parser)
    shared_options.add_trace_only(parser)
    shared_options.add_backward(parser)
    add_options(
        parser,
        "report:\n--measure  metric to show before and after, and to rank rows by; default: flops",
        choices={"measure": MEASURES},
        default={"measure": "flops"},
    )
    shared_options.add_report(parser, top=TOP)


def run(arguments: argparse.Namespace) -> int:
    """Report the difference in cost from the first model to the second; return the exit code."""
    message = "{} does not apply to --format html, an interactive page: omit it"
    refuse(arguments, (arguments.format == "html", ("sort", "top"), message))
    table = load_table(arguments.table)
    options = shared_options.model_options(arguments, device=built_on(arguments))
    first = open_analysis(arguments.model, arguments, table, options=options)
    options = keep_applicable(options, arguments.other)
    if find_source(arguments.model) != find_source(arguments.other):  # arguments of another kind of constructor
        options = replace(options, args=())
    if contains_inputs(arguments.other):  # the inputs of A do not apply
        options = replace(options, inputs=())
    changes: dict[str, Any] = {"inputs": tuple(arguments.input_b), "config": arguments.config_b}
    changes["args"] = tuple(arguments.arg_b)
    given = {field: value for field, value in changes.items() if value}
    arguments.renamed = {f"--{field.rstrip('s')}": f"--{field.rstrip('s')}-b" for field in given}  # in errors of B
    names = (arguments.model, arguments.other)
    files = filter(os.path.isfile, (name.rpartition(":")[0] for name in names))
    of_two_folders = len({os.path.realpath(os.path.dirname(file)) for file in files}) == 2
    options = replace(options, **given)
    second = open_analysis(arguments.other, arguments, table, options=options, in_subprocess=of_two_folders)
    difference = diff_traces(first.trace(), second.trace(), table=table, names=names)
    if arguments.format == "html":
        write(difference.to_html(measure=arguments.measure), arguments.output)
        return 0
    write_report(difference_report(difference, measure=arguments.measure), arguments)
    return 0
