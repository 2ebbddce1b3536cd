"""Op calls that are estimated, not run, and added to a Trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
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

    Buffers are broadcast before the forward pass, as DDP does by default (broadcast_buffers=True).
    """
    device = trace.info.device
    gradients = Counter[str]()
    added: list[Call] = []
    for spec in _trainable_specs(trace, model):
        added.append(
            (_make_signature(torch.ops.aten.mul.out, spec, self=spec, other=1 / ranks, out=spec), "backward", 1)
        )
        gradients[spec.dtype] += spec.numel
    buffers = Counter[str]()
    for buffer in model.buffers():
        buffers[describe_tensor(buffer).dtype] += buffer.numel()
    c10d = torch.ops.c10d
    for dtype, size in buffers.items():
        tensors = (TensorSpec((size,), dtype, device),)
        broadcast = _make_signature(c10d.broadcast_.default, tensors=tensors, process_group=group, root_rank=0)
        added.append((broadcast, "forward", 1))
    for dtype, size in gradients.items():
        allreduce = _make_signature(
            c10d.allreduce_.default, tensors=(TensorSpec((size,), dtype, device),), process_group=group
        )
        added.append((allreduce, "backward", 1))
    return added


def tied_gradient_allreduce(trace: Trace, parameters: Iterable[nn.Parameter], group: Value) -> list[Call]:
    """Return the all-reduces of the gradients of parameters that the first and the last pipeline stage hold each.

    Megatron-LM does so for the embedding, of which the last stage has a copy: Narayanan et al. (arXiv:2104.04473).
    """
    return [
        (
            _make_signature(
                torch.ops.c10d.allreduce_.default,
                tensors=(replace(local_spec(parameter), device=trace.info.device),),
                process_group=group,
            ),
            "backward",
            1,
        )
        for parameter in parameters
        if parameter.requires_grad
    ]


def send_recv(links: StageLinks, group: Value, microbatches: int) -> list[Call]:
    """Return the sends and receives of a stage: hidden states forward, their gradients backward."""
    c10d = torch.ops.c10d
    send = _make_signature(c10d.send.default, tensors=(links.hidden,), process_group=group)
    receive = _make_signature(c10d.recv_.default, tensors=(links.hidden,), process_group=group)
    added: list[Call] = []
    if links.receives:
        added += [(receive, "forward", microbatches), (send, "backward", microbatches)]
    if links.sends:
        added += [(send, "forward", microbatches), (receive, "backward", microbatches)]
    return added


def gradient_accumulation(trace: Trace, model: nn.Module, microbatches: int) -> list[Call]:
    """Return the additions of the gradients of all microbatches but the first."""
    add = torch.ops.aten.add_.Tensor
    return [
        (_make_signature(add, spec, self=spec, other=spec, alpha=1), "backward", microbatches - 1)
        for spec in _trainable_specs(trace, model)
    ]


def _trainable_specs(trace: Trace, model: nn.Module) -> list[TensorSpec]:
    """Return the spec of each trainable parameter's local shard, on the Trace's device."""
    specs = [local_spec(parameter) for parameter in model.parameters() if parameter.requires_grad]
    return [replace(spec, device=trace.info.device) for spec in specs]


def repeat(trace: Trace, times: int) -> Trace:
    """Return a Trace with its calls before the optimizer step multiplied, without its ordered events."""

    def multiply(calls: Mapping[tuple[int, int, str], int]) -> dict[tuple[int, int, str], int]:
        return {key: count if key[2] == "optimizer" else count * times for key, count in calls.items()}

    return replace(trace.aggregate(), calls=multiply(trace.calls), region_calls=multiply(trace.region_calls))


def add_calls(trace: Trace, added: list[Call]) -> Trace:
    """Return a Trace with further calls at the root, without its ordered events."""
    if not added:
        return trace
    signatures = list(trace.signatures)
    indices = {signature: index for index, signature in enumerate(signatures)}
    calls = Counter(trace.calls)
    for signature, phase, times in added:
        if signature not in indices:
            indices[signature] = len(signatures)
            signatures.append(signature)
        calls[indices[signature], 0, phase] += times
    return replace(trace.aggregate(), signatures=tuple(signatures), calls=dict(calls))


def _make_signature(op: Any, *outputs: Value, **inputs: Value) -> Signature:
    schema = cached_schema(op)
    values = [inputs.get(name, default) for name, default in zip(schema.names, schema.defaults, strict=True)]
    return Signature(schema.name, schema.names, tuple(values), outputs, schema.text)


def local_spec(tensor: torch.Tensor) -> TensorSpec:
    """Return the spec of a tensor, of a DTensor's local shard."""
    from torch.distributed.tensor import DTensor

    return describe_tensor(tensor.to_local() if isinstance(tensor, DTensor) else tensor)
