"""Save the Trace of each rank as JSON while a loop runs."""

from __future__ import annotations

import os
from typing import Any

from fvflops import paths
from fvflops.analysis.recording import OnTraceReady, record

Folder = str | os.PathLike[str]


def save_trace(recording: record, folder: Folder, rank: int) -> str:
    """Write the Trace so far as `rank{rank}.json` to a folder, created if needed, and return the file's path.

    `folder` is a local path or a URI; `Trace.from_json` reads the file.
    """
    name = os.fspath(folder)
    paths.make_folder(name)
    path = f"{name.rstrip('/')}/rank{rank}.json"
    paths.write_text(path, recording.trace().to_json())
    return path


def save_when_ready(folder: Folder | None, rank: int, on_trace_ready: OnTraceReady | None) -> OnTraceReady:
    """Return a callback that saves a recording, if there is a folder, and then calls `on_trace_ready`."""

    def save_and_call(recording: record) -> Any:
        if folder is not None:
            save_trace(recording, folder, rank)
        return None if on_trace_ready is None else on_trace_ready(recording)

    return save_and_call
