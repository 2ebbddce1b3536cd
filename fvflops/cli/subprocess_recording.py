"""Record a model in a subprocess with its own `sys.path`."""

from __future__ import annotations

import argparse
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable

from fvflops.analysis.trace_file import load_trace
from fvflops.cli.progress import activity
from fvflops.paths import PACKAGE
from fvflops.sources.options import SourceOptions
from fvflops.trace import Trace

# Files by which the processes exchange what is recorded.
REQUEST, RESULT = "request.pickle", "trace.json"
_STDERR_TAIL = 2000  # last characters of a failed process's standard error that are read


def record_in_subprocess(
    subject: str,
    model: str,
    options: SourceOptions,
    arguments: argparse.Namespace,
    *,
    folder: str = ".",
    map_path: Callable[[str], str] = str,
) -> Trace:
    """Record a model, `file.py:factory`, in a subprocess whose working directory is `folder`, and return its Trace.

    `subject` names the model in error messages, such as its git revision. `map_path` maps each entry of this process's
    `sys.path` to the subprocess's. A failure raises ValueError.
    """
    package_folder = str(PACKAGE.parent)
    code = f"import sys; sys.path[:1] = [{package_folder!r}]; from fvflops.cli.open_analysis import answer; answer()"
    table = os.path.abspath(arguments.table) if os.path.isfile(arguments.table) else arguments.table
    path = [map_path(entry) for entry in sys.path if entry]
    with tempfile.TemporaryDirectory(prefix="fvflops-") as exchange:
        result = os.path.join(exchange, RESULT)
        with open(os.path.join(exchange, REQUEST), "wb") as file:
            pickle.dump((path, model, arguments, table, options), file)
        with activity(f"recording {subject}"):
            process = subprocess.run(
                [sys.executable, "-c", code, exchange],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="backslashreplace",
            )
        if process.returncode or not os.path.isfile(result):
            last_line = process.stderr[-_STDERR_TAIL:].strip().splitlines()[-1:]
            reason = last_line[0] if last_line else f"the subprocess exited with status {process.returncode}"
            raise ValueError(f"{subject}: {reason}")
        return load_trace(result)
