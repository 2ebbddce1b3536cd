"""Op calls that are estimated, not run, and added to a Trace."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fvflops.capture.recorder.signature import cached_schema, describe_tensor
from fvflops.trace import Signature, TensorSpec, Trace, Value

# A call that was not run: its signature, its phase, and its number of calls.
Call = tuple[Signature, str, int]


@dataclass(frozen=True, slots=True)
class StageLinks:
    """The hidden state between pipeline stages, and whether a stage receives and sends it."""

    hidden: TensorSpec
    receives: bool
    sends: bool


def gradient_allreduce(trace: Trace, model: nn.Module, group: Value, ranks: int) -> list[Call]:
    """Return the calls of DistributedDataParallel: each gradient scaled, then an all-reduce of each dtype's gradients.

    Buffers are broadcast before the forward pass, as is its default.
    """
    device = trace.info.device
    gradients = Counter[str]()
    added: list[Call] = []
    for spec in _trained(trace, model):
        added.append((_sign(torch.ops.aten.mul.out, spec, self=spec, other=1 / ranks, out=spec), "backward", 1))
        gradients[spec.dtype] += spec.numel
    buffers = Counter[str]()
    for buffer in model.buffers():
        buffers[describe_tensor(buffer).dtype] += buffer.numel()
    c10d = torch.ops.c10d
    for dtype, size in buffers.items():
        sent = _sign(
            c10d.broadcast_.default, tensors=(TensorSpec((size,), dtype, device),), process_group=group, root_rank=0
        )
        added.append((sent, "forward", 1))
    for dtype, size in gradients.items():
        reduced = _sign(c10d.allreduce_.default, tensors=(TensorSpec((size,), dtype, device),), process_group=group)
        added.append((reduced, "backward", 1))
    return added


def send_recv(pipe: StageLinks, group: Value, microbatches: int) -> list[Call]:
    """Return the sends and receives of a stage: hidden states forward, their gradients backward."""
    c10d = torch.ops.c10d
    sent = _sign(c10d.send.default, tensors=(pipe.hidden,), process_group=group)
    received = _sign(c10d.recv_.default, tensors=(pipe.hidden,), process_group=group)
    added: list[Call] = []
    if pipe.receives:
        added += [(received, "forward", microbatches), (sent, "backward", microbatches)]
    if pipe.sends:
        added += [(sent, "forward", microbatches), (received, "backward", microbatches)]
    return added


def accumulate(trace: Trace, model: nn.Module, microbatches: int) -> list[Call]:
    """Return the accumulation of the microbatches' gradients."""
    add = torch.ops.aten.add_.Tensor
    return [
        (_sign(add, spec, self=spec, other=spec, alpha=1), "backward", microbatches - 1)
        for spec in _trained(trace, model)
    ]


def _trained(trace: Trace, model: nn.Module) -> list[TensorSpec]:
    """Return the local part of each trainable parameter, on the Trace's device."""
    held = [local_spec(parameter) for parameter in model.parameters() if parameter.requires_grad]
    return [replace(spec, device=trace.info.device) for spec in held]


def repeat(trace: Trace, times: int) -> Trace:
    """Return a Trace with its calls multiplied, without its ordered events."""
    return replace(
        trace.aggregate(),
        calls={place: calls * times for place, calls in trace.calls.items()},
        region_calls={place: calls * times for place, calls in trace.region_calls.items()},
    )


def add_calls(trace: Trace, added: list[Call]) -> Trace:
    """Return a Trace with further calls at the root, without its ordered events."""
    if not added:
        return trace
    signatures = list(trace.signatures)
    numbers = {signature: number for number, signature in enumerate(signatures)}
    calls = Counter(trace.calls)
    for signature, phase, times in added:
        if signature not in numbers:
            numbers[signature] = len(signatures)
            signatures.append(signature)
        calls[numbers[signature], 0, phase] += times
    return replace(trace.aggregate(), signatures=tuple(signatures), calls=dict(calls))


def _sign(op: Any, *outputs: Value, **inputs: Value) -> Signature:
    schema = cached_schema(op)
    values = [inputs.get(name, default) for name, default in zip(schema.names, schema.defaults, strict=True)]
    return Signature(schema.name, schema.names, tuple(values), outputs, schema.text)


def local_spec(tensor: torch.Tensor) -> TensorSpec:
    """Return the spec of the local part of a tensor."""
    from torch.distributed.tensor import DTensor

    return describe_tensor(tensor.to_local() if isinstance(tensor, DTensor) else tensor)
