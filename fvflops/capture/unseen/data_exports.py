"""Notice when code outside torch gets at a tensor's data: NumPy, DLPack, a pointer, a list, a pickle."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils import dlpack

from fvflops.capture.instrument.patching import Patch, Wrapping
from fvflops.capture.recorder.recorder import Recorder
from fvflops.capture.unseen.export_patches import EXPORTS

_FUNCTIONS = (Patch(dlpack, "to_dlpack"), Patch(torch, "to_dlpack"))
# What makes a tensor of memory that belongs to somebody else, unseen by any dispatch mode.
_IMPORTS = (Patch(torch, "frombuffer"), Patch(torch, "from_dlpack"), Patch(dlpack, "from_dlpack"))


def data_exports(recorder: Recorder) -> list[Wrapping]:
    """Return what is to be wrapped so that a recorder's evidence of unseen work knows when data leaves torch."""
    if recorder.unseen is None:
        return []
    return [
        *((patch, partial(_around_export, recorder, floats=name == "tolist")) for name, patch in EXPORTS.items()),
        *((patch, partial(_around_export, recorder)) for patch in _FUNCTIONS),
        *((patch, partial(_around_import, recorder)) for patch in _IMPORTS),
    ]


def _around_export(recorder: Recorder, original: Callable[..., Any], *, floats: bool = False) -> Callable[..., Any]:
    """Wrap what gives out a tensor's data; with `floats` whole numbers, such as lengths, are no data."""

    def export(tensor: torch.Tensor, /, *args: Any, **kwargs: Any) -> Any:
        unseen = recorder.unseen
        is_data = not floats or tensor.is_floating_point() or tensor.is_complex()
        if unseen is not None and is_data and not recorder.paused and recorder.is_recording_thread():
            unseen.exported(tensor, sys._getframe(1))
        return original(tensor, *args, **kwargs)

    return export


def _around_import(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    def take_in(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor: torch.Tensor = original(*args, **kwargs)
        unseen = recorder.unseen
        if unseen is not None and not recorder.paused and recorder.is_recording_thread():
            unseen.imported(tensor)
        return tensor

    return take_in
