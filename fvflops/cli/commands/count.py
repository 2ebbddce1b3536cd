"""`fvflops count`: record a model once, count it and write the report; for several models, a table."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from fvflops.analysis.model_analysis import analysed_run
from fvflops.analysis.model_counts import FlopCountAnalysis, list_call_rows
from fvflops.analysis.trace_file import save_trace
from fvflops.cli import shared_options
from fvflops.cli.argument_values import refuse
from fvflops.cli.draws import describe_draws, repeat_count
from fvflops.cli.model_table import add_table_arguments, asks_for_table, count_models
from fvflops.cli.open_analysis import open_analysis
from fvflops.cli.outputs import check_exports, is_standard_output, write, write_report
from fvflops.cli.parser import find_group
from fvflops.cli.process import report_stream
from fvflops.cli.progress import find_terminal, find_width
from fvflops.counting.uncounted_work import describe_unknown_masks, find_unsupported_locations
from fvflops.formulas import FormulaTable, load_table
from fvflops.plan.memory.memory_report import memory_curve
from fvflops.reports import REPORTS, Report
from fvflops.reports.call_tables import CALL_COLUMNS, CALL_VIEWS, call_report
from fvflops.reports.formats import FORMATS
from fvflops.reports.formats.text import Terminal
from fvflops.reports.pictures.picture import import_figure
from fvflops.reports.terminal.collapse import collapse
from fvflops.reports.terminal.op_coverage import format_locations
from fvflops.sources.patterns import expand_names
from fvflops.trace import Status
from fvflops.trace.calls import OpGraph
from fvflops.views.analysed_run import column_metrics, make_summary, with_columns
from fvflops.views.breakdown import Breakdown, read_breakdown
from fvflops.views.ranking import check_sort

EXAMPLES = (
    "fvflops count zoo:resnet50",
    "fvflops count timm:vit_base_patch16_224 --batch 8 --by operator --top 5",
    "fvflops count zoo:resnet50 --format html --output resnet50.html",
    "fvflops count zoo:lenet5 zoo:resnet50 --columns parameters,flops,memory",
)
FIRST = ("--batch", "--seq", "--input", "--by", "--format")
# Only --help all shows them.
RARE = ("--loss",)
# Kind of data that a Report takes → the function that makes it from an analysis.
_SOURCES: Mapping[str, Callable[[FlopCountAnalysis], Any]] = {
    "summary": lambda flops: make_summary(with_columns(analysed_run(flops))),
    "breakdown": lambda flops: read_breakdown(analysed_run(flops)),
    "graph": lambda flops: OpGraph(flops.op_calls(), flops.module_tree()),
    "trace": lambda flops: flops.trace(),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared_options.add_convention(parser)
    shared_options.add_model(parser, nargs="+")
    shared_options.add_run(parser)
    shared_options.add_backward(parser)
    shared_options.add_repeat(find_group(parser, "run"), "FLOPs")
    report = find_group(parser, "report")
    report.add_argument(
        "--by",
        choices=("module", "operator", "both", *CALL_VIEWS),
        default="module",
        help="one row per module (default), operator, both (operators within each module), op call, module call or "
        "source line",
    )
    shared_options.add_depth(parser)
    shared_options.add_report(
        parser,
        more={name: report.help for name, report in REPORTS.items() if name not in FORMATS},
        sort="parameters, flops, activations or name; with --by op, call or line by a column, named as in --format csv",
    )
    report.add_argument(
        "--collapse", action="store_true", help="show consecutive equal layers as one row with their sum"
    )
    report.add_argument("--strict", action="store_true", help="fail if there are unsupported ops")
    files = find_group(parser, "additional files")
    shared_options.add_exports(files, weights="flops (default), macs, bytes, memory")
    shared_options.add_save_trace(files)
    add_table_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Count the models that the arguments name and write the report; return the exit code."""
    names = expand_names(arguments.model)
    if asks_for_table(arguments, names):
        return count_models(names, arguments)
    (arguments.model,) = names
    return _count_one(arguments)


def _count_one(arguments: argparse.Namespace) -> int:
    report = REPORTS[arguments.format]
    _check(arguments, report)
    files = check_exports(arguments)
    table = load_table(arguments.table)
    # A saved Trace needs the source lines: reports of it may show them.
    lines = arguments.by in ("op", "line") or arguments.format in ("model-explorer", "trace")
    flops = open_analysis(arguments.model, arguments, table, lines=lines or arguments.save_trace is not None)
    if arguments.strict:
        _raise_for_unsupported(flops, table, arguments.table)
    if arguments.save_trace is not None:
        save_trace(flops.trace(), arguments.save_trace)
    for path, format in files.items():
        flops.export(path, format=format, weight=arguments.weight)
    if arguments.by in CALL_VIEWS:
        rows = list_call_rows(flops, arguments.by, arguments.depth)
        write_report(call_report(analysed_run(flops), arguments.by, rows), arguments)
        return 0
    source = _SOURCES[report.source](flops)
    if isinstance(source, Breakdown):
        memory = memory_curve(flops.trace()) if arguments.backward else None
        source = replace(source, name=arguments.model, memory=memory)
    if arguments.repeat is not None:
        draws = repeat_count(flops, arguments.repeat, table)
        source = replace(source, about={**source.about, "draws": describe_draws(draws, "FLOPs")})
    content = report(collapse(source) if arguments.collapse else source, **_choose_options(arguments, report))
    write(content if isinstance(content, bytes) else "".join(content), arguments.output)
    return 0


def _check(arguments: argparse.Namespace, report: Report) -> None:
    by, format = arguments.by, arguments.format
    if format not in FORMATS and by not in report.views:
        raise ValueError(f"--format {format} supports --by {', '.join(report.views)}; got {by}")
    is_own = (format not in FORMATS or format == "html") and by not in CALL_VIEWS
    without = [name for name in ("depth", "sort", "top") if name not in report.options]
    refuse(arguments, (is_own, without, f"{{}} does not apply to --format {format}: omit it"))
    if arguments.depth is not None and by in ("operator", "op", "line"):
        raise ValueError(f"--depth applies to modules: omit it, or omit --by {by}")
    if arguments.collapse and "collapse" not in report.options:
        formats = ", ".join(name for name, other in REPORTS.items() if "collapse" in other.options)
        raise ValueError(f"--collapse supports --format {formats}; got {format}")
    if arguments.collapse and by not in ("module", "both"):
        raise ValueError(f"--collapse merges rows of equal modules: omit --by {by}")
    if arguments.sort is not None:
        # Operators have no parameters.
        keys = CALL_COLUMNS.get(by, (*(["parameters"] * (by == "module")), *column_metrics()))
        check_sort(arguments.sort, [*keys, *(["name"] * ("name" not in keys))])
    if report.binary:
        if arguments.output is None:
            raise ValueError(f"--format {format} needs a file: add --output model.{format}, or --output - for a pipe")
        import_figure()  # raises without matplotlib
    if arguments.backward and by == "line":
        raise ValueError("--by line does not support --backward, which has no source lines: omit one, or use --by op")
    if arguments.repeat is not None and (by in CALL_VIEWS or report.source not in ("summary", "breakdown")):
        raise ValueError("--repeat reports the whole model's FLOPs: omit it, or omit --by and --format of single calls")
    if arguments.weight == "time":
        raise ValueError("--weight time: count measures no time; use fvflops profile")


def _raise_for_unsupported(flops: FlopCountAnalysis, table: FormulaTable, name: str) -> None:
    if not flops.trace().calls:
        raise ValueError("no op was called: nothing was counted (--strict)")
    if unsupported := flops.counts().ledger()[Status.UNSUPPORTED]:
        locations = find_unsupported_locations(flops.trace(), flops.counts())
        ops = [f"{op} ×{calls} (in {format_locations(locations[op])})" for op, calls in unsupported.most_common()]
        raise ValueError(f"table {name!r} has no formula for {', '.join(ops)} (--strict)")
    if masks := describe_unknown_masks(flops.trace(), table):
        raise ValueError(f"mask unknown, counted as dense: {masks} (--strict)")


def _choose_options(arguments: argparse.Namespace, report: Report) -> dict[str, Any]:
    stream, is_standard = report_stream(), is_standard_output(arguments.output)
    encoding = getattr(stream, "encoding", None) if is_standard else None
    terminal = find_terminal(stream) if is_standard else None
    terminal = terminal or Terminal(find_width(stream), colour=False, encoding=encoding or "utf-8")
    options = vars(arguments) | terminal._asdict()
    return {name: options[name] for name in report.options if name != "collapse"}
