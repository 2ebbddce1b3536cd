"""`fvflops count` of several models: a table with a row per model, and its plot."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fvflops import paths
from fvflops.cli.argument_values import find_chosen, parse_assumptions, refuse
from fvflops.cli.outputs import write_ordered
from fvflops.cli.parser import add_options
from fvflops.cli.planning.accelerator import built_on, runs_on
from fvflops.cli.progress import Progress
from fvflops.cli.shared_options import model_options
from fvflops.counting.metrics import METRICS
from fvflops.formulas import FormulaTable, load_table
from fvflops.reports.escaping import plain_name, printable
from fvflops.reports.formats import FORMATS
from fvflops.reports.pictures.picture import file_type
from fvflops.sources.load import check_models
from fvflops.sources.options import SourceOptions
from fvflops.sweep.count_model import CountSettings, count_model
from fvflops.sweep.joined import Join, join, list_names, read_joined
from fvflops.sweep.model_count import COSTS, ModelCount
from fvflops.sweep.pareto_plot import check_axis, draw_pareto, has_points
from fvflops.sweep.result_files import has_results
from fvflops.sweep.table_of_models import check_columns, model_report, model_table
from fvflops.text import suggest
from fvflops.units import format_quantity
from fvflops.views.ranking import check_sort

# Format of this table alone, in addition to FORMATS.
_PAPER = "paper"
# Options of one model, and of a table.
_OF_ONE = (
    *("by", "depth", "collapse", "backward", "loss"),
    *("trace", "speedscope", "flamegraph", "weight", "save_trace"),
)
_OF_TABLE = ("columns", "join", "plot", "x", "y", "lower", "name")
MEMORY = "peak_memory"
# Shorter names of columns on the command line.
_ALIASES = {"memory": MEMORY}


def add_table_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of a table of several models."""
    group = parser.add_argument_group(
        "several models",
        "Several MODELs give a table with a row for each; 'timm:resnet*', 'hf:models/*' and @FILE, with a name a line, "
        "stand for several.",
    )
    add_options(
        group,
        f"""
        --name LABEL=MODEL ...  label of a model in the table and the plot, such as ResNet-50=zoo:resnet50; may be
            repeated
        --columns A,B,...  columns of the table: {", ".join(COSTS[:-1])}, memory, unsupported, error, ... and columns
            of --join
        """,
    )
    add_pareto_plot(group, join="add the columns of")


def add_pareto_plot(group: argparse._ActionsContainer, *, join: str) -> None:
    """Add the options of a plot of models and of a file of joined columns; `join` begins the help of `--join`."""
    add_options(
        group,
        f"""
        --join FILE  {join} a .csv, .tsv or .parquet file, such as accuracies, whose column `model`, or else the
            first, names the models
        --plot PATH  also plot the models and their Pareto front, .svg or .png; needs matplotlib
        --x COLUMN  horizontal axis; default: flops below a joined column, else parameters
        --y COLUMN  vertical axis; default: the first joined column of numbers, else flops
        --lower COLUMN ...  a joined column in which lower is better, such as a latency; may be repeated
        """,
    )


def asks_for_table(arguments: argparse.Namespace, names: Sequence[str]) -> bool:
    """Return whether the arguments ask for a table of models: several, a pattern, or options of such a table."""
    return bool(find_chosen(arguments, _OF_TABLE)) or len(names) != 1 or list(names) != arguments.model


def count_models(names: Sequence[str], arguments: argparse.Namespace) -> int:
    """Count the models of the names, write the table and the plot; return 1 if a model failed, else 0."""
    if arguments.format not in (*FORMATS, _PAPER):
        several = ", ".join((*FORMATS, _PAPER))
        raise ValueError(f"--format {arguments.format} is for one model: for several use {several}")
    message = "{} is for one model: omit it in a table of models (several, --columns or --plot)"
    refuse(arguments, (True, _OF_ONE, message))
    for name in names:
        if arguments.plot is not None and has_results(name):
            raise ValueError(
                f"{name} has the results of a sweep and is not a MODEL: to plot them, run the sweep again with "
                f"--output {name} --plot {arguments.plot}, which counts no model again"
            )
    table = load_table(arguments.table)
    options = model_options(arguments, device=built_on(arguments))
    check_models(names, options)
    labels = _read_labels(arguments.name, names)
    assume = parse_assumptions(arguments.assume)
    joined = None if arguments.join is None else join(read_joined(arguments.join), names)
    columns = None
    if arguments.columns is not None:
        columns = check_columns([_read_key(part) for part in arguments.columns.split(",") if part.strip()], joined)
    if arguments.sort is not None:
        keys = [column.key for column in model_table((), joined).columns]
        check_sort(_read_key(arguments.sort), [*keys, "name"])
    plot = read_plot(arguments, joined)
    axes = () if plot is None else plot.axes
    shown = {*(COSTS if columns is None else columns), *axes, arguments.sort and _read_key(arguments.sort)}
    settings = CountSettings(
        table, arguments.execution, assume, arguments.train, peak_memory=MEMORY in shown, kernels=runs_on(arguments)[0]
    )
    counts = _count(names, options, settings)
    if arguments.strict:
        counts = [_fail_unsupported(count, table) for count in counts]
    sentence, failure = ("", "") if plot is None else write_plot(plot, counts, joined, table, labels)
    document = model_report(
        counts,
        table,
        columns=columns,
        join=joined,
        ranked_by=(arguments.sort and _read_key(arguments.sort), arguments.top),
        paper=arguments.format in (_PAPER, "latex"),
        notes=[sentence] if sentence else [],
        labels=labels,
    )
    format = "markdown" if arguments.format == _PAPER else arguments.format
    write_ordered(document, format, arguments.output)
    if failure:
        print(failure, file=sys.stderr)
    return max(_report_failures(counts, joined), int(bool(failure)))


@dataclass(frozen=True, slots=True)
class ParetoPlot:
    """A plot of two columns: its path, file type and axes, and the columns in which higher is better."""

    path: str
    kind: str
    axes: tuple[str, str]
    higher: tuple[str, ...]


def read_plot(arguments: argparse.Namespace, joined: Join | None) -> ParetoPlot | None:
    """Return the plot that the arguments ask for, None without one; options without effect raise ValueError."""
    for option in ("x", "y"):
        if getattr(arguments, option) is not None and arguments.plot is None:
            raise ValueError(f"--{option} is an axis of a plot: add --plot models.svg")
    if arguments.lower and arguments.join is None:
        raise ValueError(f"--lower {arguments.lower[0]} applies to a joined column: add --join FILE")
    numbers = _list_joined(joined)
    for key in arguments.lower:
        if key not in numbers:
            known = ", ".join(numbers) or "there is none"
            raise ValueError(f"--lower must be a joined column of numbers: {known}; got {key!r}")
    if arguments.plot is None:
        return None
    axes = _choose_axes(arguments, numbers)
    for key in axes:
        check_axis(model_table((), joined), key)
    higher = tuple(key for key in numbers if key not in arguments.lower)
    return ParetoPlot(arguments.plot, file_type(arguments.plot), axes, higher)


def _read_labels(texts: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """Return model → label of `--name LABEL=MODEL`; a model that is not counted raises ValueError."""
    labels = {}
    for text in texts:
        label, equals, model = text.partition("=")
        if not (label and equals):
            raise ValueError(f"--name {text}: write LABEL=MODEL, such as ResNet-50=zoo:resnet50")
        if model not in names:
            near = f": did you mean {model}={label}?" if label in names else suggest(model, names)
            raise ValueError(f"--name {text}: MODEL of LABEL=MODEL must be one of {', '.join(names)}{near}")
        labels[model] = label
    return labels


def _read_key(text: str) -> str:
    return _ALIASES.get(text.strip(), text.strip())


def _list_joined(joined: Join | None) -> list[str]:
    """Return the joined columns of numbers."""
    numbers = [column.key for column in model_table((), joined).columns if not column.is_text]
    own = [column.key for column in model_table(()).columns]
    return [key for key in numbers if key not in own]


def _choose_axes(arguments: argparse.Namespace, numbers: Sequence[str]) -> tuple[str, str]:
    """Return the columns of the horizontal and the vertical axis; two equal ones raise ValueError."""
    y = _read_key(arguments.y) if arguments.y is not None else numbers[0] if numbers else "flops"
    other = "flops" if y in (*numbers, "parameters") else "parameters"
    x = other if arguments.x is None else _read_key(arguments.x)
    if arguments.y is None and x == y:
        y = "parameters" if x == "flops" else "flops"
    if x == y:
        raise ValueError(f"both axes are {x}: choose another --x or --y")
    return x, y


def _count(names: Sequence[str], options: SourceOptions, settings: CountSettings) -> list[ModelCount]:
    from fvflops.measure.step_meter.call_costs import quiet_log  # imported for tables only

    progress, counts = Progress(), list[ModelCount]()
    with quiet_log():  # log lines are shown in the model's row and below the table
        try:
            for name in names:
                progress.show(len(counts), len(names), noun="model", note=f": {plain_name(name)}")
                counts.append(count_model(name, options, settings))
        finally:
            progress.clear()
    return counts


def write_plot(
    plot: ParetoPlot,
    counts: Sequence[ModelCount],
    joined: Join | None,
    table: FormulaTable,
    labels: Mapping[str, str] | None = None,
) -> tuple[str, str]:
    """Write the plot of two columns, if any model has both; return a sentence on it, and an error, "" for none."""
    models = model_table(counts, joined, labels=labels)
    x, y = plot.axes
    if not has_points(models, x, y):
        reason = f"no model has both {x} and {y}"
        return f"No plot: {reason}.", f"fvflops: error: {plot.path} is not written: {reason}"
    titles = {"flops": f"FLOPs ({table.multiply_add} per multiply-add)", "bytes": "Memory traffic"}
    picture, front = draw_pareto(models, x=x, y=y, kind=plot.kind, higher=plot.higher, titles=titles)
    paths.write_bytes(plot.path, picture)
    return f"Pareto front of {x} and {y}: {', '.join(map(plain_name, front))}.", ""


def _fail_unsupported(count: ModelCount, table: FormulaTable) -> ModelCount:
    """Return a row without the counts of the table, and with an error, if it has unsupported ops, or none at all."""
    if count.error or not (count.unsupported or count.bytes == 0):
        return count
    error = f"table {table.name!r} has no formula for {count.unsupported} (--strict)"
    if not count.unsupported:
        error = "no op was called: nothing was counted (--strict)"
    by_table: dict[str, Any] = {name: None for name, metric in METRICS.items() if metric.of}
    return replace(count, **by_table, failure="error", error=error)


def _report_failures(counts: Sequence[ModelCount], joined: Join | None) -> int:
    """Report the models that were not counted and those without a joined row, to stderr; return the exit code."""
    if joined is not None and joined.missing:
        path = printable(joined.file.path)
        print(f"fvflops: warning: no row of {path} for {list_names(joined.missing)}", file=sys.stderr)
    failed = [count for count in counts if count.error]
    if not failed:
        return 0
    first = f"{plain_name(failed[0].model)}: {failed[0].error}"
    of = f"{len(failed)} of {format_quantity(len(counts), 'model')} not counted"
    print(f"fvflops: error: {of}: {first}{' ...' if len(failed) > 1 else ''}", file=sys.stderr)
    return 1
