"""Save a tensor's contents before it is exported, since writes outside torch bypass dispatch modes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from fvflops.capture.instrument.patching import Patch, Wrapper
from fvflops.capture.restore.restore import UndoLog
from fvflops.capture.shapes.shape_tensor import ShapeTensor

# Size limits in bytes. Programs also call data_ptr to compare tensors, which should not copy large ones.
_LARGE, _SMALL = 1 << 28, 1 << 20
_MAX_BYTES: Mapping[str, int] = {
    **dict.fromkeys(("numpy", "__dlpack__", "apply_", "map_", "map2_"), _LARGE),
    "data_ptr": _SMALL,
}
# Methods that expose a tensor's data to code outside torch, or call Python for each element.
EXPORTS = {name: Patch(torch.Tensor, name) for name in (*_MAX_BYTES, "__array__", "__reduce_ex__", "tolist")}
# Methods of a storage that do so, or change its bytes without an op.
STORAGE_EXPORTS = {name: Patch(torch.UntypedStorage, name) for name in ("data_ptr", "byteswap")}


def saved_exports(undo_log: UndoLog, fresh: Mapping[int, Any], is_recorded: Callable[[], bool]) -> list[Wrapper]:
    """Return the wrappers that save a pre-existing tensor before its memory is exported in a thread of the run."""

    def around(max_bytes: int, original: Any) -> Any:
        def export(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if type(tensor) is not ShapeTensor and is_recorded():
                undo_log.save(tensor, fresh, max_bytes)
            return original(tensor, *args, **kwargs)

        return export

    def around_storage(original: Any) -> Any:
        def export(storage: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
            if is_recorded():
                undo_log.save_storage(storage, fresh, _SMALL)
            return original(storage, *args, **kwargs)

        return export

    return [
        *((EXPORTS[name], partial(around, max_bytes)) for name, max_bytes in _MAX_BYTES.items()),
        *((patch, around_storage) for patch in STORAGE_EXPORTS.values()),
    ]
