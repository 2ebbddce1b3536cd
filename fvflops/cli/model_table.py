"""`fvflops count` of several models: a table with a row a model, and its plot."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace

from fvflops import paths
from fvflops.cli.arguments import (
    model_options,
)
from fvflops.cli.outputs import write
from fvflops.cli.progress import Progress
from fvflops.cli.terminal import find_width
from fvflops.cli.values import parse_assumptions
from fvflops.formulas import FormulaTable, load_table
from fvflops.reports.formats import FORMATS, write_document
from fvflops.reports.names import plain_name, printable
from fvflops.reports.pictures.picture import kind_of
from fvflops.sources.load import check_models
from fvflops.sources.options import SourceOptions
from fvflops.sweep.count_model import CountSettings, count_model
from fvflops.sweep.joined import Join, join, list_names, read_joined
from fvflops.sweep.model_count import COSTS, ModelCount
from fvflops.sweep.pareto_plot import check_axis, draw_pareto, has_points
from fvflops.sweep.table import check_columns, model_report, model_table
from fvflops.units import format_quantity
from fvflops.views.ranking import check_sort

# Format of this table alone, in addition to FORMATS.
_PAPER = "paper"
# Options of one model, with their defaults.
_OF_ONE = {
    "by": "module",
    "depth": None,
    "collapse": False,
    "backward": False,
    "trace": None,
    "speedscope": None,
    "flamegraph": None,
    "weight": None,
    "save_trace": None,
}
_OF_TABLE = ("columns", "join", "plot", "x", "y")
_MEMORY = "peak_memory"
# Shorter names of columns on the command line.
_ALIASES = {"memory": _MEMORY}


def add_table_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a table of models."""
    group = parser.add_argument_group(
        "several models",
        "Several MODELs give a table with a row for each; 'timm:resnet*', 'hf:models/*' and @FILE, with a name a line, "
        "stand for several.",
    )
    group.add_argument(
        "--columns",
        metavar="A,B,...",
        help="columns of the table: parameters, flops, macs, activations, bytes, memory, unsupported, error, ... and "
        "those of --join",
    )
    group.add_argument(
        "--join",
        metavar="FILE",
        help="add the columns of a .csv, .tsv or .parquet file, such as accuracies, whose column `model`, or else the "
        "first, names the models",
    )
    group.add_argument(
        "--plot", metavar="PATH", help="also plot the models and their Pareto front, .svg or .png; needs matplotlib"
    )
    group.add_argument(
        "--x", metavar="COLUMN", help="horizontal axis; default: flops below a joined column, else parameters"
    )
    group.add_argument(
        "--y", metavar="COLUMN", help="vertical axis; default: the first joined column of numbers, else flops"
    )
    group.add_argument(
        "--lower",
        action="append",
        default=[],
        metavar="COLUMN",
        help="a joined column of which less is better, such as a latency; may be repeated",
    )


def asks_for_table(arguments: argparse.Namespace, names: Sequence[str]) -> bool:
    """Return whether the arguments ask for a table of models: several, a pattern, or options of such a table."""
    chosen = any(getattr(arguments, option) is not None for option in _OF_TABLE) or bool(arguments.lower)
    return chosen or len(names) != 1 or list(names) != arguments.model


def count_models(names: Sequence[str], arguments: argparse.Namespace) -> int:
    """Count the models of the names, write the table and the plot; return 1 if a model failed, else 0."""
    _check_options(arguments)
    table = load_table(arguments.table)
    options = model_options(arguments, device=arguments.device)
    check_models(names, options)
    assume = parse_assumptions(arguments.assume)
    joined = None if arguments.join is None else join(read_joined(arguments.join), names)
    columns = None if arguments.columns is None else _read_columns(arguments.columns, joined)
    empty = model_table((), joined)
    if arguments.sort is not None:
        keys = [column.key for column in empty.columns]
        check_sort(_read_key(arguments.sort), [*keys, "name"])
    higher = _find_higher(arguments, joined)
    axes = None if arguments.plot is None else _choose_axes(arguments, joined)
    for key in axes or ():
        check_axis(empty, key)
    kind = None if arguments.plot is None else kind_of(arguments.plot)
    shown = {*(COSTS if columns is None else columns), *(axes or ()), arguments.sort and _read_key(arguments.sort)}
    settings = CountSettings(table, arguments.execution, assume, arguments.train, peak_memory=_MEMORY in shown)
    counts = _count(names, options, settings)
    if arguments.strict:
        counts = [_fail_unsupported(count, table) for count in counts]
    notes = [] if axes is None or kind is None else [_plot(counts, joined, axes, higher, kind, table, arguments.plot)]
    document = model_report(
        counts,
        table,
        columns=columns,
        join=joined,
        sort=arguments.sort and _read_key(arguments.sort),
        top=arguments.top,
        paper=arguments.format in (_PAPER, "latex"),
        notes=notes,
    )
    format = "markdown" if arguments.format == _PAPER else arguments.format
    write(write_document(document, format, width=find_width(sys.stdout)), arguments.output)
    if axes is not None and not has_points(model_table(counts, joined), *axes):
        print(f"fvflops: error: {arguments.plot} is not written: {_describe_empty(axes)}", file=sys.stderr)
        return max(_report_failures(counts, joined), 1)
    return _report_failures(counts, joined)


def _check_options(arguments: argparse.Namespace) -> None:
    """Raise ValueError for options of one model."""
    if arguments.format not in (*FORMATS, _PAPER):
        raise ValueError(
            f"--format {arguments.format} is of one model: for several use {', '.join((*FORMATS, _PAPER))}"
        )
    for option, default in _OF_ONE.items():
        if getattr(arguments, option, default) != default:
            name = option.replace("_", "-")
            raise ValueError(f"--{name} is of one model: omit it in a table of models (several, --columns or --plot)")
    for option in ("x", "y"):
        if getattr(arguments, option) is not None and arguments.plot is None:
            raise ValueError(f"--{option} is an axis of a plot: add --plot models.svg")
    if arguments.lower and arguments.join is None:
        raise ValueError(f"--lower {arguments.lower[0]} is about a joined column: add --join FILE")


def _read_key(text: str) -> str:
    return _ALIASES.get(text.strip(), text.strip())


def _read_columns(text: str, joined: Join | None) -> list[str]:
    return check_columns([_read_key(part) for part in text.split(",") if part.strip()], joined)


def _list_joined(joined: Join | None) -> list[str]:
    """Return the keys of the joined columns of numbers."""
    numbers = [column.key for column in model_table((), joined).columns if not column.is_text]
    own = [column.key for column in model_table(()).columns]
    return [key for key in numbers if key not in own]


def _find_higher(arguments: argparse.Namespace, joined: Join | None) -> list[str]:
    """Return the joined columns of which more is better."""
    known = _list_joined(joined)
    for key in arguments.lower:
        if key not in known:
            raise ValueError(
                f"--lower must be a joined column of numbers: {', '.join(known) or 'there is none'}; got {key!r}"
            )
    return [key for key in known if key not in arguments.lower]


def _choose_axes(arguments: argparse.Namespace, joined: Join | None) -> tuple[str, str]:
    numbers = _list_joined(joined)
    y = _read_key(arguments.y) if arguments.y is not None else numbers[0] if numbers else "flops"
    if arguments.x is not None:
        x = _read_key(arguments.x)
    else:
        x = "flops" if y in (*numbers, "parameters") else "parameters"
    if arguments.y is None and x == y:
        y = "parameters" if x == "flops" else "flops"
    if x == y:
        raise ValueError(f"both axes are {x}: choose another --x or --y")
    return x, y


def _count(names: Sequence[str], options: SourceOptions, settings: CountSettings) -> list[ModelCount]:
    progress = Progress()
    counts: list[ModelCount] = []
    # What is logged of a model is in its row and below the table.
    logger = logging.getLogger("fvflops")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        for name in names:
            progress.show(len(counts), len(names), noun="model", note=f": {plain_name(name)}")
            counts.append(count_model(name, options, settings))
    finally:
        progress.clear()
        logger.setLevel(level)
    return counts


def _plot(
    counts: Sequence[ModelCount],
    joined: Join | None,
    axes: tuple[str, str],
    higher: Sequence[str],
    kind: str,
    table: FormulaTable,
    path: str,
) -> str:
    """Write the plot of two columns, if any model has both, and return a sentence on it."""
    models = model_table(counts, joined)
    if not has_points(models, *axes):
        return f"No plot: {_describe_empty(axes)}."
    titles = {"flops": f"FLOPs ({table.multiply_add} per multiply-add)", "bytes": "Memory traffic"}
    picture, front = draw_pareto(models, x=axes[0], y=axes[1], kind=kind, higher=higher, titles=titles)
    paths.write_bytes(path, picture)
    return f"Pareto front of {axes[0]} and {axes[1]}: {', '.join(map(plain_name, front))}."


def _describe_empty(axes: tuple[str, str]) -> str:
    return f"no model has both {axes[0]} and {axes[1]}"


def _fail_unsupported(count: ModelCount, table: FormulaTable) -> ModelCount:
    """Return a row without the counts of the table, and with an error, if it has unsupported ops."""
    if count.error or not count.unsupported:
        return count
    error = f"table {table.name!r} has no formula for {count.unsupported} (--strict)"
    return replace(count, flops=None, macs=None, activations=None, failure="error", error=error)


def _report_failures(counts: Sequence[ModelCount], joined: Join | None) -> int:
    """Write a line on models that were not counted, and one on those without a row; return the exit code."""
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
