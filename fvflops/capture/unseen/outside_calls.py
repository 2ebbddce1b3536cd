"""Patch the calls by which computation leaves torch.

They expose a tensor's data (NumPy, DLPack, pointer, list, pickle), or have another process, or a thread that is not
recorded, compute. Their writes and results bypass dispatch modes: a run that is restored saves exposed contents
first, and the calls are recorded.
"""

from __future__ import annotations

import asyncio
import multiprocessing.connection
import multiprocessing.process
import multiprocessing.queues
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from multiprocessing.pool import Pool, ThreadPool
from types import FrameType
from typing import Any

import torch
from torch.utils import dlpack

from fvflops.capture.instrument.patching import Patch, Wrapper, calling
from fvflops.capture.recorder.caller_lines import TORCH_FOLDER
from fvflops.capture.recorder.recorder import Recorder
from fvflops.capture.restore.restore import UndoLog
from fvflops.capture.shapes.shape_tensor import ShapeTensor
from fvflops.capture.unseen.unseen_work import UnseenWork
from fvflops.torch_internals import disable_dispatch_modes

# Size limits in bytes. Programs also call data_ptr to compare tensors, which should not copy large ones.
_LARGE, _SMALL = 1 << 28, 1 << 20
_MAX_BYTES: Mapping[str, int] = {
    **dict.fromkeys(("numpy", "__dlpack__", "apply_", "map_", "map2_"), _LARGE),
    "data_ptr": _SMALL,
}
# Methods that expose a tensor's data to code outside torch, or call Python for each element.
_EXPORTS = {name: Patch(torch.Tensor, name) for name in (*_MAX_BYTES, "__array__", "__reduce_ex__", "tolist")}
# Methods of a storage that do so, or change its bytes without an op.
_STORAGE_EXPORTS = tuple(Patch(torch.UntypedStorage, name) for name in ("data_ptr", "byteswap"))
_FUNCTIONS = (Patch(dlpack, "to_dlpack"), Patch(torch, "to_dlpack"))
# Exports as Python's or NumPy's numbers.
_READS = frozenset({"numpy", "__array__", "tolist"})
# Functions that create a tensor on foreign memory, invisible to dispatch modes.
_IMPORTS = (Patch(torch, "frombuffer"), Patch(torch, "from_dlpack"), Patch(dlpack, "from_dlpack"))
_SHARE = Patch(torch.Tensor, "share_memory_")
_ARRAYS = frozenset({"numpy", "__array__", "__dlpack__"})
# Where torch calls a storage's methods for the program's calls of its older class of storages.
_TYPED_STORAGE = TORCH_FOLDER + "storage.py"

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

# Notes a call in an UnseenWork: it gets the frame of the calling code and the arguments.
Note = Callable[[UnseenWork, FrameType, tuple[Any, ...]], None]


def saved_exports(undo_log: UndoLog, fresh: Mapping[int, Any], is_recorded: Callable[[], bool]) -> list[Wrapper]:
    """Return the wrappers that save a pre-existing tensor before its memory is exported in a thread of the run."""

    def export(save: Callable[..., None], limit: int, original: Any, owner: Any, *args: Any, **kwargs: Any) -> Any:
        if type(owner) is not ShapeTensor:
            save(owner, fresh, limit)
        return original(owner, *args, **kwargs)

    calls = [
        *((_EXPORTS[name], partial(export, undo_log.save, limit)) for name, limit in _MAX_BYTES.items()),
        *((patch, partial(export, undo_log.save_storage, _SMALL)) for patch in _STORAGE_EXPORTS),
    ]
    return [(patch, calling(function, is_recorded)) for patch, function in calls]


def outside_calls(recorder: Recorder) -> list[Wrapper]:
    """Return the wrappers that record exports of data, imports of foreign memory, and work in other processes."""
    unseen_work = recorder.unseen
    assert unseen_work is not None
    notes: list[tuple[Patch, Note]] = [
        *((patch, partial(_note_export, recorder, name)) for name, patch in _EXPORTS.items()),
        *((patch, partial(_note_export, recorder, "to_dlpack")) for patch in _FUNCTIONS),
        *((patch, _note_storage_export) for patch in _STORAGE_EXPORTS),
        *((patch, _note_start) for patch in _STARTS),
        (_POOL, _note_pool),
        (_FUTURES, _note_future),
    ]
    calls = [
        *((patch, partial(_noted, unseen_work, note)) for patch, note in notes),
        (_SHARE, partial(_share_memory, unseen_work)),
        *((patch, partial(_import, unseen_work)) for patch in _IMPORTS),
    ]
    return [(patch, calling(function, recorder.is_active)) for patch, function in calls]


def _noted(unseen_work: UnseenWork, note: Note, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    note(unseen_work, sys._getframe(2), args)
    return original(*args, **kwargs)


def _note_export(
    recorder: Recorder, name: str, unseen_work: UnseenWork, frame: FrameType, args: tuple[Any, ...]
) -> None:
    """Record an export of a tensor's data; `tolist` of integers, such as lengths, does not count as one."""
    tensor = args[0]
    if name != "tolist" or tensor.is_floating_point() or tensor.is_complex():
        unseen_work.record_export(tensor, frame, is_array=name in _ARRAYS)
    if name in _READS:
        recorder.python_reads.record([tensor])


def _note_storage_export(unseen_work: UnseenWork, frame: FrameType | None, args: tuple[Any, ...]) -> None:
    while frame is not None and frame.f_code.co_filename == _TYPED_STORAGE:
        frame = frame.f_back
    unseen_work.record_storage_export(args[0], frame)


def _share_memory(unseen_work: UnseenWork, original: Callable[..., Any], tensor: torch.Tensor) -> Any:
    with disable_dispatch_modes():  # it moves the data by ops on memory of its own
        shared = original(tensor)
    unseen_work.record_export(shared, sys._getframe(2))
    return shared


def _import(unseen_work: UnseenWork, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    tensor = original(*args, **kwargs)
    unseen_work.record_import(tensor)
    return tensor


def _note_start(unseen_work: UnseenWork, frame: FrameType, args: tuple[Any, ...]) -> None:
    if frame.f_code.co_name != "_write_to_self":  # asyncio wakes its own loop through a socket
        unseen_work.record_elsewhere(frame)


def _note_pool(unseen_work: UnseenWork, frame: FrameType, args: tuple[Any, ...]) -> None:
    if not isinstance(args[0], ThreadPool):
        unseen_work.record_elsewhere(frame)


def _note_future(unseen_work: UnseenWork, frame: FrameType, args: tuple[Any, ...]) -> None:
    """Record a future of an executor's or another loop's work; `model_threads` records a thread pool's functions."""
    code = frame.f_code
    if code.co_filename.endswith(_THREAD_POOL):
        return
    if code.co_name == "submit" or code.co_filename.startswith(_ASYNCIO):
        unseen_work.record_elsewhere(frame)
