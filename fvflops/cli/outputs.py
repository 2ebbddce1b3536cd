"""Write reports, and check before the work that output files can be written."""

from __future__ import annotations

import argparse
import os
import sys

from fvflops import paths
from fvflops.cli.terminal import find_width
from fvflops.reports.document import Document
from fvflops.reports.formats import write_document

_OPTIONS = ("output", "summary", "plot", "trace", "speedscope", "flamegraph", "html")
# What may be a file that is read, or FILE:NAME of what stands in one.
_INPUTS = ("model", "other", "budget", "table", "config", "config_b", "peaks", "device", "shard")


def check_outputs(arguments: argparse.Namespace) -> None:
    """Raise OSError where one of the files cannot be written, and ValueError where it is read too, or two are the same.

    >>> check_outputs(argparse.Namespace(output="a.txt", plot="./a.txt"))
    Traceback (most recent call last):
    ValueError: --plot ./a.txt: another file of this run has that path
    """
    named = [(option, path) for option in _OPTIONS if (path := getattr(arguments, option, None)) is not None]
    read, written = _find_inputs(arguments), set[str]()
    for option, path in named:
        if (place := _locate(path)) in read:
            raise ValueError(f"--{option} {path}: this run reads that file: choose another path")
        if place in written:
            raise ValueError(f"--{option} {path}: another file of this run has that path")
        written.add(place)
    for _, path in named:
        paths.check_writable(path)


def _find_inputs(arguments: argparse.Namespace) -> set[str]:
    texts = [text for option in _INPUTS if (text := getattr(arguments, option, None)) is not None]
    # What has no ending, such as a table's name, is no file.
    return {_locate(file) for text in texts for file in (text, text.rpartition(":")[0]) if os.path.splitext(file)[1]}


def _locate(path: str) -> str:
    try:
        return path if "://" in path else os.path.realpath(path)
    except (OSError, ValueError):  # a name that no file can have, of which check_writable tells
        return path


def write_report(document: Document, arguments: argparse.Namespace) -> None:
    """Write a report in the format, in the order and to the place that the arguments of `add_report` name.

    Plain text is as wide as the terminal, elsewhere as COLUMNS says, or 80 columns.
    """
    ordered = document.ranked(sort=arguments.sort, top=arguments.top)
    write(write_document(ordered, arguments.format, width=find_width(sys.stdout)), arguments.output)


def write(text: str, path: str | None) -> None:
    """Write a report to a file, or to the terminal where no path is given."""
    text = text if text.endswith("\n") else text + "\n"
    if path is None:
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    paths.write_text(path, text)
