"""What the process of `subprocess_recording` runs."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from fvflops import paths
from fvflops.cli import format_error
from fvflops.cli.sources import open_analysis
from fvflops.formulas import load_table


def main() -> None:
    """Record what the standard input describes, and write its Trace."""
    wanted = json.load(sys.stdin)
    sys.path[1:] = [entry for entry in dict.fromkeys(wanted["path"]) if entry != sys.path[0]]
    try:
        _record(wanted)
    except (Exception, SystemExit) as error:
        print(format_error(error), file=sys.stderr)
        sys.exit(1)


def _record(wanted: dict[str, Any]) -> None:
    arguments = argparse.Namespace(config=None, **wanted)
    analysis = open_analysis(wanted["model"], arguments, load_table(wanted["table"]))
    paths.write_text(wanted["result"], analysis.trace().to_json())
