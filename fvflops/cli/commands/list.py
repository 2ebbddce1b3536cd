"""`fvflops list`: names of models, devices, conventions and formats, one per line."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial

from fvflops.cli.activity import activity
from fvflops.cli.arguments import add_report
from fvflops.cli.outputs import write, write_report
from fvflops.features.utilisation.devices import load_devices
from fvflops.formulas import shipped_tables
from fvflops.reports import REPORTS
from fvflops.reports.document import Document, Items, Part, Table, number_column, text_column
from fvflops.reports.formats import FORMATS
from fvflops.sources.load import SOURCES, load_source
from fvflops.text import list_nearest

EXAMPLES = (
    "fvflops list",
    "fvflops list zoo",
    "fvflops list timm 'vit_*_224'",
    "fvflops list devices",
)


def _list_models(source: str) -> Sequence[str]:
    return load_source(source).list_names()


# What can be listed → the function that returns its names.
LISTS: Mapping[str, Callable[[], Sequence[str]]] = {
    **{source: partial(_list_models, source) for source in SOURCES if source != "torchhub"},  # its folders are many
    "devices": lambda: [device.name for device in load_devices()],
    "tables": shipped_tables,
    "formats": lambda: list(dict.fromkeys([*FORMATS, *REPORTS])),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `fvflops list`."""
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
    if arguments.kind not in LISTS:
        near = list_nearest(arguments.kind, LISTS) or f": write one of {', '.join(LISTS)}"
        raise ValueError(f"list has no {arguments.kind!r}{near}")
    with activity(f"listing {arguments.kind}"):
        names = _select(arguments.kind, arguments.pattern)
    document = Document(
        arguments.kind, arguments.kind, [Table("names", [text_column("name")], [(name,) for name in names])]
    )
    if arguments.format != "text":
        write_report(document, arguments)
        return 0
    table = document.ranked(sort=arguments.sort, top=arguments.top).main_table()
    write("\n".join(str(name) for (name,) in table.rows), arguments.output)
    return 0


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


def _summarise() -> Document:
    """Return a report with the number of names of each kind, or why there are none."""
    rows: list[tuple[str, int | None, str]] = []
    missing: list[str] = []
    for kind, list_names in LISTS.items():
        try:
            rows.append((kind, len(list_names()), ""))
        except ValueError as error:  # the library is missing
            rows.append((kind, None, str(error)))
            missing.append(str(error))
    columns = (
        text_column("kind"),
        number_column("names", form="{:,}".format, missing="-"),
        replace(text_column("note"), only_for="data"),
    )
    parts: list[Part] = [Table("kinds", columns, rows, noun="kind")]
    if missing:
        parts.append(Items("Not listed", missing))
    return Document("list", "fvflops list KIND [PATTERN]", parts)
