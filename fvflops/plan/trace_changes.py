"""Changes of a recorded Trace: another rank of the pipeline, another device, another phase."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch

from fvflops.plan.rank_step import Pass
from fvflops.trace import TensorSpec, Trace, Value
from fvflops.trace.process_group import ProcessGroupSpec


def assign_backward(trace: Trace, slices: Iterable[tuple[int, int]]) -> Trace:
    """Return a Trace in which all that happens in some slices of its events is in the phase "backward"."""
    ranges = [(begin, end) for begin, end in slices if begin < end]
    if not ranges:
        return trace
    events = list(trace.events or ())
    for begin, end in ranges:
        for index in range(begin, end):
            if events[index].phase in ("forward", "other"):
                events[index] = events[index]._replace(phase="backward")
    whole = Pass(replace(trace, events=events), 0, len(events))
    return replace(whole.trace, calls=dict(whole.count("op")), region_calls=dict(whole.count("exit")))


def relabel_devices(trace: Trace, device: torch.device) -> Trace:
    """Return a Trace with the tensors of the CPU on another device."""

    def change(value: Value) -> Value:
        return replace(value, device=str(device)) if isinstance(value, TensorSpec) and value.device == "cpu" else value

    changed = _change_values(trace, change)
    storages = [item._replace(device=str(device)) if item.device == "cpu" else item for item in trace.storages]
    return replace(changed, storages=storages, about={**trace.about, "device": str(device)})


def shift_groups(trace: Trace, offset: int) -> Trace:
    """Return the Trace of a rank that does the same, `offset` ranks further along the pipeline axis."""

    def change(value: Value) -> Value:
        group = ProcessGroupSpec.of(value)
        if group is None or group.axis == "pp":
            return value
        return replace(group, first=group.first + offset).symbol()

    return _change_values(trace, change) if offset else trace


def _change_values(trace: Trace, change: Callable[[Value], Value]) -> Trace:
    """Return a Trace with each value of its signatures changed, also in tuples."""

    def change_all(value: Value) -> Value:
        return tuple(map(change_all, value)) if isinstance(value, tuple) else change(value)

    def change_each(values: tuple[Value, ...]) -> tuple[Value, ...]:
        return tuple(map(change_all, values))

    return replace(
        trace,
        signatures=tuple(
            replace(item, inputs=change_each(item.inputs), outputs=change_each(item.outputs))
            for item in trace.signatures
        ),
        region_signatures=tuple(
            replace(item, inputs=change_each(item.inputs), outputs=change_each(item.outputs))
            for item in trace.region_signatures
        ),
    )
