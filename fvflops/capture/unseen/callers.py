"""Whose code makes a call: the model's, torch's, or a library's that starts processes for it."""

from __future__ import annotations

import os
from types import FrameType

import torch

from fvflops.capture.recorder.caller_lines import is_standard_library
from fvflops.paths import PACKAGE

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_PACKAGE = str(PACKAGE) + os.sep
_ZOO = os.path.join(_PACKAGE, "zoo") + os.sep
_CUSTOM_KERNEL_CALLERS = ("_ops.py", os.path.join("autograd", "graph.py"))
_MULTIPROCESSING = os.path.dirname(torch.multiprocessing.__file__)


def is_model_code(frame: FrameType) -> bool:
    """Return whether a frame is of the model's code, or a library's, not of torch's or this package's."""
    path = frame.f_code.co_filename
    return path.startswith(_ZOO) or not path.startswith((_TORCH, _PACKAGE))


def is_called_by_torch(frame: FrameType | None) -> bool:
    """Return whether torch's own code made the call; some of its C++ kernels (`_pad_packed_sequence`) write by pointer.

    Calls from torch.ops and the backward engine do not count, since these call custom kernels too.
    """
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    if frame is None:
        return False
    path = frame.f_code.co_filename
    if path.endswith("_ops.py") and frame.f_code.co_name == "decompose":
        return str(frame.f_locals["self"]).startswith("aten.")
    return path.startswith(_TORCH) and not path.endswith(_CUSTOM_KERNEL_CALLERS)


def find_starter(frame: FrameType | None) -> FrameType | None:
    """Return the frame that called the standard library or torch's multiprocessing; None if a compiler did."""
    while frame is not None and _is_starter(frame.f_code.co_filename):
        frame = frame.f_back
    return None if frame is None or frame.f_globals.get("__name__", "").startswith("triton.") else frame


def _is_starter(path: str) -> bool:
    return is_standard_library(path) or path.startswith(_MULTIPROCESSING)
