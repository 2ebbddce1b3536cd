"""Record a model in a subprocess with its own `sys.path`."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict

from fvflops.analysis.trace_file import load_trace
from fvflops.cli.activity import activity
from fvflops.paths import PACKAGE
from fvflops.sources.options import SourceOptions
from fvflops.trace import Trace

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
    code = f"import sys; sys.path[:1] = [{package_folder!r}]; from fvflops.cli.worker import main; main()"
    with tempfile.TemporaryDirectory(prefix="fvflops-") as result_folder:
        request = {
            "model": model,
            "options": asdict(options),
            "execution": arguments.execution,
            "run_device": arguments.run_device,
            "build_on": arguments.build_on,
            "train": arguments.train,
            "backward": arguments.backward,
            "loss": arguments.loss,
            "assume": list(arguments.assume),
            "table": os.path.abspath(arguments.table) if os.path.isfile(arguments.table) else arguments.table,
            "result": os.path.join(result_folder, "trace.json"),
            "path": [map_path(entry) for entry in sys.path if entry],
        }
        with activity(f"recording {subject}"):
            process = subprocess.run(
                [sys.executable, "-c", code],
                input=json.dumps(request),
                cwd=folder,
                capture_output=True,
                text=True,
                errors="backslashreplace",
            )
        if process.returncode or not os.path.isfile(request["result"]):
            last_line = process.stderr[-_STDERR_TAIL:].strip().splitlines()[-1:]
            reason = last_line[0] if last_line else f"the subprocess exited with status {process.returncode}"
            raise ValueError(f"{subject}: {reason}")
        return load_trace(request["result"])
