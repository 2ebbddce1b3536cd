"""Distinguish a program's FakeTensors, whose ops are counted, from FakeTensors with which torch infers shapes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from traceback import walk_stack
from typing import Any

import torch

from fvflops.capture.recorder.caller_lines import TORCH_FOLDER
from fvflops.capture.recorder.tensor_specs import tensors_of
from fvflops.torch_internals import DispatchModeKey, FakeTensor, FakeTensorMode, get_dispatch_mode, pytree

# Parts of torch that run ops on their own FakeTensors, to infer shapes or trace graphs.
_SHAPE_INFERENCE_PATHS = tuple(
    os.path.join(TORCH_FOLDER, *path.split("/"))
    for path in (
        *("distributed/tensor", "_dynamo", "_inductor", "_export", "export", "_functorch/_aot_autograd"),
        *("_functorch/aot_autograd.py", "fx/experimental/proxy_tensor.py", "_higher_order_ops", "_library"),
    )
)


def active_fake_mode() -> FakeTensorMode | None:
    mode: FakeTensorMode | None = get_dispatch_mode(DispatchModeKey.FAKE)
    return mode


def is_torch_shape_inference(types: Sequence[type]) -> bool:
    """Return whether the call is torch's own shape inference (as in DTensor's sharding rules), not the model's."""
    if types and FakeTensor not in types:
        return False
    if active_fake_mode() is None:
        return False
    return any(frame.f_code.co_filename.startswith(_SHAPE_INFERENCE_PATHS) for frame, _ in walk_stack(sys._getframe(1)))


def find_fake_mode(tensors: Iterable[torch.Tensor]) -> FakeTensorMode | None:
    """Return the FakeTensorMode of the tensors, else the active one in this thread, else None."""
    modes = [tensor.fake_mode for tensor in tensors if isinstance(tensor, FakeTensor)]
    return modes[0] if modes else active_fake_mode()


@contextmanager
def fake_execution(mode: FakeTensorMode | None, values: Any) -> Iterator[Any]:
    """Run on FakeTensors while the context lasts; yield the nested values converted."""
    if mode is None:
        yield values
        return
    original = mode.allow_non_fake_inputs
    mode.allow_non_fake_inputs = True  # for constants of the model
    try:
        with mode if active_fake_mode() is None else nullcontext():
            yield pytree.tree_map_only(
                torch.Tensor, lambda item: item if isinstance(item, FakeTensor) else mode.from_tensor(item), values
            )
    finally:
        mode.allow_non_fake_inputs = original


def contains_fakes(values: Any) -> bool:
    return any(isinstance(tensor, FakeTensor) for tensor in tensors_of(values))
