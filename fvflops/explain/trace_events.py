"""Events of a chrome trace as a run of torch.profiler, nested and linked with their kernels."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fvflops.capture.instrument.torch_profiler import kind_of_range, module_of_range
from fvflops.explain.trace_columns import OP, PYTHON, RANGE, TraceColumns, collect_columns, to_nanoseconds
from fvflops.measure.kernels.profiler_trace import ChromeTrace
from fvflops.measure.kernels.recorded_calls import Inputs
from fvflops.trace import TraceError
from fvflops.trace.kernel_events import KernelEvent, KernelRun

# Types of inputs that are not tensors, in "Input type".
_NOT_TENSORS = ("", "Scalar", "ScalarList", "GenericList")


@dataclass(frozen=True, slots=True)
class TraceEvents:
    """The run that a chrome trace records.

    `positions` maps the position of an event in the file to its index in the run. `rank` is the rank of a distributed
    process, None for any other. `inputs` are each event's name and recorded arguments, () without shapes.
    `graph_kernels` are the indexes of the kernels that a CUDA or HIP graph launched, `unreadable` is the number of
    events with invalid values.
    """

    run: KernelRun
    positions: Mapping[int, int]
    rank: int | None
    inputs: tuple[tuple[str, Inputs], ...]
    graph_kernels: frozenset[int]
    unreadable: int

    @property
    def has_shapes(self) -> bool:
        """Whether the profile had record_shapes=True."""
        return any(inputs for _, inputs in self.inputs)


def read_events(document: ChromeTrace, path: str = "") -> TraceEvents:
    """Return the events of a chrome trace by start, parents first, and then its kernels, copies and fills.

    A kernel belongs to the op with its "External id", else to the event around its launch. A trace without op events
    raises TraceError.
    """
    columns = collect_columns(path, document["traceEvents"])
    columns.header = document
    host, gpu = columns.host, columns.gpu
    if OP not in host.kind:
        raise TraceError(
            f"{path}: the trace has no op events: pass one that torch.profiler wrote with ProfilerActivity.CPU"
        )
    spans = sorted(range(len(host)), key=lambda span: (host.start[span], -host.end[span], host.position[span]))
    indexes = {-1: -1, **{span: index for index, span in enumerate(spans)}}
    children_ns: Counter[int] = Counter()
    for span in spans:
        children_ns[host.parent[span]] += host.end[span] - host.start[span]
    by_id = {host.external[span]: span for span in reversed(spans) if host.external[span] >= 0}  # the first of an id
    around = [host.parent[launch] if launch >= 0 else -1 for launch in gpu.launch]
    owners = [by_id.get(number, span) for number, span in zip(gpu.external, around, strict=True)]
    device_ns, self_device_ns = Counter[int](), Counter[int]()
    lengths = [end - start for start, end in zip(gpu.start, gpu.end, strict=True)]
    kernels = []
    for owner, name, start, length in zip(owners, gpu.name, gpu.start, lengths, strict=True):
        times: dict[str, Any] = dict.fromkeys(("duration_ns", "device_ns", "self_device_ns"), length)
        kernels.append(KernelEvent(columns.names[name], "device", 0, indexes[owner], start, **times))
        self_device_ns[owner] += length
        for span in host.ancestors(owner):
            device_ns[span] += length
    forward_threads = _find_forward_threads(document["traceEvents"], columns, spans)
    events = [
        _read_span(
            *(columns, span, forward_threads),
            parent=indexes[host.parent[span]],
            self_ns=host.end[span] - host.start[span] - children_ns[span],
            device_ns=device_ns[span],
            self_device_ns=self_device_ns[span],
        )
        for span in spans
    ]
    graphs = {number for number, name in enumerate(columns.names.values) if "GraphLaunch" in name}
    inputs = [columns.inputs[host.inputs[span]] if host.inputs[span] >= 0 else () for span in spans]
    return TraceEvents(
        KernelRun((*events, *kernels), "cuda" if owners else ""),
        {position: index for index, position in enumerate((*map(host.position.__getitem__, spans), *gpu.position))},
        columns.rank,
        (*zip([event.name for event in events], inputs, strict=True), *[(event.name, ()) for event in kernels]),
        frozenset(
            at for at, launch in enumerate(gpu.launch, len(spans)) if launch >= 0 and host.name[launch] in graphs
        ),
        columns.unreadable,
    )


def _find_forward_threads(
    raw_events: Sequence[Mapping[str, Any]], columns: TraceColumns, spans: Sequence[int]
) -> dict[int, int]:
    """Return "Fwd thread id", which is torch's own number → the thread, from the arrows of forward to backward ops."""
    starts: dict[Any, int] = {}
    ends: dict[tuple[int, int], Any] = {}
    for event in raw_events:
        arrow, time = event.get("id"), event.get("ts")
        is_arrow = event.get("cat") == "fwdbwd" and isinstance(arrow, (int, str))
        if is_arrow and isinstance(time, (int, float)) and math.isfinite(time):
            thread = columns.threads.number(f"{event.get('pid')} {event.get('tid')}")
            if event.get("ph") == "s":
                starts[arrow] = thread
            elif event.get("ph") == "f":
                ends[thread, to_nanoseconds(time) - columns.origin_ns] = arrow
    host, found = columns.host, dict[int, int]()
    for span in spans:
        number, forward = host.forward_thread[span], starts.get(ends.get((host.thread[span], host.start[span])))
        if number > 0 and forward is not None:
            found.setdefault(number, forward)
    return found


def _read_span(columns: TraceColumns, span: int, forward_threads: Mapping[int, int], **others: Any) -> KernelEvent:
    """Return an event of the host; `others` are the fields that depend on other events."""
    host, name = columns.host, columns.names[columns.host.name[span]]
    dims, types, _ = columns.inputs[host.inputs[span]] if host.inputs[span] >= 0 else (None, None, None)
    module = None if host.kind[span] == PYTHON else module_of_range(name)
    return KernelEvent(
        name=name,
        kind=_kind(name, host.kind[span]) if module is None else "module",
        event_id=max(host.external[span], 0),
        start_ns=host.start[span],
        duration_ns=host.end[span] - host.start[span],
        thread=host.thread[span] + 1,
        sequence=host.sequence[span],
        forward_thread=1 + forward_threads.get(host.forward_thread[span], -1),
        module=module or "",
        shapes="" if dims is None else str(dims),
        tensor_shapes=None if dims is None else _list_shapes(dims, types or ()),
        **others,
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
