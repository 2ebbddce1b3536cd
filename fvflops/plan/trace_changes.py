"""Changes of a recorded Trace: another rank, device or phase, and op calls that are estimated, not run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fvflops.capture.recorder.tensor_specs import cached_schema, describe_tensor
from fvflops.plan.rank_step import Call, Pass, RankStep, StageLinks
from fvflops.trace import Signature, TensorSpec, Trace, Value
from fvflops.trace.process_group import ProcessGroupSpec


def assign_phases(trace: Trace, slices: Mapping[tuple[int, int], str]) -> Trace:
    """Return a Trace with given phases for forward and other events in some slices of its events."""
    ranges = {(begin, end): phase for (begin, end), phase in slices.items() if begin < end}
    if not ranges:
        return trace
    events = list(trace.events or ())
    for (begin, end), phase in ranges.items():
        for index in range(begin, end):
            if events[index].phase in ("forward", "other"):
                events[index] = events[index]._replace(phase=phase)
    whole = Pass(replace(trace, events=events), 0, len(events))
    return replace(whole.trace, calls=dict(whole.count("op")), region_calls=dict(whole.count("exit")))


def relabel_devices(trace: Trace, device: torch.device) -> Trace:
    """Return a Trace with its CPU tensors labelled as on another device."""

    def change(value: Value) -> Value:
        return replace(value, device=str(device)) if isinstance(value, TensorSpec) and value.device == "cpu" else value

    changed = _change_values(trace, change)
    storages = [item._replace(device=str(device)) if item.device == "cpu" else item for item in trace.storages]
    return replace(changed, storages=storages, about={**trace.about, "device": str(device)})


@dataclass(frozen=True, slots=True)
class GroupShift:
    """Change of process groups to an equal rank's, `offset` ranks further along the pipeline axis."""

    offset: int

    def trace(self, trace: Trace) -> Trace:
        return _change_values(trace, self._group) if self.offset else trace

    def estimated(self, item: Pass) -> Pass:
        """Return a Pass with the calls of the other rank that were not run."""
        if not self.offset or not (item.added or item.gradients):
            return item
        return replace(
            item,
            added=tuple((_change_signature(call, self._group), *rest) for call, *rest in item.added),
            gradients=tuple(gradient._replace(group=self._group(gradient.group)) for gradient in item.gradients),
        )

    def _group(self, value: Value) -> Value:
        group = ProcessGroupSpec.of(value)
        if group is None or group.axis == "pp":
            return value
        return replace(group, first=group.first + self.offset).symbol()


def _change_values(trace: Trace, change: Callable[[Value], Value]) -> Trace:
    """Return a Trace with each value of its signatures changed, including values in tuples."""
    return replace(
        trace,
        signatures=tuple(_change_signature(item, change) for item in trace.signatures),
        region_signatures=tuple(_change_signature(item, change) for item in trace.region_signatures),
    )


def _change_signature(item: Any, change: Callable[[Value], Value]) -> Any:
    def change_all(value: Value) -> Value:
        return tuple(map(change_all, value)) if isinstance(value, tuple) else change(value)

    return replace(item, inputs=tuple(map(change_all, item.inputs)), outputs=tuple(map(change_all, item.outputs)))


def allreduce(gradient: TensorSpec, device: str, group: Value) -> Call:
    tensors = (replace(gradient, device=device),)
    return make_signature(torch.ops.c10d.allreduce_.default, tensors=tensors, process_group=group), "backward", 1


def send_recv(links: Iterable[StageLinks], rank: int, group: Value, microbatches: int) -> list[Call]:
    """Return the sends and receives of a pipeline rank's stages: hidden states forward, their gradients backward."""
    send, receive = torch.ops.c10d.send.default, torch.ops.c10d.recv_.default
    added: list[Call] = []
    for link in links:
        for hidden, other, forward, backward in (
            (link.received, link.source, receive, send),
            (link.sent, link.destination, send, receive),
        ):
            if hidden is not None and other != rank:
                for op, phase in ((forward, "forward"), (backward, "backward")):
                    signature = make_signature(op, tensors=(hidden,), process_group=group)
                    added.append((signature, phase, microbatches))
    return added


def total_of(recorded: Trace, step: RankStep, added: Sequence[Call]) -> Trace:
    """Return the Trace of a whole step; it has ordered events only if it equals the recording."""
    calls = step.count("op")
    added = [*step.added(), *added]
    if not added and calls == recorded.calls:
        return recorded
    signatures = list(recorded.signatures)
    indices = {signature: index for index, signature in enumerate(signatures)}
    for signature, phase, times in added:
        if signature not in indices:
            indices[signature] = len(signatures)
            signatures.append(signature)
        calls[indices[signature], 0, phase] += times
    total = replace(recorded.aggregate(), signatures=tuple(signatures), calls=dict(calls))
    return replace(total, region_calls=dict(step.count("exit")))


def make_signature(op: Any, *outputs: Value, **inputs: Value) -> Signature:
    schema = cached_schema(op)
    values = [inputs.get(name, default) for name, default in zip(schema.names, schema.defaults, strict=True)]
    return Signature(schema.name, schema.names, tuple(values), outputs, schema.text)


def local_spec(tensor: torch.Tensor) -> TensorSpec:
    """Return the spec of a tensor; for a DTensor, of its local shard."""
    from torch.distributed.tensor import DTensor

    return describe_tensor(tensor.to_local() if isinstance(tensor, DTensor) else tensor)
