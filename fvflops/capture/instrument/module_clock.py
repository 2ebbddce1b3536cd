"""Time the calls of a model's modules without per-op instrumentation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fvflops.capture.compiler import compiler_disabled
from fvflops.capture.instrument.modules import module_scopes
from fvflops.capture.instrument.probe import Probe
from fvflops.capture.lazy_values.run_values import unexpanded
from fvflops.capture.model.model_index import ModelIndex
from fvflops.capture.recorder.recorder import Recorder
from fvflops.capture.restore import interrupts
from fvflops.capture.restore.restore import Snapshot, restore_all
from fvflops.capture.restore.torch_state import model_runs
from fvflops.capture.run import suspend_outer_recordings
from fvflops.torch_internals import disable_dispatch_modes
from fvflops.trace import StopsAt, Trace


def time_modules(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    grad_enabled: bool,
    written_parameters: Sequence[torch.Tensor] = (),
) -> Trace:
    """Return the Trace of a forward pass with the times of module calls and no ops.

    No dispatch mode is active, so the only overhead per call that is not subtracted is reading the clock twice. With
    `grad_enabled` autograd builds a graph. Compiled functions run eagerly, as in recordings of ops; enclosing
    recordings are paused. The model, its buffers and the inputs are restored; parameters only if in
    `written_parameters`, as a copy of all might exceed memory.
    """
    model_index = ModelIndex(model)
    recorder = Recorder(
        StopsAt(frozenset()), backward=False, probe=Probe({"time"}, next(iter(model_index.devices), None))
    )
    with (
        interrupts.deferred(),
        suspend_outer_recordings(),
        compiler_disabled(),
        unchanged(model_index, (args, kwargs), written_parameters),
        torch.set_grad_enabled(grad_enabled),
        module_scopes(recorder, model_index),
        model_runs(),  # allows signals and restores the thread's torch state
    ):
        model(*args, **kwargs)
    recorder.close()
    assert recorder.probe is not None
    return recorder.trace(model_index.tree, recorder.probe.metadata())


@contextmanager
def unchanged(model_index: ModelIndex, inputs: Any, written_parameters: Sequence[torch.Tensor] = ()) -> Iterator[None]:
    """Restore a model, its buffers and its inputs at the end, including writes that bypass dispatch modes.

    Covers all tensors in the model or in objects among the inputs, except sparse ones and parameters not in
    `written_parameters`.
    """
    snapshot = Snapshot(model_index, inputs)
    buffers = [tensor for tensor, row in zip(model_index.tensors, model_index.rows, strict=True) if row[2] == "buffer"]
    with disable_dispatch_modes():
        tensors = (*buffers, *snapshot.tensors, *written_parameters)
        strided = [tensor for tensor in tensors if tensor.layout is torch.strided and not tensor.is_nested]
        views = [unexpanded(tensor) for tensor in strided if not tensor.is_meta]
        saved = [(view, view.clone()) for view in views]
    try:
        yield
    finally:
        try:
            restore_all((((lambda state: _restore_view(*state)), saved),))
        finally:
            snapshot.restore()


def _restore_view(view: torch.Tensor, before: torch.Tensor) -> None:
    same = torch.equal(view, before) if view.is_quantized else torch.equal(_bytes_of(view), _bytes_of(before))
    if not same:
        with torch.inference_mode() if view.is_inference() else torch.no_grad():
            view.copy_(before)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements as bytes, which compare equal for equal NaNs."""
    return tensor.resolve_conj().resolve_neg().reshape(-1).contiguous().view(torch.uint8)
