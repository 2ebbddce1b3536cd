"""Record calls that have another process, or a thread that is not recorded, compute for the model."""

from __future__ import annotations

import asyncio
import multiprocessing.connection
import multiprocessing.pool
import multiprocessing.process
import multiprocessing.queues
import os
import socket
import subprocess
from concurrent.futures import Future
from functools import partial
from multiprocessing.pool import Pool, ThreadPool
from types import FrameType
from typing import Any

from fvflops.capture.instrument.patching import Patch, Wrapper
from fvflops.capture.recorder.recorder import Recorder
from fvflops.capture.unseen.data_exports import noted
from fvflops.capture.unseen.unseen_work import UnseenWork

# Functions that start a process, or send it data.
_STARTS = (
    *(Patch(os, name) for name in ("fork", "posix_spawn", "system") if hasattr(os, name)),
    Patch(subprocess.Popen, "__init__"),
    Patch(multiprocessing.process.BaseProcess, "start"),
    Patch(multiprocessing.connection.Connection, "_send_bytes"),
    Patch(multiprocessing.queues.Queue, "put"),
    *(Patch(socket.socket, name) for name in ("connect", "send", "sendall")),
)
_POOL = Patch(Pool, "_check_running")  # called by all methods that submit
_FUTURES = Patch(Future, "__init__")
_ASYNCIO = os.path.dirname(asyncio.__file__) + os.sep
_THREAD_POOL = os.path.join("concurrent", "futures", "thread.py")


def other_processes(recorder: Recorder) -> list[Wrapper]:
    """Return the wrappers that record such calls of the model."""
    if recorder.unseen is None:
        return []
    return [
        *((patch, partial(noted, recorder, _note_start)) for patch in _STARTS),
        (_POOL, partial(noted, recorder, _note_pool)),
        (_FUTURES, partial(noted, recorder, _note_future)),
    ]


def _note_start(unseen_work: UnseenWork, frame: FrameType, args: tuple[Any, ...]) -> None:
    if frame.f_code.co_name != "_write_to_self":  # asyncio wakes its own loop through a socket
        unseen_work.record_elsewhere(frame)


def _note_pool(unseen_work: UnseenWork, frame: FrameType, args: tuple[Any, ...]) -> None:
    if not isinstance(args[0], ThreadPool):
        unseen_work.record_elsewhere(frame)


def _note_future(unseen_work: UnseenWork, frame: FrameType, args: tuple[Any, ...]) -> None:
    """Record a new future of work that an executor, or another thread's event loop, runs.

    Functions submitted to a pool of threads are recorded, by `model_threads`.
    """
    code = frame.f_code
    if code.co_filename.endswith(_THREAD_POOL):
        return
    if code.co_name == "submit" or code.co_filename.startswith(_ASYNCIO):
        unseen_work.record_elsewhere(frame)
