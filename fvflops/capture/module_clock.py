"""The module clock: what the calls of a model's modules take when nothing else is watched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fvflops.capture.meter import Meter
from fvflops.capture.reading import Reading
from fvflops.capture.recorder import Recorder
from fvflops.capture.restore import Snapshot
from fvflops.capture.scopes import module_scopes
from fvflops.capture.signature import tensors_of
from fvflops.trace import StopsAt, Trace


def clock_modules(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, gradients: bool) -> Trace:
    """Return the Trace of a forward pass that holds the times of modules' calls, and no ops.

    No dispatch mode is on, so that a call takes what it takes without fvflops, but for two looks at the clock. With
    `gradients` autograd takes down the pass. The model, its buffers and the inputs are left as they were.
    """
    reading = Reading(model)
    recorder = Recorder(StopsAt(frozenset()), backward=False, meter=Meter({"time"}, next(iter(reading.devices), None)))
    with unchanged(reading, (args, kwargs)), torch.set_grad_enabled(gradients), module_scopes(recorder, reading):
        model(*args, **kwargs)
    recorder.close()
    assert recorder.meter is not None
    return recorder.trace(reading.tree, recorder.meter.about())


@contextmanager
def unchanged(reading: Reading, inputs: Any) -> Iterator[None]:
    """Leave a model, its buffers and its inputs as they were, whatever is done that no dispatch mode sees."""
    snapshot = Snapshot(reading, inputs)
    given = [tensor for tensor in tensors_of(inputs) if not tensor.is_meta]
    buffers = [tensor for tensor, row in zip(reading.tensors, reading.rows, strict=True) if row[2] == "buffer"]
    held = [(tensor, tensor.detach().clone()) for tensor in (*buffers, *given)]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, before in held:
                if not torch.equal(tensor, before):
                    tensor.copy_(before)
        snapshot.restore()
