"""Save a tensor's contents before it is exported, since writes outside torch bypass dispatch modes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from threading import get_ident
from typing import Any

import torch

from fvflops.capture.instrument.patching import Patch, Wrapper
from fvflops.capture.restore.restore import UndoLog
from fvflops.capture.shapes.shape_tensor import ShapeTensor

# Size limits in bytes. Programs also call data_ptr to compare tensors, which should not copy large ones.
_MAX_BYTES: Mapping[str, int] = {"numpy": 1 << 28, "__dlpack__": 1 << 28, "data_ptr": 1 << 20}
# Methods that expose a tensor's data to code outside torch.
EXPORTS = {
    name: Patch(torch.Tensor, name)
    for name in ("numpy", "__array__", "__dlpack__", "data_ptr", "__reduce_ex__", "tolist")
}


def saved_exports(undo_log: UndoLog, fresh: Mapping[int, Any]) -> list[Wrapper]:
    """Return the wrappers that save a pre-existing tensor before `numpy`, DLPack or data_ptr exports it."""

    thread = get_ident()

    def around(max_bytes: int, original: Any) -> Any:
        def export(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if type(tensor) is not ShapeTensor and get_ident() == thread:
                undo_log.save(tensor, fresh, max_bytes)
            return original(tensor, *args, **kwargs)

        return export

    return [(EXPORTS[name], partial(around, max_bytes)) for name, max_bytes in _MAX_BYTES.items()]
