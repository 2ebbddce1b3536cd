"""Chrome traces of torch.profiler: read and write the files, and add modules, work and FLOP/s to their events' args."""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fvflops import paths
from fvflops.measure.kernels.kernel_work import divide_work
from fvflops.measure.kernels.matching import KernelMatch
from fvflops.text import parse_json
from fvflops.trace import TraceError
from fvflops.trace.kernel_events import KernelEvent

Document = dict[str, Any]
# Position and args of an event of the file → the index of the event in the run, None if it has none.
FindEvent = Callable[[int, Mapping[str, Any]], "int | None"]

# Categories of the file's events.
DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
_HAS_EXTERNAL_ID = ("cpu_op", "user_annotation")
_KERNEL = re.compile(rb'"cat"\s*:\s*"kernel"')
_GZIP = b"\x1f\x8b"
_MAX_BYTES = 1 << 30  # decompressed; Python needs some ten times as much
_MAX_ITEMS = 1 << 24  # objects and lists: an event has two or three
_MAX_NESTING = 8  # of events with one name
_encode = json.JSONEncoder(separators=(",", ":")).encode


def read_document(path: str) -> Document:
    """Return a chrome trace, a .json or .json.gz file; one that is not raises TraceError.

    A file may also be the list of events alone.
    """
    try:
        # Names of kernels and ops may contain control characters, and bytes that are not UTF-8.
        document = parse_json(_read(path).decode("utf-8", "backslashreplace"), strict=False)
    except ValueError as error:
        raise TraceError(f"{path} is not a chrome trace: {error}") from None
    if isinstance(document, list):
        document = {"traceEvents": document}
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        raise TraceError(f'{path} is not a chrome trace: it has no "traceEvents"')
    if not all(isinstance(event, dict) for event in document["traceEvents"]):
        raise TraceError(f'{path} is not a chrome trace: an item of "traceEvents" is not an object')
    return document


def has_kernels(path: str) -> bool:
    """Return whether a chrome trace has events of category "kernel"."""
    return _KERNEL.search(_read(path)) is not None


def _read(path: str) -> bytes:
    """Return the contents of a file, decompressed if it is compressed by gzip."""
    data = paths.read_bytes(path)
    if data.startswith(_GZIP):
        try:
            with gzip.open(io.BytesIO(data)) as file:
                data = file.read(_MAX_BYTES + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise TraceError(f"{path} cannot be decompressed: {error}") from None
    if len(data) > _MAX_BYTES or data.count(b"{") + data.count(b"[") > _MAX_ITEMS or data.count(b",") > 8 * _MAX_ITEMS:
        raise TraceError(
            f"{path}: a chrome trace has at most {_MAX_BYTES:,} bytes and {_MAX_ITEMS:,} objects, and this has more: "
            "profile fewer steps"
        )
    return data


def write_document(document: Document, path: str) -> None:
    """Write a chrome trace, compressed if the path ends with .gz."""
    if path.endswith(".gz"):
        paths.write_bytes(path, gzip.compress("".join(_lines(document)).encode(), compresslevel=6))
    else:
        paths.write_text(path, _lines(document))


def _lines(document: Document) -> Iterator[str]:
    yield "{\n"
    for key, value in document.items():
        if key != "traceEvents":
            yield f"{_encode(key)}: {_encode(value)},\n"
    yield '"traceEvents": [\n'
    separator = ""
    for event in document["traceEvents"]:
        yield separator + _encode(event)
        separator = ",\n"
    yield "\n]}\n"


def annotate(document: Document, match: KernelMatch, find: FindEvent, metadata: Mapping[str, Any]) -> Document:
    """Return a chrome trace with more args in its events, and with `metadata` at the top level under "fvflops".

    Events get "module" and "phase", and where known "MACs", "FLOPs" (2 per multiply-add and all other operations),
    "FLOP/s" by their device time, else by their CPU time, and "bytes" (memory traffic without cache reuse or fusion).
    The work of an op is divided over its kernels by their time, so that those of all kernels add up.

    >>> from fvflops.measure.kernels.recorded_calls import Work
    >>> from fvflops.trace.kernel_events import KernelLedger, KernelRun
    >>> run = KernelRun((KernelEvent("aten::mm", "op", duration_ns=1000),))
    >>> match = KernelMatch(run, ("fc",), ("forward",), (0,), (Work(3, 6),), (Work(3, 6),), {}, KernelLedger())
    >>> annotated = annotate({"traceEvents": [{"name": "aten::mm"}]}, match, lambda position, event: 0, {})
    >>> annotated["traceEvents"][0]["args"]
    {'module': 'fc', 'phase': 'forward', 'MACs': 3, 'FLOPs': 6, 'FLOP/s': 6000000}
    """
    args = _EventArgs(match)
    events = []
    for position, event in enumerate(document["traceEvents"]):
        event_index = find(position, event)
        added = {} if event_index is None else args.of(event_index)
        events.append({**event, "args": {**event.get("args", {}), **added}} if added else event)
    return {**document, "fvflops": dict(metadata), "traceEvents": events}


def find_by_id(match: KernelMatch) -> FindEvent:
    """Return a function that finds the events of torch.profiler's own export of a run, by their ids."""
    events = match.run.events
    on_cpu = {event.event_id: index for index, event in enumerate(events) if event.kind != "device"}
    on_device = {event.event_id: index for index, event in enumerate(events) if event.kind == "device"}

    def find(_: int, event: Mapping[str, Any]) -> int | None:
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

    return find


class _EventArgs:
    """The args that are added to each event of a chrome trace."""

    def __init__(self, match: KernelMatch) -> None:
        self._match = match
        self._kernels = divide_work(match)
        self._has_modules = match.trace is not None or any(match.modules)

    def of(self, event_index: int) -> dict[str, Any]:
        """Return the args of an event."""
        match = self._match
        event = match.run.events[event_index]
        args: dict[str, Any] = {"module": match.modules[event_index]} if self._has_modules else {}
        args["phase"] = match.phases[event_index]
        work, time = match.work[event_index], event.device_ns or event.duration_ns
        if event.kind == "device":
            work, time = self._kernels.get(event_index), event.duration_ns
            if event.parent >= 0:
                args["launched by"] = match.run.events[event.parent].name
        if work is not None:
            args |= {"MACs": work.macs, "FLOPs": work.flops}
            if time:
                args["FLOP/s"] = round(work.flops * 1_000_000_000 / time)
        if event_index in match.nbytes:
            args["bytes"] = match.nbytes[event_index]
        return args | _list_memory(event)


def _list_memory(event: KernelEvent) -> dict[str, int]:
    if event.before is None or event.after is None or event.peak is None:
        return {}
    return {"memory before": event.before, "memory after": event.after, "memory peak": event.peak}
