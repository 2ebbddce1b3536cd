"""Write reports, and check output paths before a model is loaded."""

from __future__ import annotations

import argparse
import os

from fvflops import paths
from fvflops.cli.encoding import is_ascii, to_ascii_markup
from fvflops.cli.process import DiscardedOutput, report_stream
from fvflops.cli.progress import find_width
from fvflops.reports.document import Document
from fvflops.reports.formats import write_document

# Option → the format of its file, for other programs.
_EXPORTS = {"trace": "chrome-trace", "speedscope": "speedscope", "flamegraph": "flame-graph"}
_OPTIONS = ("output", "summary", "plot", *_EXPORTS, "html", "save_trace")
# The path of `--output` for standard output.
STANDARD = "-"
# Suffix of `--output` → its format; no command writes the last ones.
_SUFFIXES = {
    **{f".{format}": format for format in ("html", "json", "csv", "svg", "png", "dot")},
    ".htm": "html",
    ".md": "markdown",
    ".markdown": "markdown",
    ".tex": "latex",
    **{f".{format}": format for format in ("pdf", "jpg", "jpeg", "parquet", "xlsx", "gz", "zip", "jsonl")},
}
_WITH_DIGITS = ("text", "markdown", "latex", "paper")  # formats whose numbers are rounded
# Arguments that may be the path of an input file, or FILE:NAME.
_INPUTS = (
    *("model", "other", "budget", "table", "config", "config_b", "peaks", "device"),
    *("shard", "join", "network", "efficiency"),
)


def check_outputs(arguments: argparse.Namespace) -> None:
    """Raise OSError for an output file that cannot be written, ValueError for one that is an input too or named twice.

    A missing folder, and a report to a closed standard output, raise ValueError too. `--output -` is standard output.

    >>> check_outputs(argparse.Namespace(output="a.txt", plot="./a.txt"))
    Traceback (most recent call last):
    ValueError: --plot ./a.txt: another file of this run has that path
    """
    if isinstance(report_stream(), DiscardedOutput) and is_standard_output(getattr(arguments, "output", "")):
        raise ValueError("standard output is closed: add --output FILE")
    named = ((f"--{name.replace('_', '-')}", getattr(arguments, name, None)) for name in _OPTIONS)
    outputs = [
        (option, path) for option, path in named if path is not None and (option, path) != ("--output", STANDARD)
    ]
    inputs, written = _find_inputs(arguments), set[str]()
    for option, path in outputs:
        if (location := _resolve(path)) in inputs:
            raise ValueError(f"{option} {path}: this run reads that file: choose another path")
        if location in written:
            raise ValueError(f"{option} {path}: another file of this run has that path")
        written.add(location)
    for option, path in outputs:
        check_file(option, path)


def choose_format(arguments: argparse.Namespace) -> None:
    """Set the format of a report that has none: by the suffix of its file, else text.

    A suffix of a format that the command does not write raises ValueError.

    >>> arguments = argparse.Namespace(format=None, formats=("text", "html"), output="page.html")
    >>> choose_format(arguments)
    >>> arguments.format
    'html'
    """
    formats = getattr(arguments, "formats", ())
    if not formats or arguments.format is not None:
        return
    path = getattr(arguments, "output", None) or STANDARD
    format = _SUFFIXES.get(os.path.splitext(path)[1].lower(), "text")
    if format not in formats:
        raise ValueError(f"--output {path}: {arguments.command} writes {', '.join(formats)}, chosen by --format")
    arguments.format = format


def check_digits(arguments: argparse.Namespace) -> None:
    """Raise ValueError for `--digits` with a format whose numbers are exact, or drawn.

    >>> check_digits(argparse.Namespace(digits=5, format="csv"))
    Traceback (most recent call last):
    ValueError: --digits 5 is for text, markdown, latex and paper; --format csv has its own digits
    """
    digits = getattr(arguments, "digits", None)
    if digits is not None and arguments.format not in _WITH_DIGITS:
        first, last = ", ".join(_WITH_DIGITS[:-1]), _WITH_DIGITS[-1]
        raise ValueError(f"--digits {digits} is for {first} and {last}; --format {arguments.format} has its own digits")


def check_file(option: str, path: str) -> None:
    """Raise OSError or ValueError for a file that cannot be written, or whose folder does not exist.

    >>> check_file("--plot", "no/such/folder/a.svg")
    Traceback (most recent call last):
    ValueError: --plot no/such/folder/a.svg: there is no folder 'no/such/folder': create it, or choose another path
    """
    if path == STANDARD:
        raise ValueError(f"{option} -: this file cannot be standard output: choose a path")
    folder = os.path.dirname(path)
    if "://" not in path and folder and not os.path.lexists(folder):
        raise ValueError(f"{option} {path}: there is no folder {folder!r}: create it, or choose another path")
    paths.check_writable(path)


def check_exports(arguments: argparse.Namespace) -> dict[str, str]:
    """Return path → format of the requested files; raise ValueError or OSError before anything is written."""
    from fvflops.analysis.exporting import prepare_export  # imports torch, which the help does not need

    files: dict[str, str] = {}
    for option, format in _EXPORTS.items():
        path = getattr(arguments, option)
        if path is not None:
            files[path] = prepare_export(path, format, arguments.weight)
    if arguments.weight is not None and not files:
        raise ValueError("--weight sets the widths in an exported file: add --trace, --speedscope or --flamegraph")
    return files


def _find_inputs(arguments: argparse.Namespace) -> set[str]:
    values = [value for option in _INPUTS if (value := getattr(arguments, option, None)) is not None]
    texts = [text for value in values for text in ([value] if isinstance(value, str) else value)]
    # A value without a file extension is a name, such as a table's.
    return {_resolve(file) for text in texts for file in (text, text.rpartition(":")[0]) if os.path.splitext(file)[1]}


def _resolve(path: str) -> str:
    try:
        return path if "://" in path else os.path.realpath(path)
    except (OSError, ValueError):  # an invalid file name: check_writable raises the error
        return path


def write_report(document: Document, arguments: argparse.Namespace) -> None:
    """Write a report as `add_report`'s arguments say."""
    write_ordered(document.ranked(sort=arguments.sort, top=arguments.top), arguments.format, arguments.output)


def write_ordered(document: Document, format: str, path: str | None) -> None:
    """Write a report in its order; text has the terminal's width, or COLUMNS, or 80."""
    write(write_document(document, format, width=find_width(report_stream())), path)


def is_standard_output(path: str | None) -> bool:
    """Return whether a report without a path, or with the path -, is written to standard output."""
    return path is None or path == STANDARD


def write(content: str | bytes, path: str | None) -> None:
    """Write a report, or a binary file, to a path, or to standard output without a path or with -."""
    if isinstance(content, str) and not content.endswith("\n"):
        content += "\n"
    if path is None or path == STANDARD:
        stream = report_stream()
        if isinstance(content, bytes):
            stream.flush()
            stream.buffer.write(content)
        else:
            if is_ascii(stream) and content.startswith("<"):  # HTML and SVG
                content = to_ascii_markup(content)
            stream.write(content)
        stream.flush()
    elif isinstance(content, bytes):
        paths.write_bytes(path, content)
    else:
        paths.write_text(path, content)
