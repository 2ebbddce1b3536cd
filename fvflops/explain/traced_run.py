"""Events of a chrome trace as a run of torch.profiler, nested and linked with their kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fvflops.capture.instrument.torch_profiler import kind_of_range, module_of_range
from fvflops.explain.trace_columns import OP, PYTHON, RANGE, TraceColumns, collect_columns
from fvflops.measure.kernels.profiler_trace import ChromeTrace
from fvflops.trace import TraceError
from fvflops.trace.kernel_events import KernelEvent, KernelRun

# Types of inputs that are not tensors, in "Input type".
_NOT_TENSORS = ("", "Scalar", "ScalarList", "GenericList")


@dataclass(frozen=True, slots=True)
class TracedRun:
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


def read_run(document: ChromeTrace, path: str = "") -> TracedRun:
    """Return the events of a chrome trace by start, parents first, and then its kernels, copies and fills.

    A kernel belongs to the op with its "External id", else to the event around its launch. A trace without op events
    raises TraceError.
    """
    raw_events = document["traceEvents"]
    columns = collect_columns(path, raw_events)
    columns.header = document
    host, gpu = columns.host, columns.gpu
    if OP not in host.kind:
        raise TraceError(
            f"{path}: the trace has no op events: pass one that torch.profiler wrote with ProfilerActivity.CPU"
        )
    spans = sorted(range(len(host)), key=lambda span: (host.start[span], -host.end[span], host.position[span]))
    indexes = {-1: -1, **{span: index for index, span in enumerate(spans)}}
    by_id: dict[int, int] = {}
    children_ns: Counter[int] = Counter()
    for span in spans:
        children_ns[host.parent[span]] += host.end[span] - host.start[span]
        if host.external[span] >= 0:
            by_id.setdefault(host.external[span], span)
    around = [host.parent[launch] if launch >= 0 else -1 for launch in gpu.launch]
    owners = [by_id.get(number, span) for number, span in zip(gpu.external, around, strict=True)]
    device_ns, self_device_ns = Counter[int](), Counter[int]()
    lengths = [end - start for start, end in zip(gpu.start, gpu.end, strict=True)]
    for owner, length in zip(owners, lengths, strict=True):
        self_device_ns[owner] += length
        for span in host.ancestors(owner):
            device_ns[span] += length
    forward_threads = _find_forward_threads(raw_events, columns)
    events = []
    for span in spans:
        event = _read_span(raw_events[host.position[span]], columns, span, forward_threads)
        times = event.duration_ns - children_ns[span], device_ns[span], self_device_ns[span]
        parent = indexes[host.parent[span]]
        events.append(event._replace(parent=parent, self_ns=times[0], device_ns=times[1], self_device_ns=times[2]))
    for kernel, owner in enumerate(owners):
        name, start, length = str(columns.names[gpu.name[kernel]]), gpu.start[kernel], lengths[kernel]
        event = KernelEvent(name, "device", 0, indexes[owner], start, length)
        events.append(event._replace(device_ns=length, self_device_ns=length))
    graphs = {number for number, name in enumerate(columns.names.values) if "GraphLaunch" in str(name)}
    return TracedRun(
        KernelRun(tuple(events), "cuda" if owners else ""),
        {position: index for index, position in enumerate((*map(host.position.__getitem__, spans), *gpu.position))},
        columns.rank,
        any(number >= 0 for number in host.inputs),
        frozenset(
            len(spans) + index for index, launch in enumerate(gpu.launch) if launch >= 0 and host.name[launch] in graphs
        ),
    )


def _find_forward_threads(raw_events: Sequence[Mapping[str, Any]], columns: TraceColumns) -> dict[int, int]:
    """Return "Fwd thread id", which is torch's own number → the thread, from the arrows of forward to backward ops."""

    def thread_of(event: Mapping[str, Any]) -> int:
        return columns.threads.number((event.get("pid"), event.get("tid"))) + 1

    arrows = [event for event in raw_events if event.get("cat") == "fwdbwd" and "id" in event]
    starts = {event["id"]: thread_of(event) for event in arrows if event.get("ph") == "s"}
    linked = [event for event in arrows if event.get("ph") == "f" and event["id"] in starts]
    ends = {(thread_of(event), event["ts"]): starts[event["id"]] for event in linked}
    found: dict[int, int] = {}
    for position in columns.host.position if ends else ():
        event = raw_events[position]
        number, thread = event.get("args", {}).get("Fwd thread id", 0), ends.get((thread_of(event), event["ts"]))
        if number and thread is not None:
            found.setdefault(number, thread)
    return found


def _read_span(
    raw: Mapping[str, Any], columns: TraceColumns, span: int, forward_threads: Mapping[int, int]
) -> KernelEvent:
    """Return an event of the host, without its parent and the times of other events."""
    host, args, name = columns.host, raw.get("args", {}), str(raw.get("name", ""))
    dims = args.get("Input Dims")
    module = None if host.kind[span] == PYTHON else module_of_range(name)
    return KernelEvent(
        name=name,
        kind=_kind(name, host.kind[span]) if module is None else "module",
        event_id=args.get("External id", 0),
        start_ns=host.start[span],
        duration_ns=host.end[span] - host.start[span],
        thread=host.thread[span] + 1,
        sequence=args.get("Sequence number", -1),
        forward_thread=forward_threads.get(args.get("Fwd thread id", 0), 0),
        module=module or "",
        shapes="" if dims is None else str(dims),
        tensor_shapes=None if dims is None else _list_shapes(dims, args.get("Input type", ())),
    )


def _kind(name: str, kind: int) -> str:
    if kind == PYTHON:
        return "python"
    return kind_of_range(name) or ("range" if kind == RANGE else "op" if kind == OP and "::" in name else "other")


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
