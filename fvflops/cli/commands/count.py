"""`fvflops count`: one model, recorded once, counted and reported."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from typing import TypeVar

from fvflops import __version__, paths
from fvflops.analysis import FlopCountAnalysis, summarise
from fvflops.analysis.model_analysis import analysed_run
from fvflops.analysis.model_counts import list_call_rows
from fvflops.cli.arguments import add_depth, add_exports, add_model, add_order, add_output, add_run, parse_assumptions
from fvflops.cli.exports import check_exports
from fvflops.cli.models import load_model, with_input_hint
from fvflops.cli.outputs import write
from fvflops.cli.terminal import find_terminal
from fvflops.counting.unsupported_places import find_unsupported_places
from fvflops.formulas import load_table
from fvflops.reports import GRAPHS, PAGES, PICTURES, REPORTS, csv, markdown
from fvflops.reports.fvcore import table as table_report
from fvflops.reports.pictures import picture
from fvflops.reports.terminal import op_coverage, terminal
from fvflops.reports.terminal.collapse import collapse
from fvflops.reports.terminal.op_coverage import format_places
from fvflops.text import nearest
from fvflops.trace import Status, Summary
from fvflops.views.analysed_run import describe_run
from fvflops.views.breakdown import read_breakdown
from fvflops.views.call_rows import CALL_VIEWS, write_json
from fvflops.views.ranking import check_sort, check_top
from fvflops.views.summary import column_metrics, make_summary, with_columns

T = TypeVar("T")
# Those that a list of calls has.
_CALL_FORMATS = ("table", "csv", "json")
# The reports whose rows can be ordered, cut and collapsed.
_LISTS: Mapping[str, Callable[..., str]] = {
    "table": table_report.render,
    "markdown": markdown.render,
    "csv": csv.render,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `fvflops count`."""
    add_model(parser)
    add_output(parser)
    add_run(parser)
    parser.add_argument(
        "--by",
        choices=("module", "operator", "both", "op", "call", "line"),
        default="module",
        help="a line for each module (default), each operator, both, each op call, each call of a module, "
        "or each line of source",
    )
    add_depth(parser)
    parser.add_argument(
        "--format",
        default="table",
        metavar="F",
        help="table, fvcore (the table with shapes of parameters, on a terminal too), tree, json, csv, "
        "markdown, paper, latex, html, svg, png, dot (for Graphviz) or model-explorer",
    )
    add_order(parser, "parameters, flops, activations or name, all levels in one list; default: in order")
    parser.add_argument(
        "--collapse", action="store_true", help="show equal layers that follow each other as one row with their sum"
    )
    parser.add_argument("--strict", action="store_true", help="an op without a formula is an error")
    files = parser.add_argument_group("files beside the report, of counted work")
    add_exports(files, weights="flops (default), macs, bytes, memory")


def run(arguments: argparse.Namespace) -> int:
    """Count the model that the arguments name and write the report; return the exit code."""
    check_format(arguments.format)
    _check_rows(arguments)
    if arguments.format in PICTURES:
        _check_picture(arguments)
    if arguments.format in GRAPHS and arguments.by != "module":
        raise ValueError(f"--by {arguments.by}: a graph is drawn by module")
    if arguments.by in CALL_VIEWS and arguments.format not in _CALL_FORMATS:
        raise ValueError(f"--by {arguments.by} --format {arguments.format}: its formats are {', '.join(_CALL_FORMATS)}")
    if arguments.weight == "time":
        raise ValueError("--weight time: nothing is timed here; fvflops profile runs the model under the clock")
    files = check_exports(arguments)
    table = load_table(arguments.table)
    subject = load_model(arguments.model, arguments.input, config=arguments.config, device=arguments.device)
    subject.model.train(arguments.train)
    flops = FlopCountAnalysis(
        subject.model,
        subject.inputs,
        kwargs=subject.kwargs,
        table=table,
        execution=arguments.execution,
        assume=parse_assumptions(arguments.assume),
        lines=arguments.by in ("op", "line") or arguments.format == "model-explorer",
        warn=False,
    )
    with_input_hint(subject, flops.trace)
    unknown = flops.counts().ledger()[Status.UNKNOWN]
    if arguments.strict and unknown:
        places = find_unsupported_places(flops.trace(), flops.counts())
        listed = ", ".join(f"{op} ×{times} (in {format_places(places[op])})" for op, times in unknown.most_common())
        raise ValueError(f"table {table.name!r} has no row for {listed} (--strict)")
    for path, format in files.items():
        flops.export(path, format=format, weight=arguments.weight)
    if arguments.format in GRAPHS:
        write(flops.to_graph(arguments.format, depth=arguments.depth), arguments.output)
        return 0
    if arguments.by in CALL_VIEWS:
        write(_render_calls(flops, arguments), arguments.output)
        return 0
    if arguments.format in PAGES:
        write("".join(PAGES[arguments.format](read_breakdown(analysed_run(flops)))), arguments.output)
        return 0
    if arguments.format in PICTURES:
        figure = PICTURES[arguments.format](read_breakdown(analysed_run(flops)), depth=arguments.depth)
        paths.write_bytes(arguments.output, picture.encode(figure, arguments.format))
        return 0
    summary = make_summary(with_columns(analysed_run(flops)))
    write(_render(summary, arguments), arguments.output)
    return 0


def _render_calls(flops: FlopCountAnalysis, arguments: argparse.Namespace) -> str:
    if arguments.format == "table":
        if arguments.by == "call":
            text = flops.module_call_table(depth=arguments.depth)
        else:
            text = flops.op_table() if arguments.by == "op" else flops.line_table()
        return f"{text}\n\n{op_coverage.render(summarise(flops))}"
    rows = list_call_rows(flops, arguments.by, arguments.depth)
    if arguments.format == "csv":
        return csv.write_rows(*rows)
    return write_json(rows, {"fvflops": __version__, **describe_run(analysed_run(flops))})


def _render(summary: Summary, arguments: argparse.Namespace) -> str:
    if arguments.format not in _LISTS:
        text = REPORTS[arguments.format](summary, by=arguments.by, depth=arguments.depth)
        return f"{text}\n\n{op_coverage.render(summary)}" if arguments.format in ("fvcore", "tree") else text
    summary = collapse(summary) if arguments.collapse else summary
    options = {"by": arguments.by, "depth": arguments.depth, "sort": arguments.sort, "top": arguments.top}
    if arguments.format != "table":
        return _LISTS[arguments.format](summary, **options)
    screen = find_terminal(sys.stdout) if arguments.output is None else None
    if screen is not None:
        return terminal.render(summary, **options, **screen._asdict())
    return f"{table_report.render(summary, **options)}\n\n{op_coverage.render(summary)}"


def _check_rows(arguments: argparse.Namespace) -> None:
    """Raise ValueError where rows are to be ordered, cut or collapsed in a report that does not do that."""
    asked = {"--sort": arguments.sort, "--top": arguments.top, "--collapse": arguments.collapse or None}
    given = [option for option, value in asked.items() if value is not None]
    if given and arguments.format not in _LISTS:
        raise ValueError(f"{given[0]} is for the formats {', '.join(_LISTS)}, not for {arguments.format}")
    if arguments.collapse and arguments.by == "operator":
        raise ValueError("--collapse makes equal modules one row: leave --by operator out")
    if given and arguments.by in CALL_VIEWS:
        raise ValueError(f"{given[0]} is for --by module, operator and both, not for {arguments.by}")
    check_top(arguments.top)
    if arguments.sort is not None:
        # Operators have no parameters.
        check_sort(arguments.sort, [*(["parameters"] * (arguments.by == "module")), *column_metrics(), "name"])


def check_format(name: str) -> None:
    """Raise ValueError, naming the nearest, where no report is called so.

    >>> check_format("htlm")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: no format is called 'htlm': take 'html', or another of csv, dot, fvcore, html, ...
    """
    known = sorted((*REPORTS, *PAGES, *PICTURES, *GRAPHS))
    if name not in known:
        near = nearest(name, known, cutoff=0)
        raise ValueError(f"no format is called {name!r}: take {near!r}, or another of {', '.join(known)}")


def _check_picture(arguments: argparse.Namespace) -> None:
    if arguments.by != "module":
        raise ValueError(f"--by {arguments.by}: a picture is drawn by module")
    if arguments.output is None:
        raise ValueError(f"a picture needs a file: add --output model.{arguments.format}")
    picture.check_drawable()
