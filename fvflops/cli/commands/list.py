"""`fvflops list`: names of models, devices, conventions and formats, one per line."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from fvflops.cli.outputs import write, write_report
from fvflops.cli.process import report_stream
from fvflops.cli.progress import activity, find_width
from fvflops.cli.shared_options import add_report
from fvflops.devices.devices import Device, load_devices
from fvflops.formulas import load_table, shipped_tables
from fvflops.reports import REPORTS
from fvflops.reports.document import Document, Items, Table, data_only, number_column, text_column
from fvflops.reports.formats import FORMATS
from fvflops.sources.load import SOURCES, load_source
from fvflops.text import list_nearest
from fvflops.units import format_bytes, format_quantity, format_ratio

EXAMPLES = ("fvflops list", "fvflops list zoo", "fvflops list timm 'vit_*_224'", "fvflops list devices")


def _list_models(source: str) -> Sequence[str]:
    return list(load_source(source).list_names())


# Subject of a list → the function that returns its names.
LISTS: Mapping[str, Callable[[], Sequence[str]]] = {
    **{source: partial(_list_models, source) for source in SOURCES if source != "torchhub"},  # its folders are many
    "devices": lambda: [device.name for device in load_devices()],
    "conventions": shipped_tables,
    "formats": lambda: list(dict.fromkeys([*FORMATS, *REPORTS])),
}
# Heading of a column that describes each name → the function that returns name → description.
ABOUT: Mapping[str, Callable[[], Mapping[str, str]]] = {
    "devices": lambda: {device.name: _describe_device(device) for device in load_devices()},
    "conventions": lambda: {name: load_table(name).description for name in shipped_tables()},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", nargs="?", metavar="KIND", help=f"{', '.join(LISTS)}; default: the number of each")
    parser.add_argument(
        "pattern", nargs="?", metavar="PATTERN", help="names that match it, in any case: 'resnet*', '*[bl]_16'"
    )
    add_report(parser, sort="name")


def run(arguments: argparse.Namespace) -> int:
    """Write the names, one per line in text; return the exit code."""
    if arguments.kind is None:
        with activity("listing the names of each library"):
            summary = _summarise()
        write_report(summary, arguments)
        return 0
    if arguments.kind == "tables":  # its name in version 1.0
        arguments.kind = "conventions"
    if arguments.kind not in LISTS:
        near = list_nearest(arguments.kind, LISTS) or f": write one of {', '.join(LISTS)}"
        raise ValueError(f"list has no {arguments.kind!r}{near}")
    with activity(f"listing {arguments.kind}"):
        names = _select(arguments.kind, arguments.pattern)
    columns, rows = [text_column("name")], [[name] for name in names]
    if arguments.kind in ABOUT:
        about = ABOUT[arguments.kind]()
        columns, rows = [*columns, text_column("description")], [[name, about[name]] for name in names]
    title = f"{arguments.kind}: {format_quantity(len(names), 'name')}"
    document = Document(arguments.kind, title, [Table("names", columns, rows)])
    if arguments.format != "text":
        write_report(document, arguments)
        return 0
    table = document.ranked(sort=arguments.sort, top=arguments.top).main_table()
    write("\n".join(_write_lines(table.rows)), arguments.output)
    return 0


def _write_lines(rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    """Yield the lines of names, each with its description, if it has one, beside it, or below a long name."""
    width = find_width(report_stream())
    indent = max((len(name) for name, *_ in rows if len(name) <= width // 2), default=0) + 2
    for name, *about in rows:
        lines = textwrap.wrap("".join(about), width - indent)
        if lines and len(name) < indent - 1:
            name = f"{name:{indent}}{lines.pop(0)}"
        yield from (name, *(" " * indent + line for line in lines))


def _select(kind: str, pattern: str | None) -> Sequence[str]:
    """Return the names that match a pattern, or all; if none does, raise ValueError with the nearest five."""
    names = LISTS[kind]()
    if pattern is None:
        return names
    matching = [name for name in names if fnmatchcase(name.lower(), pattern.lower())]
    if not matching:
        near = list_nearest(pattern.strip("*"), names) or f"; 'fvflops list {kind}' lists all"
        raise ValueError(f"{kind} has no name that matches {pattern!r}{near}")
    return matching


def _describe_device(device: Device) -> str:
    """Return the memory, the bandwidth and the highest dense peak of common dtypes of a device.

    >>> _describe_device(load_devices()[0])
    '900 GB/s, 125 TFLOP/s fp16'
    """
    parts = [] if device.memory is None else [format_bytes(device.memory)]
    parts += [] if device.bandwidth is None else [f"{format_bytes(device.bandwidth)}/s"]
    dtype = next(name for name in ("bf16", "fp16", "fp32", *device.dtypes()) if name in device.dtypes())
    return ", ".join([*parts, f"{format_ratio(device.peak(dtype) / 1e12)} TFLOP/s {dtype}"])


def _summarise() -> Document:
    """Return a report with the number of names of each kind, or why there are none."""
    rows: list[tuple[str, int | None, str]] = []
    for kind, list_names in LISTS.items():
        try:
            rows.append((kind, len(list_names()), ""))
        except ValueError as error:  # the library is missing
            rows.append((kind, None, str(error)))
    names = number_column("names", form="{:,}".format, missing="-")
    table = Table("kinds", data_only([text_column("kind"), names, text_column("note")], ["note"]), rows, noun="kind")
    missing = [note for *_, note in rows if note]
    return Document(
        "list", "fvflops list KIND [PATTERN]", [table, *([Items("Not listed", missing)] if missing else [])]
    )
