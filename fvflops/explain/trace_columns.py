"""The events of a chrome trace as columns: spans of the host, nested by thread, and activities of the GPU."""

from __future__ import annotations

import marshal
from array import array
from bisect import bisect_right
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch

from fvflops.measure.kernels.profiler_trace import TraceStream
from fvflops.trace import TraceError

# Kinds of spans of the host, and of activities of the GPU.
OP, RANGE, PYTHON, RUNTIME = range(4)
KERNEL, MEMCPY, MEMSET = range(3)
# Category of the file → kind; older releases of torch have capital letters.
_HOST = {
    **dict.fromkeys(("cpu_op", "operator"), OP),
    "user_annotation": RANGE,
    "python_function": PYTHON,
    **dict.fromkeys(("cuda_runtime", "cuda_driver", "hip_runtime", "xpu_runtime", "runtime"), RUNTIME),
}
_DEVICE = {"kernel": KERNEL, "gpu_memcpy": MEMCPY, "memcpy": MEMCPY, "gpu_memset": MEMSET, "memset": MEMSET}
_INPUTS = ("Input Dims", "Input type", "Concrete Inputs")
# Arguments of an activity that are kept, with their types: of collectives, copies and graphs.
_KEPT = {
    "Collective name": str,
    **dict.fromkeys(("In msg nelems", "Out msg nelems"), int),
    "dtype": str,
    "Group size": int,
    **dict.fromkeys(("Process Group Name", "Process Group Description"), str),
    **dict.fromkeys(("bytes", "graph id"), int),
}
_Fields = Mapping[str, Any]
_ROUNDING_NS = 10  # times are decimal numbers of µs


class Interned:
    """Values by number, each once."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._numbers: dict[Hashable, int] = {}

    def number(self, value: Any, key: Hashable = None) -> int:
        """Return the number of a value, by `key` if it is not hashable."""
        key = value if key is None else key
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.values)
            self.values.append(value)
        return number

    def __getitem__(self, number: int) -> Any:
        return self.values[number]

    def __len__(self) -> int:
        return len(self.values)


def _integers() -> array[int]:
    return array("q")


def _small() -> array[int]:
    return array("i")


@dataclass(slots=True)
class HostSpans:
    """Spans of the host by thread and start, parents first; times are nanoseconds from the trace's first event.

    `position` is an event's in the file. `kind` is OP, RANGE, PYTHON or RUNTIME. `parent` is the span around and `op`
    the innermost op, the span itself included, as indexes, -1 for none. `inputs` is a number of `TraceColumns.inputs`,
    -1 without shapes. `forward_thread` is torch's own number of the thread of a backward op's forward op.
    """

    position: array[int] = field(default_factory=_small)
    start: array[int] = field(default_factory=_integers)
    end: array[int] = field(default_factory=_integers)
    name: array[int] = field(default_factory=_small)
    kind: array[int] = field(default_factory=_small)
    thread: array[int] = field(default_factory=_small)
    inputs: array[int] = field(default_factory=_small)
    external: array[int] = field(default_factory=_integers)
    correlation: array[int] = field(default_factory=_integers)
    sequence: array[int] = field(default_factory=_integers)
    forward_thread: array[int] = field(default_factory=_integers)
    parent: array[int] = field(default_factory=_small)
    op: array[int] = field(default_factory=_small)

    def __len__(self) -> int:
        return len(self.start)

    def ancestors(self, index: int) -> Iterator[int]:
        """Yield a span and the spans around it, innermost first."""
        while index >= 0:
            yield index
            index = self.parent[index]

    def thread_range(self, thread: int) -> tuple[int, int]:
        """Return the first index of a thread's spans, and the one after the last."""
        return bisect_right(self.thread, thread - 1), bisect_right(self.thread, thread)

    def pieces(self, thread: int, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield (start, end, innermost span) for all of a time of a thread; the span is -1 where none is open."""
        first, stop = self.thread_range(thread)
        following = bisect_right(self.start, start, first, stop)
        span = self._open_at(following - 1 if following > first else -1, start)
        while start < end:
            opens = self.start[following] if following < stop else end
            closes = self.end[span] if span >= 0 else end
            piece_end = min(opens, closes, end)
            if piece_end > start:
                yield start, piece_end, span
            start = max(start, piece_end)
            if opens <= piece_end and following < stop:
                span, following = following, following + 1
            span = self._open_at(span, start)

    def _open_at(self, span: int, time: int) -> int:
        while span >= 0 and self.end[span] <= time:
            span = self.parent[span]
        return span


@dataclass(slots=True)
class Activities:
    """Kernels, copies and fills of the GPU by start; positions and times as in HostSpans.

    `kind` is KERNEL, MEMCPY or MEMSET, `stream` a number of `TraceColumns.streams`, `details` of
    `TraceColumns.details`. `launch` is the runtime call that launched it, `op` the op around, -1 where unknown.
    """

    position: array[int] = field(default_factory=_small)
    start: array[int] = field(default_factory=_integers)
    end: array[int] = field(default_factory=_integers)
    name: array[int] = field(default_factory=_small)
    kind: array[int] = field(default_factory=_small)
    stream: array[int] = field(default_factory=_small)
    details: array[int] = field(default_factory=_small)
    external: array[int] = field(default_factory=_integers)
    correlation: array[int] = field(default_factory=_integers)
    launch: array[int] = field(default_factory=_small)
    op: array[int] = field(default_factory=_small)

    def __len__(self) -> int:
        return len(self.start)


@dataclass(slots=True)
class TraceColumns:
    """A chrome trace in columns, with its names, threads, streams and recorded arguments by number.

    `inputs` are an op's arguments as recorded, `header` the values of the file besides the events, `origin_ns` the
    first event's time. `unreadable` are events with invalid values, such as a missing time, `negative` events with a
    negative duration, taken as 0.
    """

    path: str
    host: HostSpans = field(default_factory=HostSpans)
    gpu: Activities = field(default_factory=Activities)
    names: Interned = field(default_factory=Interned)
    threads: Interned = field(default_factory=Interned)
    streams: Interned = field(default_factory=Interned)
    inputs: Interned = field(default_factory=Interned)
    details: Interned = field(default_factory=Interned)
    header: Mapping[str, Any] = field(default_factory=dict)
    origin_ns: int = 0
    unreadable: int = 0
    negative: int = 0

    @property
    def rank(self) -> int | None:
        """Rank of the process, None if it was not distributed."""
        info = self.header.get("distributedInfo")
        rank = info.get("rank") if isinstance(info, dict) else None
        return rank if isinstance(rank, int) else None

    @property
    def device_name(self) -> str:
        """Name of the GPU, "" if it is not recorded."""
        devices = self.header.get("deviceProperties")
        devices = devices if isinstance(devices, list) else []
        names = [device.get("name") for device in devices if isinstance(device, dict)]
        return next((name for name in names if isinstance(name, str) and name), "")


def read_columns(path: str) -> TraceColumns:
    """Return a chrome trace in columns; another file, or one without ops and kernels, raises TraceError."""
    stream = TraceStream(path)
    columns = collect_columns(path, stream)
    if not len(columns.gpu) and OP not in columns.host.kind:
        raise TraceError(f"{path} has neither ops nor kernels: pass a trace that torch.profiler wrote")
    columns.header = stream.header
    return columns


def collect_columns(path: str, events: Iterable[Mapping[str, Any]]) -> TraceColumns:
    """Return the events of a chrome trace in columns, without its header."""
    columns = TraceColumns(path)
    for position, event in enumerate(events):
        if event.get("ph") == "X":
            _add(columns, event, position)
    host, gpu = columns.host, columns.gpu
    columns.origin_ns = min(chain(host.start, gpu.start), default=0)
    _sort(host, ("thread", "start", "-end"), columns.origin_ns)
    _sort(gpu, ("start",), columns.origin_ns)
    _nest(host)
    _link(columns)
    return columns


def _add(columns: TraceColumns, event: _Fields, position: int) -> None:
    """Add a complete event, if it is an event of the host or the GPU; one with invalid values is unreadable."""
    category = event.get("cat")
    if not isinstance(category, str):
        return
    category = category if category in _HOST or category in _DEVICE else category.lower()
    if category not in _HOST and category not in _DEVICE:
        return
    records, read = (columns.host, _read_span) if category in _HOST else (columns.gpu, _read_activity)
    kind = _HOST[category] if category in _HOST else _DEVICE[category]
    try:
        start, duration = to_nanoseconds(event["ts"]), to_nanoseconds(event.get("dur", 0))
        end = start + max(duration, 0)
        args = event.get("args") or {}
        if not (-(2**62) < start <= end < 2**62 and isinstance(args, dict)):
            raise ValueError("no time, or no arguments")
        name = columns.names.number(str(event.get("name", "")))
        values = position, start, end, name, kind, *read(columns, event, args, kind)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        columns.unreadable += 1
        return
    columns.negative += duration < 0
    for column, value in zip(records.__slots__, values, strict=False):
        getattr(records, column).append(value)


def to_nanoseconds(microseconds: float) -> int:
    """Return a time of a trace as exactly as it is written: since 1970 a product with 1000 would be too long a float.

    >>> to_nanoseconds(1759300000000000.5)
    1759300000000000500
    """
    whole = int(microseconds // 1)
    return whole * 1000 + round((microseconds - whole) * 1000)


def _read_span(columns: TraceColumns, event: _Fields, args: _Fields, kind: int) -> tuple[int, ...]:
    inputs = -1
    if kind <= RANGE and "Input Dims" in args:
        given = tuple(args.get(name) for name in _INPUTS)
        inputs = columns.inputs.number(given, marshal.dumps(given, 2)) if _are_inputs(*given) else -1
    return (
        columns.threads.number(f"{event.get('pid')} {event.get('tid')}"),
        inputs,
        _integer(args, "External id") if kind <= RANGE else -1,
        _integer(args, "correlation") if kind == RUNTIME else -1,
        _integer(args, "Sequence number") if kind == OP else -1,
        _integer(args, "Fwd thread id") if kind == OP else -1,
    )


def _are_inputs(dims: Any, types: Any, concrete: Any) -> bool:
    """Return whether recorded arguments have the form that torch.profiler gives them."""
    lists = all(isinstance(value or [], list) for value in (types, concrete)) and isinstance(dims, list)
    return lists and all(isinstance(dim, list) for dim in dims) and all(isinstance(name, str) for name in types or ())


def _read_activity(columns: TraceColumns, event: _Fields, args: _Fields, kind: int) -> tuple[int, ...]:
    device, queue = args.get("device", event.get("pid")), args.get("stream", event.get("tid"))
    kept = tuple((key, args[key]) for key, type in _KEPT.items() if isinstance(args.get(key), type))
    return (
        columns.streams.number(f"{device} {queue}"),
        columns.details.number(dict(kept), marshal.dumps(kept, 2)) if kept else -1,
        _integer(args, "External id"),
        _integer(args, "correlation"),
    )


def _integer(args: Mapping[str, Any], key: str) -> int:
    value = args.get(key, -1)
    return value if isinstance(value, int) and -(2**63) <= value < 2**63 else -1


def _tensor(column: array[int]) -> torch.Tensor:
    return torch.frombuffer(column, dtype=torch.int64 if column.typecode == "q" else torch.int32)


def _from_tensor(values: torch.Tensor, typecode: str) -> array[int]:
    column = array(typecode, bytes(values.numel() * values.element_size()))
    torch.frombuffer(column, dtype=values.dtype).copy_(values)
    return column


def _sort(records: HostSpans | Activities, keys: Sequence[str], origin: int) -> None:
    """Sort all columns by some, the first key first, "-" for descending, and let times count from `origin`."""
    if not len(records):
        return
    order = torch.arange(len(records))
    for key in reversed(keys):
        values = _tensor(getattr(records, key.removeprefix("-")))[order]
        order = order[torch.sort(values, descending=key.startswith("-"), stable=True).indices]
    for name in records.__slots__:
        column: array[int] = getattr(records, name)
        if len(column):
            values = _tensor(column)[order] - (origin if name in ("start", "end") else 0)
            setattr(records, name, _from_tensor(values, column.typecode))


def _nest(host: HostSpans) -> None:
    """Set the parents of spans, and the innermost ops."""
    start, end, thread, kind = host.start, host.end, host.thread, host.kind
    parents, ops = array("i", [-1]) * len(host), array("i", [-1]) * len(host)
    stack: list[int] = []
    current = -1
    for index in range(len(host)):
        if thread[index] != current:
            current = thread[index]
            stack.clear()
        begin, stop = start[index], end[index] - _ROUNDING_NS
        while stack and not (begin < end[stack[-1]] or begin == start[stack[-1]]):
            stack.pop()
        while stack and stop > end[stack[-1]]:
            stack.pop()
        if stack:
            parents[index] = stack[-1]
        ops[index] = index if kind[index] == OP else ops[stack[-1]] if stack else -1
        stack.append(index)
    host.parent, host.op = parents, ops


def _link(columns: TraceColumns) -> None:
    """Set the runtime call and the op that launched each activity."""
    host, gpu = columns.host, columns.gpu
    wanted, ids = set(gpu.correlation), set(gpu.external)
    launches: dict[int, int] = {}
    ops: dict[int, int] = {}
    if len(gpu):
        for index, kind in enumerate(host.kind):
            if kind == RUNTIME:
                if host.correlation[index] in wanted:
                    launches.setdefault(host.correlation[index], index)
            elif kind == OP and host.external[index] in ids:
                ops.setdefault(host.external[index], index)
    for missing in (launches, ops):
        missing.pop(-1, None)
    gpu.launch = array("i", [launches.get(number, -1) for number in gpu.correlation])
    gpu.op = array("i", [-1]) * len(gpu)
    for index, launch in enumerate(gpu.launch):
        op = ops.get(gpu.external[index], -1)
        gpu.op[index] = host.op[launch] if op < 0 and launch >= 0 else op
