"""Chrome traces of torch.profiler: read and write the files, and add modules, work and FLOP/s to their events' args."""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fvflops import paths
from fvflops.capture.instrument.torch_profiler import kind_of_range, module_of_range
from fvflops.measure.kernels.kernel_sums import divide_work
from fvflops.measure.kernels.matching import KernelMatch
from fvflops.measure.kernels.recorded_calls import Work
from fvflops.text import parse_json
from fvflops.trace import TraceError
from fvflops.trace.kernel_events import KernelEvent, KernelRun

ChromeTrace = dict[str, Any]

# Categories of the file's events.
DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
_HAS_EXTERNAL_ID = ("cpu_op", "user_annotation")
_KERNEL = re.compile(rb'"cat"\s*:\s*"kernel"')
_GZIP = b"\x1f\x8b"
_MAX_BYTES = 1 << 30  # decompressed; Python needs some ten times as much
_MAX_ITEMS = 1 << 24  # objects and lists: an event has two or three
_MAX_NESTING = 8  # of events with one name
_encode = json.JSONEncoder(separators=(",", ":")).encode


def read_document(path: str) -> ChromeTrace:
    """Return a chrome trace or its list of events, from .json or .json.gz; any other file raises TraceError."""
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
    return _KERNEL.search(_read(path)) is not None


def _read(path: str) -> bytes:
    data = paths.read_bytes(path)
    if data.startswith(_GZIP):
        try:
            with gzip.open(io.BytesIO(data)) as file:
                data = file.read(_MAX_BYTES + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise TraceError(f"{path} cannot be decompressed: {error}") from None
    if len(data) > _MAX_BYTES or data.count(b"{") + data.count(b"[") > _MAX_ITEMS or data.count(b",") > 8 * _MAX_ITEMS:
        most = f"at most {_MAX_BYTES:,} bytes and {_MAX_ITEMS:,} objects"
        raise TraceError(f"{path}: a chrome trace has {most}, and this has more: profile fewer steps")
    return data


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
        events[position] = {**event, "args": {**event.get("args", {}), **added}}
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


_CPU_CATEGORIES = ("cpu_op", "user_annotation", "python_function", "cuda_runtime", "cuda_driver", "xpu_runtime")
_ROUNDING_NS = 10  # times are decimal numbers of µs
# Types of inputs that are not tensors, in "Input type".
_NOT_TENSORS = ("", "Scalar", "ScalarList", "GenericList")


@dataclass(frozen=True, slots=True)
class TraceEvents:
    """The run that a chrome trace records.

    `positions` maps the position of an event in the file to its index in the run. `rank` is the rank of a
    distributed process, None for any other. `has_shapes` is whether the profile had record_shapes=True. `graph_kernels`
    are the indexes of the kernels that a CUDA or HIP graph launched.
    """

    run: KernelRun
    positions: Mapping[int, int]
    rank: int | None = None
    has_shapes: bool = False
    graph_kernels: frozenset[int] = frozenset()


@dataclass(slots=True)
class _Span:
    """An event of the file, in nanoseconds from the first one."""

    position: int
    raw: Mapping[str, Any]
    start: int
    end: int
    thread: int
    parent: int = -1  # its index in the ordered events
    children_ns: int = 0
    device_ns: int = 0
    self_device_ns: int = 0


def read_events(document: ChromeTrace) -> TraceEvents:
    """Return the events of a chrome trace, nested by thread and time.

    A kernel belongs to the op with its "External id", else to the one that ran when it was launched. A trace without
    op events raises TraceError.
    """
    raw_events = document["traceEvents"]
    complete = [item for item in enumerate(raw_events) if item[1].get("ph") == "X" and "ts" in item[1]]
    cpu = [item for item in complete if item[1].get("cat") in _CPU_CATEGORIES]
    if not any(event.get("cat") == "cpu_op" for _, event in cpu):
        raise TraceError("the trace has no op events: pass one that torch.profiler wrote with ProfilerActivity.CPU")
    begin = min(event["ts"] for _, event in complete)
    threads: dict[tuple[Any, Any], int] = {}

    def span(position: int, event: Mapping[str, Any]) -> _Span:
        thread = threads.setdefault((event.get("pid"), event.get("tid")), len(threads) + 1)
        start = round((event["ts"] - begin) * 1000)
        return _Span(position, event, start, start + round(event.get("dur", 0) * 1000), thread)

    ordered = _nest([span(*item) for item in cpu])
    device = [span(*item) for item in complete if item[1].get("cat") in DEVICE_CATEGORIES]
    device.sort(key=lambda item: item.start)
    from_graphs = _link(ordered, device)
    forward_threads = _find_forward_threads(raw_events, ordered, threads)
    spans = ordered + device
    events = [_read_span(item, forward_threads) for item in spans]
    info = document.get("distributedInfo")
    rank = info.get("rank") if isinstance(info, dict) else None
    return TraceEvents(
        KernelRun(tuple(events), "cuda" if device else ""),
        {item.position: index for index, item in enumerate(spans)},
        rank if isinstance(rank, int) else None,
        any("Input Dims" in event.get("args", {}) for _, event in cpu),
        frozenset(len(ordered) + index for index in from_graphs),
    )


def _nest(spans: list[_Span]) -> list[_Span]:
    """Return the events of all threads by start, parents first, each with its parent."""
    spans.sort(key=lambda item: (item.start, -item.end, item.position))
    open_spans: dict[int, list[int]] = {}
    for index, item in enumerate(spans):
        stack = open_spans.setdefault(item.thread, [])
        while stack and not _encloses(spans[stack[-1]], item):
            stack.pop()
        if stack:
            item.parent = stack[-1]
            spans[item.parent].children_ns += item.end - item.start
        stack.append(index)
    return spans


def _encloses(outer: _Span, inner: _Span) -> bool:
    """Return whether an event is nested in one that does not start later."""
    return (inner.start < outer.end or inner.start == outer.start) and inner.end <= outer.end + _ROUNDING_NS


def _link(cpu: Sequence[_Span], device: Sequence[_Span]) -> list[int]:
    """Set the parents of device events, and the device times of ops that launched them; return the events of graphs."""
    ops: dict[int, int] = {}
    launches: dict[int, int] = {}
    graphs: set[int] = set()
    for index, item in enumerate(cpu):
        args = item.raw.get("args", {})
        if item.raw["cat"] in ("cpu_op", "user_annotation"):
            if "External id" in args:
                ops.setdefault(args["External id"], index)
        elif "correlation" in args:
            launches.setdefault(args["correlation"], item.parent)
            if "GraphLaunch" in item.raw["name"]:
                graphs.add(args["correlation"])
    for item in device:
        args = item.raw.get("args", {})
        item.parent = ops.get(args.get("External id"), launches.get(args.get("correlation"), -1))
        item.device_ns = item.self_device_ns = item.end - item.start
        owner = item.parent
        if owner >= 0:
            cpu[owner].self_device_ns += item.device_ns
        while owner >= 0:
            cpu[owner].device_ns += item.device_ns
            owner = cpu[owner].parent
    return [index for index, item in enumerate(device) if item.raw.get("args", {}).get("correlation") in graphs]


def _find_forward_threads(
    raw_events: Sequence[Mapping[str, Any]], ordered: Sequence[_Span], threads: Mapping[tuple[Any, Any], int]
) -> dict[int, int]:
    """Return "Fwd thread id", which is torch's own number → the thread, from the arrows of forward to backward ops."""

    def thread_of(event: Mapping[str, Any]) -> int:
        return threads.get((event.get("pid"), event.get("tid")), 0)

    arrows = [event for event in raw_events if event.get("cat") == "fwdbwd" and "id" in event]
    starts = {event["id"]: thread_of(event) for event in arrows if event.get("ph") == "s"}
    linked = [event for event in arrows if event.get("ph") == "f" and event["id"] in starts]
    ends = {(thread_of(event), event["ts"]): starts[event["id"]] for event in linked}
    found: dict[int, int] = {}
    for item in ordered:
        number = item.raw.get("args", {}).get("Fwd thread id", 0)
        thread = ends.get((item.thread, item.raw["ts"]))
        if number and thread is not None:
            found.setdefault(number, thread)
    return found


def _read_span(item: _Span, forward_threads: Mapping[int, int]) -> KernelEvent:
    raw, args = item.raw, item.raw.get("args", {})
    name = str(raw.get("name", ""))
    category, duration = raw["cat"], item.end - item.start
    is_device = category in DEVICE_CATEGORIES
    dims = args.get("Input Dims")
    module = None if is_device or category == "python_function" else module_of_range(name)
    return KernelEvent(
        name=name,
        kind="device" if is_device else "module" if module is not None else _kind(name, category),
        event_id=args.get("External id", 0),
        parent=item.parent,
        start_ns=item.start,
        duration_ns=duration,
        thread=item.thread,
        sequence=args.get("Sequence number", -1),
        forward_thread=forward_threads.get(args.get("Fwd thread id", 0), 0),
        module=module or "",
        self_ns=0 if is_device else duration - item.children_ns,
        device_ns=item.device_ns,
        self_device_ns=item.self_device_ns,
        shapes="" if dims is None else str(dims),
        tensor_shapes=None if dims is None else _list_shapes(dims, args.get("Input type", ())),
    )


def _kind(name: str, category: str) -> str:
    if category == "python_function":
        return "python"
    others = "range" if category == "user_annotation" else "op" if category == "cpu_op" and "::" in name else "other"
    return kind_of_range(name) or others


def _list_shapes(dims: Sequence[Any], types: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the input tensors without scalars, lists of tensors flattened.

    A scalar may be a number that was converted to a tensor.

    >>> _list_shapes([[2, 3], [], [[4], [5]], []], ["float", "Scalar", "TensorList", "double"])
    ((2, 3), (4,), (5,))
    """
    shapes: list[tuple[int, ...]] = []
    for value, type in zip(dims, types, strict=False):
        if type == "TensorList":
            shapes += [tuple(shape) for shape in value]
        elif type not in _NOT_TENSORS:
            shapes.append(tuple(value))
    return tuple(shape for shape in shapes if shape)
