"""Chrome traces of torch.profiler in memory: read, write, and add modules, work and FLOP/s to their events' args."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from typing import Any

from fvflops import paths
from fvflops.measure.kernels.kernel_sums import divide_work
from fvflops.measure.kernels.matching import KernelMatch
from fvflops.measure.kernels.recorded_calls import Work
from fvflops.measure.kernels.trace_stream import TraceStream

ChromeTrace = dict[str, Any]

# Categories of the file's events.
DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
_HAS_EXTERNAL_ID = ("cpu_op", "user_annotation")
_MAX_CHARACTERS = 1 << 30  # Python needs some ten times as much
_MAX_ITEMS = 1 << 24  # objects and lists: an event has two or three
_MAX_NESTING = 8  # of events with one name
_encode = json.JSONEncoder(separators=(",", ":")).encode


def read_document(path: str) -> ChromeTrace:
    """Return a chrome trace, from .json or .json.gz; any other file, and a larger one, raises TraceError."""
    stream = TraceStream(path, max_characters=_MAX_CHARACTERS, max_items=_MAX_ITEMS)
    events = list(stream)
    return {**stream.header, "traceEvents": events}


def write_document(document: ChromeTrace, path: str) -> None:
    """Write a chrome trace, compressed if the path ends with .gz."""
    if path.endswith(".gz"):
        paths.write_bytes(path, gzip.compress("".join(_lines(document)).encode(), compresslevel=6))
    else:
        paths.write_text(path, _lines(document))


def _lines(document: ChromeTrace) -> Iterator[str]:
    yield "{\n"
    yield from (f"{_encode(key)}: {_encode(value)},\n" for key, value in document.items() if key != "traceEvents")
    yield '"traceEvents": [\n'
    separator = ""
    for event in document["traceEvents"]:
        yield separator + _encode(event)
        separator = ",\n"
    yield "\n]}\n"


def annotate(
    document: ChromeTrace, match: KernelMatch, positions: Mapping[int, int], metadata: Mapping[str, Any]
) -> ChromeTrace:
    """Return a chrome trace with more args in its events, and with `metadata` at the top level under "fvflops".

    `positions` maps the positions of events in the file to their indexes in the run.
    Events get "module" and "phase", and where known "MACs", "FLOPs" (2 per multiply-add and all other operations),
    "FLOP/s" by their device time, else by their CPU time, and "bytes" (memory traffic without cache reuse or fusion).
    The work of an op is divided over its kernels by their time, so that all kernels add up to it.
    """
    kernels, has_modules = divide_work(match), match.trace is not None or any(match.modules)
    events = list(document["traceEvents"])
    for position, event_index in positions.items():
        event, added = events[position], _args_of(match, event_index, kernels, has_modules)
        events[position] = {**event, "args": {**(event.get("args") or {}), **added}}
    return {**document, "fvflops": dict(metadata), "traceEvents": events}


def find_by_id(document: ChromeTrace, match: KernelMatch) -> dict[int, int]:
    """Return position → index of the events of torch.profiler's own export of a run, by their ids."""
    events = match.run.events
    on_cpu = {event.event_id: index for index, event in enumerate(events) if event.kind != "device"}
    on_device = {event.event_id: index for index, event in enumerate(events) if event.kind == "device"}

    def find(event: Mapping[str, Any]) -> int | None:
        args = event.get("args", {})
        category = event.get("cat")
        if category in DEVICE_CATEGORIES:
            return on_device.get(args.get("correlation"))
        external_id = args.get("External id")
        if category not in _HAS_EXTERNAL_ID or external_id is None:
            return None
        # torch.profiler merges an event with its only nested event of the same name.
        for outer_id in range(external_id, external_id - _MAX_NESTING, -1):
            event_index = on_cpu.get(outer_id)
            if event_index is not None:
                return event_index if outer_id == external_id or events[event_index].name == event["name"] else None
        return None

    found = {position: find(event) for position, event in enumerate(document["traceEvents"])}
    return {position: event_index for position, event_index in found.items() if event_index is not None}


def _args_of(match: KernelMatch, event_index: int, kernels: Mapping[int, Work], has_modules: bool) -> dict[str, Any]:
    event = match.run.events[event_index]
    args: dict[str, Any] = {"module": match.modules[event_index]} if has_modules else {}
    args["phase"] = match.phases[event_index]
    work, time = match.work[event_index], event.device_ns or event.duration_ns
    if event.kind == "device":
        work, time = kernels.get(event_index), event.duration_ns
        if event.parent >= 0:
            args["launched by"] = match.run.events[event.parent].name
    if work is not None:
        args |= {"MACs": work.macs, "FLOPs": work.flops}
        if time:
            args["FLOP/s"] = round(work.flops * 1_000_000_000 / time)
    if event_index in match.nbytes:
        args["bytes"] = match.nbytes[event_index]
    if event.before is not None and event.after is not None and event.peak is not None:
        args |= {"memory before": event.before, "memory after": event.after, "memory peak": event.peak}
    return args
