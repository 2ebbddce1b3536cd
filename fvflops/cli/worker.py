"""Main program of the process that `subprocess_recording` starts."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from fvflops import paths
from fvflops.capture.restore.generators import seeded
from fvflops.cli import format_error
from fvflops.cli.open_analysis import open_analysis
from fvflops.formulas import load_table
from fvflops.sources.options import SourceOptions


def main() -> None:
    """Record the model of the JSON request on standard input, and write its Trace."""
    request = json.load(sys.stdin)
    sys.path[1:] = [entry for entry in dict.fromkeys(request["path"]) if entry != sys.path[0]]
    try:
        with seeded(0):  # as in the process that asks
            _record(request)
    except (Exception, SystemExit) as error:
        print(format_error(error), file=sys.stderr)
        sys.exit(1)


def _record(request: dict[str, Any]) -> None:
    # JSON has lists for the tuples.
    fields: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in request["options"].items()
    }
    options = SourceOptions(**fields)
    analysis = open_analysis(
        request["model"], argparse.Namespace(**request), load_table(request["table"]), options=options
    )
    paths.write_text(request["result"], analysis.trace().to_json())
