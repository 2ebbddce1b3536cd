"""Support torch's graph tracer (make_fx, torch.func.linearize) in shape execution."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fvflops.capture.recorder.tensor_specs import tensors_of
from fvflops.capture.shapes.shape_tensor import ShapeTensor
from fvflops.torch_internals import DispatchModeKey, get_dispatch_mode, set_dispatch_mode, unset_dispatch_mode

_PROXY_KEY = DispatchModeKey.PROXY


def graph_tracer() -> Any:
    """Return the dispatch mode that traces a graph in this thread, or None; torch calls it after all other modes."""
    return get_dispatch_mode(_PROXY_KEY)


@contextmanager
def tracer_stashed() -> Iterator[None]:
    """Disable the graph tracer while the context lasts."""
    tracer: Any = unset_dispatch_mode(_PROXY_KEY)
    try:
        yield
    finally:
        set_dispatch_mode(tracer)


def make_constants(mode: Any, values: Any) -> None:
    """Add shape tensors that existed before tracing to the graph as constants, as torch does with its own tensors."""
    from torch.fx.experimental.proxy_tensor import has_proxy_slot, track_tensor_tree

    tracer = mode.tracer
    for tensor in tensors_of(values):
        if type(tensor) is ShapeTensor and not has_proxy_slot(tensor, tracer):
            name = tracer.get_fresh_qualname("_tensor_constant")
            setattr(tracer.root, name, tensor)
            node = tracer.create_proxy("get_attr", name, (), {})
            track_tensor_tree(tensor, node, constant=None, tracer=tracer)
