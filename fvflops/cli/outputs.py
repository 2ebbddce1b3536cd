"""Write reports, and check output paths before a model is loaded."""

from __future__ import annotations

import argparse
import os
import sys

from fvflops import paths
from fvflops.cli.terminal import find_width
from fvflops.reports.document import Document
from fvflops.reports.formats import write_document

_OPTIONS = ("output", "summary", "plot", "trace", "speedscope", "flamegraph", "html", "save_trace")
# Arguments that may be the path of an input file, or FILE:NAME.
_INPUTS = ("model", "other", "budget", "table", "config", "config_b", "peaks", "device", "shard")


def check_outputs(arguments: argparse.Namespace) -> None:
    """Raise OSError for an output file that cannot be written, ValueError for one that is an input too or named twice.

    >>> check_outputs(argparse.Namespace(output="a.txt", plot="./a.txt"))
    Traceback (most recent call last):
    ValueError: --plot ./a.txt: another file of this run has that path
    """
    outputs = [(option, path) for option in _OPTIONS if (path := getattr(arguments, option, None)) is not None]
    inputs, written = _find_inputs(arguments), set[str]()
    for option, path in outputs:
        if (location := _resolve(path)) in inputs:
            raise ValueError(f"--{option.replace('_', '-')} {path}: this run reads that file: choose another path")
        if location in written:
            raise ValueError(f"--{option.replace('_', '-')} {path}: another file of this run has that path")
        written.add(location)
    for _, path in outputs:
        paths.check_writable(path)


def _find_inputs(arguments: argparse.Namespace) -> set[str]:
    texts = [text for option in _INPUTS if (text := getattr(arguments, option, None)) is not None]
    # A value without a file extension is a name, such as a table's.
    return {_resolve(file) for text in texts for file in (text, text.rpartition(":")[0]) if os.path.splitext(file)[1]}


def _resolve(path: str) -> str:
    try:
        return path if "://" in path else os.path.realpath(path)
    except (OSError, ValueError):  # an invalid file name: check_writable raises the error
        return path


def write_report(document: Document, arguments: argparse.Namespace) -> None:
    """Write a report with the format, sort order and path of the arguments of `add_report`.

    Plain text has the width of the terminal, or of COLUMNS, or 80 columns.
    """
    ordered = document.ranked(sort=arguments.sort, top=arguments.top)
    write(write_document(ordered, arguments.format, width=find_width(sys.stdout)), arguments.output)


def write(text: str, path: str | None) -> None:
    """Write a report to a file, or to standard output without a path."""
    text = text if text.endswith("\n") else text + "\n"
    if path is None:
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    paths.write_text(path, text)
