"""Options for additional output files: chrome traces, speedscope and flame graphs."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from fvflops.analysis.exporting import prepare_export

# Option → the format of its file.
OPTIONS: Mapping[str, str] = {"trace": "chrome-trace", "speedscope": "speedscope", "flamegraph": "flame-graph"}


def check_exports(arguments: argparse.Namespace) -> dict[str, str]:
    """Return path → format of the requested files; raise ValueError or OSError before anything is written."""
    files: dict[str, str] = {}
    for option, format in OPTIONS.items():
        path = getattr(arguments, option)
        if path is not None:
            files[path] = prepare_export(path, format, arguments.weight)
    if arguments.weight is not None and not files:
        raise ValueError("--weight sets what widths show in a file: add --trace, --speedscope or --flamegraph")
    return files
