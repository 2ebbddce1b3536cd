"""Record accesses to a tensor's data by code outside torch: NumPy, DLPack, pointer, list, pickle."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch.utils import dlpack

from fvflops.capture.instrument.patching import Patch, Wrapper
from fvflops.capture.recorder.recorder import Recorder
from fvflops.capture.unseen.export_patches import EXPORTS, STORAGE_EXPORTS
from fvflops.torch_internals import disable_dispatch_modes

_FUNCTIONS = (Patch(dlpack, "to_dlpack"), Patch(torch, "to_dlpack"))
# Exports as Python's or NumPy's numbers.
_READS = frozenset({"numpy", "__array__", "tolist"})
# Functions that create a tensor on foreign memory, invisible to dispatch modes.
_IMPORTS = (Patch(torch, "frombuffer"), Patch(torch, "from_dlpack"), Patch(dlpack, "from_dlpack"))
_SHARE = Patch(torch.Tensor, "share_memory_")
_ARRAYS = frozenset({"numpy", "__array__", "__dlpack__"})
# Where torch calls a storage's methods for the program's calls of its older class of storages.
_TYPED_STORAGE = os.path.join(os.path.dirname(os.path.abspath(torch.__file__)), "storage.py")


def data_exports(recorder: Recorder) -> list[Wrapper]:
    """Return the wrappers that record exports of tensor data and imports of foreign memory."""
    if recorder.unseen is None:
        return []
    return [
        *((patch, partial(_around_export, recorder, name)) for name, patch in EXPORTS.items()),
        *((patch, partial(_around_export, recorder, "to_dlpack")) for patch in _FUNCTIONS),
        (_SHARE, partial(_around_share, recorder)),
        *((patch, partial(_around_storage_export, recorder)) for patch in STORAGE_EXPORTS.values()),
        *((patch, partial(_around_import, recorder)) for patch in _IMPORTS),
    ]


def _around_export(recorder: Recorder, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that exports a tensor's data; `tolist` of integers, such as lengths, is no export."""

    def export(tensor: torch.Tensor, /, *args: Any, **kwargs: Any) -> Any:
        unseen_work = recorder.unseen
        if unseen_work is not None and not recorder.paused and recorder.is_recording_thread():
            if name != "tolist" or tensor.is_floating_point() or tensor.is_complex():
                unseen_work.record_export(tensor, sys._getframe(1), is_array=name in _ARRAYS)
            if name in _READS:
                recorder.python_reads.record([tensor])
        return original(tensor, *args, **kwargs)

    return export


def _around_share(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    def share_memory_(tensor: torch.Tensor) -> torch.Tensor:
        if recorder.unseen is None or recorder.paused or not recorder.is_recording_thread():
            return original(tensor)
        with disable_dispatch_modes():  # it moves the data by ops on memory of its own
            shared: torch.Tensor = original(tensor)
        recorder.unseen.record_export(shared, sys._getframe(1))
        return shared

    return share_memory_


def _around_storage_export(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    def export(storage: torch.UntypedStorage, /, *args: Any, **kwargs: Any) -> Any:
        unseen_work = recorder.unseen
        if unseen_work is not None and not recorder.paused and recorder.is_recording_thread():
            frame: FrameType | None = sys._getframe(1)
            while frame is not None and frame.f_code.co_filename == _TYPED_STORAGE:
                frame = frame.f_back
            unseen_work.record_storage_export(storage, frame)
        return original(storage, *args, **kwargs)

    return export


def _around_import(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    def import_(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor: torch.Tensor = original(*args, **kwargs)
        unseen_work = recorder.unseen
        if unseen_work is not None and not recorder.paused and recorder.is_recording_thread():
            unseen_work.record_import(tensor)
        return tensor

    return import_
