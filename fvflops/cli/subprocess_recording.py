"""The process apart: a model recorded in a Python of its own, which finds modules where it is told to."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from fvflops import paths
from fvflops.analysis.trace_file import load_trace
from fvflops.paths import PACKAGE
from fvflops.trace import Trace

_TOLD = 2000  # characters at the end of what a failed process said


def record_in_subprocess(
    text: str,
    model: str,
    inputs: Sequence[str],
    arguments: argparse.Namespace,
    *,
    folder: str = ".",
    move: Callable[[str], str] = str,
) -> Trace:
    """Return the Trace of a model, `file.py:factory`, recorded in a process that runs in a folder.

    `move` says for each entry of this process's `sys.path` where the other looks instead. A process that fails raises
    ValueError, which begins with `text`.
    """
    home = str(PACKAGE.parent)
    code = f"import sys; sys.path[:1] = [{home!r}]; from fvflops.cli.subprocess_recording import main; main()"
    with tempfile.TemporaryDirectory(prefix="fvflops-") as place:
        wanted = {
            "model": model,
            "input": list(inputs),
            "device": arguments.device,
            "execution": arguments.execution,
            "train": arguments.train,
            "assume": list(arguments.assume),
            "table": os.path.abspath(arguments.table) if os.path.isfile(arguments.table) else arguments.table,
            "result": os.path.join(place, "trace.json"),
            "path": [move(entry) for entry in sys.path if entry],
        }
        done = subprocess.run(
            [sys.executable, "-c", code],
            input=json.dumps(wanted),
            cwd=folder,
            capture_output=True,
            text=True,
            errors="backslashreplace",
        )
        if done.returncode or not os.path.isfile(wanted["result"]):
            said = done.stderr[-_TOLD:].strip().splitlines()[-1:]
            raise ValueError(f"{text}: {said[0] if said else f'its process ended with {done.returncode}'}")
        return load_trace(wanted["result"])


def main() -> None:
    """Record what the standard input describes, in the process that `record_in_subprocess` started."""
    wanted = json.load(sys.stdin)
    sys.path[1:] = [entry for entry in dict.fromkeys(wanted["path"]) if entry != sys.path[0]]
    from fvflops.cli import format_error

    try:
        _record(wanted)
    except (Exception, SystemExit) as error:
        print(format_error(error), file=sys.stderr)
        sys.exit(1)


def _record(wanted: dict[str, Any]) -> None:
    from fvflops.cli.sources import open_analysis
    from fvflops.formulas import load_table

    arguments = argparse.Namespace(config=None, **wanted)
    analysis = open_analysis(wanted["model"], arguments, load_table(wanted["table"]))
    paths.write_text(wanted["result"], analysis.trace().to_json())
