"""Calls with their work: the nested calls of a Trace, and events that torch.profiler recorded with shapes."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from fvflops.analysis.table_examples import NotRunnable, overloads_of
from fvflops.capture.recorder.tensor_specs import describe_call
from fvflops.counting.count_trace import CostModel, find_covered, region_costs
from fvflops.counting.traffic.byte_costs import TrafficCostModel
from fvflops.formulas import FormulaTable, OpCost
from fvflops.trace import Signature, Status, Trace, tensors_in
from fvflops.trace.trace import RegionCall, walk_events


class Work(NamedTuple):
    """Multiply-adds, and FLOPs: 2 per multiply-add and all other operations, whatever the table's `multiply_add`."""

    macs: int = 0
    flops: int = 0

    def __add__(self, other: Work) -> Work:  # type: ignore[override]
        return Work(self.macs + other.macs, self.flops + other.flops)

    def __sub__(self, other: Work) -> Work:
        return Work(self.macs - other.macs, self.flops - other.flops)


NO_WORK = Work()


def add_works(works: Iterable[Work | None]) -> Work | None:
    """Return the sum of the known works, None without any."""
    known = [work for work in works if work is not None]
    return sum(known, NO_WORK) if known else None


def work_of(costs: Sequence[OpCost]) -> Work | None:
    """Return the work of a call by its costs; None if unsupported. The value of a handle is a number of FLOPs.

    >>> work_of([OpCost.in_flops("mm", Status.COUNTED, 1, macs=60, flops=3)])
    Work(macs=60, flops=123)
    """
    supported = [cost for cost in costs if cost.status is not Status.UNSUPPORTED]
    flops = [2 * cost.macs + cost.flops if cost.macs or cost.flops else int(cost.value) for cost in supported]
    return Work(sum(cost.macs for cost in supported), sum(flops)) if supported else None


@dataclass(slots=True)
class RecordedCall:
    """A recorded op call, or a module call with the calls inside it; the outermost is the run itself, "root".

    `trace_index` is the index of its event in the Trace, for a module call of its end. `work` excludes the calls
    inside; None if unsupported. `shapes` are the shapes of an op's input tensors, without scalars.
    """

    kind: str
    name: str
    trace_index: int | None = None
    work: Work | None = NO_WORK
    shapes: tuple[tuple[int, ...], ...] | None = None
    inner: list[RecordedCall] = field(default_factory=list)

    def walk(self) -> Iterator[RecordedCall]:
        """Yield this call and all calls inside it."""
        yield self
        for call in self.inner:
            yield from call.walk()

    def total(self) -> Work:
        return add_works(call.work for call in self.walk()) or NO_WORK


def nest_calls(trace: Trace, cost_model: CostModel) -> RecordedCall:
    """Return the nested calls of a Trace, all threads merged in the order of the Trace.

    Threads of the backward pass run while the calling thread waits; a model's own may run concurrently. The work of a
    region that is not a module is attributed to the enclosing module.
    """
    root = RecordedCall("root", "")
    costs = region_costs(trace, cost_model)
    covered = find_covered(trace, costs)
    shapes = [
        tuple(spec.shape for spec in tensors_in(signature.inputs) if spec.shape) for signature in trace.signatures
    ]
    modules: dict[RegionCall | None, RecordedCall] = {None: root}  # open region → the call of the innermost module
    for kind, event, region_call, index in walk_events(trace):
        is_covered = (event.stack, event.phase) in covered  # by the formula of an enclosing region
        if kind == "op":
            signature = trace.signatures[event.item]
            work = NO_WORK if is_covered else work_of(cost_model.op_cost(signature))
            modules[region_call].inner.append(RecordedCall("op", signature.packet, index, work, shapes[event.item]))
        elif region_call is None:
            continue
        elif kind == "enter":
            region = trace.regions[region_call.region]
            modules[region_call] = parent = modules[region_call.parent]
            if region.kind == "module" and event.kind == "enter":
                modules[region_call] = RecordedCall("module", region.name)
                parent.inner.append(modules[region_call])
        else:
            call = modules.pop(region_call)
            is_module = trace.regions[region_call.region].kind == "module" and region_call.begin.kind == "enter"
            if kind == "exit" and is_module:
                call.trace_index = index
            if kind == "exit" and event.item in costs and not is_covered and not event.raised:
                call.work = add_works([NO_WORK, call.work, work_of(costs[event.item].costs)])
    return root


# "Input type" → dtype; torch.profiler writes the names of C++.
_DTYPES = {
    "float": torch.float32,
    "double": torch.float64,
    "long int": torch.int64,
    "long": torch.int64,
    "int": torch.int32,
    "short": torch.int16,
    "short int": torch.int16,
    "signed char": torch.int8,
    "unsigned char": torch.uint8,
    "bool": torch.bool,
    "c10::Half": torch.float16,
    "c10::BFloat16": torch.bfloat16,
    "c10::Float8_e4m3fn": torch.float8_e4m3fn,
    "c10::Float8_e5m2": torch.float8_e5m2,
    "c10::complex<float>": torch.complex64,
    "c10::complex<double>": torch.complex128,
}
# A list of tensors is recorded without their dtype.
_LIST_DTYPE = torch.float32


# Dimensions, types and values of an op's arguments, None where they were not recorded; () without dimensions.
Inputs = Sequence[Any]


class _Unreadable(ValueError):
    """A recorded argument that is not understood."""


class ShapeCosts:
    """Costs of the op events of a chrome trace by their "Input Dims", "Input type" and "Concrete Inputs".

    A call is repeated on the meta device, for the shapes of its results. An argument that torch.profiler does not
    record, such as a string, has its default. None is the cost of an op without a formula, or of unreadable arguments.
    """

    def __init__(self, events: Sequence[tuple[str, Inputs]], table: FormulaTable, cost_model: CostModel) -> None:
        self._events = events
        self._table = table
        self._cost_model = cost_model
        self._traffic = TrafficCostModel()
        self._signatures: dict[tuple[str, str], Signature | None] = {}

    def work(self, event_index: int) -> Work | None:
        """Return the work of an event; None if unknown."""
        row = self._table.row(self._events[event_index][0])
        signature = None if row is None or row.kind == "decompose" else self.signature(event_index)
        return None if signature is None else work_of(self._cost_model.op_cost(signature))

    def nbytes(self, event_index: int) -> int | None:
        """Return the bytes that an event reads and writes; None if unknown."""
        signature = self.signature(event_index)
        traffic = None if signature is None else self._traffic.op_traffic(signature)
        return None if traffic is None else sum(traffic)

    def signature(self, event_index: int) -> Signature | None:
        """Return the signature of an event's call; None if unknown."""
        name, inputs = self._events[event_index]
        if not inputs or inputs[1] is None:
            return None
        key = name, str(inputs)
        if key not in self._signatures:
            self._signatures[key] = _sign(name, *inputs)
        return self._signatures[key]


def _sign(name: str, dims: Sequence[Any], types: Sequence[str], concrete: Sequence[str] | None) -> Signature | None:
    """Return the signature of a call by the first overload that accepts its arguments, None if there is none."""
    try:
        overloads = overloads_of(name)
    except NotRunnable:
        return None
    for overload in overloads:
        arguments = overload._schema.arguments
        # The out= variant of an op has its results as further arguments.
        if len(types) < len(arguments) or not all(type in _DTYPES for type in types[len(arguments) :]):
            continue
        texts = [""] * len(types) if concrete is None else concrete
        try:
            values = [_read(*item) for item in zip(arguments, dims, types, texts, strict=False)]
            with torch.no_grad():
                named = {argument.name: value for argument, value in zip(arguments, values, strict=True)}
                return describe_call(overload, (), named, overload(**named))
        except (_Unreadable, RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
            continue  # another overload may accept them
    return None


def _read(argument: Any, dims: Any, type: str, text: str) -> Any:
    """Return an argument as recorded; tensors are on the meta device."""
    kind = str(argument.type)
    is_omitted = type == "" and kind.startswith("Optional")
    if type == "TensorList":
        return [torch.empty(shape, dtype=_LIST_DTYPE, device="meta") for shape in dims]
    if "Tensor" in kind and type in _DTYPES:
        return torch.empty(dims, dtype=_DTYPES[type], device="meta")
    if type in _DTYPES or ("Tensor" in kind and not is_omitted):
        raise _Unreadable(type)  # a tensor for an argument that is none, or none for one that is
    if kind in ("Device", "Optional[Device]"):
        return torch.device("meta")
    if kind.startswith("Optional[Generator") or (is_omitted and (not text or "Tensor" in kind)):
        return None
    if not text:
        if argument.has_default_value():
            return argument.default_value
        raise _Unreadable(kind)
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        if kind in ("str", "Optional[str]"):
            return text
        if text in ("inf", "-inf", "nan"):
            return float(text)
        raise _Unreadable(text) from None
