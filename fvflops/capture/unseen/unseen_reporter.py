"""Report work that bypasses the dispatcher: where it is attributed, and whose code does it."""

from __future__ import annotations

import os
import sys
from threading import get_ident
from types import FrameType
from typing import Any, NamedTuple

import torch

from fvflops.capture.recorder.caller_lines import (
    PACKAGE_FOLDER,
    TORCH_FOLDER,
    ZOO_FOLDER,
    SourceLine,
    find_source_line,
    is_standard_library,
)
from fvflops.torch_internals import current_autograd_node
from fvflops.trace import Signature, TensorSpec

_CUSTOM_KERNEL_CALLERS = ("_ops.py", os.path.join("autograd", "graph.py"))
_MULTIPROCESSING = os.path.dirname(torch.multiprocessing.__file__)


class Site(NamedTuple):
    """Where work is attributed: stack, phase and source line."""

    stack: int
    phase: str
    source: SourceLine


class UnseenReporter:
    """Reports unseen work in one run to the recorder, as op calls.

    Such a call is named `prim::PythonOp.NAME` in the forward of an autograd.Function and `unseen::FUNCTION` elsewhere;
    its output is the detected tensor, its source the line. `recorder` is the Recorder, whose module imports this one.
    """

    def __init__(self, recorder: Any) -> None:
        self._recorder = recorder
        # Threads in which an op is running; the work of its kernel, even in Python, belongs to it.
        self.busy: set[int] = set()
        # Stacks under which work was reported.
        self.reported: set[int] = set()

    @property
    def in_op(self) -> bool:
        return bool(self.busy) and get_ident() in self.busy

    def is_accessible(self, frame: FrameType | None) -> bool:
        """Return whether code at a frame is the model's, not torch's, and runs inside a call of the model."""
        return not self.in_op and frame is not None and self.is_inside() and is_model_code(frame)

    def is_inside(self) -> bool:
        # A thread that the model started is inside the call that started it.
        return self._recorder.thread_state().stack != 0 or current_autograd_node() is not None

    def site(self, source: SourceLine | None = None) -> Site:
        """Return where work at a source line, by default the model's current line, is attributed."""
        source = find_source_line(sys._getframe(2)) if source is None else source
        stack, phase = self._recorder.stack_and_phase()
        return Site(stack, phase, source)

    def report(self, site: Site, outputs: tuple[TensorSpec, ...] = (), writes: tuple[int, ...] = ()) -> None:
        """Report work at a site that computes tensors or arrays, if known, on these storages."""
        recorder = self._recorder
        innermost = recorder.innermost_region(site.stack)
        if innermost.kind != "function":
            name = f"unseen::{site.source.function or innermost.name or 'work'}"
        elif site.phase == "backward":
            name = f"unseen::{innermost.name}.backward"
        else:
            name = f"prim::PythonOp.{innermost.name}"
        signature = Signature(name, (), (), outputs, f"{name}(...) -> Tensor", site.source.line)
        self.reported.add(site.stack)
        recorder.append_unseen(signature, site.stack, site.phase, writes)


def is_model_code(frame: FrameType) -> bool:
    """Return whether a frame is in the model's or a library's code, not in torch or this package."""
    path = frame.f_code.co_filename
    return path.startswith(ZOO_FOLDER) or not path.startswith((TORCH_FOLDER, PACKAGE_FOLDER))


def is_called_by_torch(frame: FrameType | None) -> bool:
    """Return whether torch's own code made the call; some of its C++ kernels (`_pad_packed_sequence`) write by pointer.

    Calls from torch.ops and the backward engine do not count, since these call custom kernels too.
    """
    while frame is not None and frame.f_code.co_filename.startswith(PACKAGE_FOLDER):
        frame = frame.f_back
    if frame is None:
        return False
    path = frame.f_code.co_filename
    if path.endswith("_ops.py") and frame.f_code.co_name == "decompose":
        return str(frame.f_locals["self"]).startswith("aten.")
    return path.startswith(TORCH_FOLDER) and not path.endswith(_CUSTOM_KERNEL_CALLERS)


def find_starter(frame: FrameType | None) -> FrameType | None:
    """Return the frame that called the standard library or torch's multiprocessing; None if a compiler did."""
    while frame is not None:
        path = frame.f_code.co_filename
        if not (is_standard_library(path) or path.startswith(_MULTIPROCESSING)):
            return None if frame.f_globals.get("__name__", "").startswith("triton.") else frame
        frame = frame.f_back
    return None
