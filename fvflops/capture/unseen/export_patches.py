"""Save a tensor's elements before they leave torch, since writes outside it bypass dispatch modes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from threading import get_ident
from typing import Any

import torch

from fvflops.capture.instrument.patching import Patch, Wrapping
from fvflops.capture.restore.restore import UndoLog
from fvflops.capture.shapes.shape_tensor import ShapeTensor

# Limits in bytes. data_ptr is also called to compare tensors, which should not copy large ones.
_LARGEST: Mapping[str, int] = {"numpy": 1 << 28, "__dlpack__": 1 << 28, "data_ptr": 1 << 20}
# Methods that expose a tensor's data to code outside torch.
EXPORTS = {
    name: Patch(torch.Tensor, name)
    for name in ("numpy", "__array__", "__dlpack__", "data_ptr", "__reduce_ex__", "tolist")
}


def saved_exports(undo_log: UndoLog, fresh: Mapping[int, Any]) -> list[Wrapping]:
    """Return the wrappings that save pre-existing tensors when they leave torch by `numpy`, DLPack or data_ptr."""

    thread = get_ident()

    def around(largest: int, original: Any) -> Any:
        def export(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if type(tensor) is not ShapeTensor and get_ident() == thread:
                undo_log.save(tensor, fresh, largest)
            return original(tensor, *args, **kwargs)

        return export

    return [(EXPORTS[name], partial(around, largest)) for name, largest in _LARGEST.items()]
