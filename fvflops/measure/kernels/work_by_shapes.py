"""Work of a profiled op by the shapes that torch.profiler recorded (record_shapes=True), without a model."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fvflops.analysis.table_examples import NotRunnable, overloads_of
from fvflops.capture.recorder.tensor_specs import describe_call
from fvflops.counting.count_trace import CostModel
from fvflops.counting.traffic.byte_costs import TrafficCostModel
from fvflops.formulas import FormulaTable
from fvflops.measure.kernels.recorded_calls import Work, work_of
from fvflops.trace import Signature, Status

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


class _Unreadable(ValueError):
    """A recorded argument that is not understood."""


class ShapeCosts:
    """Costs of the op events of a chrome trace by their "Input Dims", "Input type" and "Concrete Inputs".

    A call is repeated on the meta device, for the shapes of its results. An argument that torch.profiler does not
    record, such as a string, has its default. None is the cost of an op without a formula, or of unreadable arguments.

    >>> from fvflops import load_table
    >>> from fvflops.counting import TableCostModel
    >>> table = load_table("exact")
    >>> args = {"Input Dims": [[4, 5], [5, 6]], "Input type": ["float", "float"], "Concrete Inputs": ["", ""]}
    >>> costs = ShapeCosts([("aten::mm", args)], table, TableCostModel(table, "flops"))
    >>> costs.work(0), costs.nbytes(0)
    (Work(macs=120, flops=240), 296)
    """

    def __init__(
        self, events: Sequence[tuple[str, Mapping[str, Any]]], table: FormulaTable, cost_model: CostModel
    ) -> None:
        self._events = events
        self._table = table
        self._cost_model = cost_model
        self._traffic = TrafficCostModel()
        self._signatures: dict[tuple[str, str], Signature | None] = {}

    def work(self, event_index: int) -> Work | None:
        """Return the work of an event; None if unknown."""
        name, args = self._events[event_index]
        row = self._table.row(name)
        if row is None or row.kind == "decompose":
            return None
        signature = self._sign(name, args)
        return None if signature is None else work_of(self._cost_model.op_cost(signature))

    def nbytes(self, event_index: int) -> int | None:
        """Return the bytes that an event reads and writes; None if unknown."""
        signature = self._sign(*self._events[event_index])
        if signature is None:
            return None
        (cost,) = self._traffic.op_cost(signature)
        return None if cost.status is Status.UNSUPPORTED else cost.value

    def _sign(self, name: str, args: Mapping[str, Any]) -> Signature | None:
        if "Input Dims" not in args or "Input type" not in args:
            return None
        inputs = args["Input Dims"], args["Input type"], args.get("Concrete Inputs")
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
    if type == "TensorList":
        return [torch.empty(shape, dtype=_LIST_DTYPE, device="meta") for shape in dims]
    if "Tensor" in kind:
        if type in _DTYPES:
            return torch.empty(dims, dtype=_DTYPES[type], device="meta")
        if kind.startswith("Optional") and type == "":
            return None
        raise _Unreadable(type)
    if type in _DTYPES:
        raise _Unreadable(type)  # a tensor for an argument that is none
    if kind.startswith("Optional[Generator") or kind == "Device" or kind == "Optional[Device]":
        return torch.device("meta") if "Device" in kind else None
    if not text:
        if type == "" and kind.startswith("Optional"):
            return None
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
