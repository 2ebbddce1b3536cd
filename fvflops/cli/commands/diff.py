"""`fvflops diff`: what changed in the cost of a model, by module and operator."""

from __future__ import annotations

import argparse
import os

from fvflops.cli.commands.count import write
from fvflops.cli.sources import FILES, open_analysis
from fvflops.features.diff import report
from fvflops.features.diff.diff import diff_traces
from fvflops.formulas import load_table
from fvflops.text import nearest

FORMATS = ("text", "markdown", "json")


def run(arguments: argparse.Namespace) -> int:
    """Write what the second subject costs more or less than the first; return the exit code."""
    if arguments.format not in FORMATS:
        near = nearest(arguments.format, FORMATS, cutoff=0)
        raise ValueError(f"diff writes {', '.join(FORMATS)}, not {arguments.format!r}: take {near!r}")
    table = load_table(arguments.table)
    first = open_analysis(arguments.model, arguments, table)
    # A file has inputs of its own: those of A are not meant for it.
    is_file = arguments.other.endswith(FILES)
    second = open_analysis(
        arguments.other,
        arguments,
        table,
        inputs=arguments.input_b or ([] if is_file else None),
        config=arguments.config_b or ("" if is_file else None),
        apart=_are_files_of_two_folders(arguments.model, arguments.other),
    )
    names = (arguments.model, arguments.other)
    difference = diff_traces(first.trace(), second.trace(), table=table, names=names)
    if arguments.format == "json":
        text = difference.to_json()
    else:
        render = report.render_markdown if arguments.format == "markdown" else report.render
        text = render(difference, measure=arguments.measure, top=arguments.top)
    write(text, arguments.output)
    return 0


def _are_files_of_two_folders(*names: str) -> bool:
    sources = [name.rpartition(":")[0] for name in names]
    folders = {os.path.realpath(os.path.dirname(source)) for source in sources if os.path.isfile(source)}
    return len(folders) == 2
