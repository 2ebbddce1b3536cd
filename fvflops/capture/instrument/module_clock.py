"""The module clock: what the calls of a model's modules take when nothing else is watched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fvflops.capture.instrument.instrument import compiler_disabled
from fvflops.capture.instrument.modules import module_scopes
from fvflops.capture.instrument.probe import Probe
from fvflops.capture.model.model_index import ModelIndex
from fvflops.capture.recorder.recorder import Recorder
from fvflops.capture.restore.interrupts import deferred
from fvflops.capture.restore.restore import Snapshot, restore_all
from fvflops.capture.restore.torch_state import model_runs
from fvflops.capture.run import suspend_outer_recordings
from fvflops.torch_internals import disable_dispatch_modes
from fvflops.trace import StopsAt, Trace


def clock_modules(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    gradients: bool,
    written: Sequence[torch.Tensor] = (),
) -> Trace:
    """Return the Trace of a forward pass that holds the times of modules' calls, and no ops.

    No dispatch mode is on, so that a call takes what it takes without fvflops, but for two looks at the clock. With
    `gradients` autograd takes down the pass. Compiled functions run eagerly, as they do where ops are watched, and
    other recordings see nothing of it. The model, its buffers and the inputs are left as they were, of its parameters
    those that are `written`: to copy all of them could take more memory than there is.
    """
    reading = ModelIndex(model)
    recorder = Recorder(StopsAt(frozenset()), backward=False, meter=Probe({"time"}, next(iter(reading.devices), None)))
    with (
        deferred(),
        suspend_outer_recordings(),
        compiler_disabled(),
        unchanged(reading, (args, kwargs), written),
        torch.set_grad_enabled(gradients),
        module_scopes(recorder, reading),
        model_runs(),
    ):
        model(*args, **kwargs)
    recorder.close()
    assert recorder.probe is not None
    return recorder.trace(reading.tree, recorder.probe.about())


@contextmanager
def unchanged(reading: ModelIndex, inputs: Any, written: Sequence[torch.Tensor] = ()) -> Iterator[None]:
    """Leave a model, its buffers and its inputs as they were, whatever is done that no dispatch mode sees.

    That is so of all tensors that a model or an object among the inputs holds, but for sparse ones, and for parameters
    that are not among those `written`.
    """
    snapshot = Snapshot(reading, inputs)
    buffers = [tensor for tensor, row in zip(reading.tensors, reading.rows, strict=True) if row[2] == "buffer"]
    with disable_dispatch_modes():
        views = [_view_once(tensor) for tensor in (*buffers, *snapshot.tensors, *written) if _has_elements(tensor)]
        held = [(view, view.clone()) for view in views]
    try:
        yield
    finally:
        try:
            restore_all((((lambda state: _put_back(*state)), held),))
        finally:
            snapshot.restore()


def _has_elements(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_meta)


def _view_once(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view that keeps its shape whatever the tensor becomes, with each element of an expanded one once."""
    view = tensor.detach()
    for dim, (size, stride) in enumerate(zip(view.shape, view.stride(), strict=True)):
        if size > 1 and not stride:
            view = view.narrow(dim, 0, 1)
    return view


def _put_back(view: torch.Tensor, before: torch.Tensor) -> None:
    same = torch.equal(view, before) if view.is_quantized else torch.equal(_bytes_of(view), _bytes_of(before))
    if not same:
        with torch.inference_mode() if view.is_inference() else torch.no_grad():
            view.copy_(before)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor's elements: by their values what is not a number would differ from itself."""
    return tensor.resolve_conj().resolve_neg().reshape(-1).contiguous().view(torch.uint8)
