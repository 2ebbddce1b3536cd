"""Count a trace: compute the cost of each distinct signature once, multiply by its number of calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, NamedTuple, Protocol, TypeVar

from fvflops.formulas import OpCost
from fvflops.trace import (
    Counts,
    Entry,
    ModuleInfo,
    Region,
    RegionSignature,
    Signature,
    StopsAt,
    Symbol,
    TensorSpec,
    Trace,
    Value,
    tensors_in,
)
from fvflops.trace.calls import packet_of

Result = TypeVar("Result")

_MAX_SIZE = 1 << 14


class SignatureCache(Generic[Result]):
    """Results by signature object: shape execution reuses them, and hashing one takes longer than most results."""

    def __init__(self) -> None:
        self._items: dict[int, tuple[Signature, Result]] = {}

    def get(self, signature: Signature) -> Result | None:
        item = self._items.get(id(signature))
        return item[1] if item is not None and item[0] is signature else None

    def put(self, signature: Signature, result: Result) -> Result:
        """Keep a result, and return it; where there are too many the others are forgotten."""
        if len(self._items) >= _MAX_SIZE:
            self._items.clear()
        self._items[id(signature)] = signature, result
        return result


class RegionCost(NamedTuple):
    """Cost of one region call; if `exclusive`, the ops inside it are not counted in addition."""

    costs: tuple[OpCost, ...]
    exclusive: bool = True


# Costs of one call, the op's name, its output elements, and its compute dtype.
_CallCost = tuple[tuple[OpCost, ...], str, int, str]


_DESCRIPTIONS: SignatureCache[tuple[str, int, str]] = SignatureCache()


class CostModel(Protocol):
    """Interface for the cost of a call, implemented by tables and by handles.

    `stops_at` are the composite ops that it counts as a whole, which the recording must not decompose;
    `counts_modules` is whether it may count modules as a whole, rather than by the ops in them.
    """

    stops_at: StopsAt = StopsAt()
    counts_modules: bool = False

    def op_cost(self, signature: Signature) -> tuple[OpCost, ...]:
        """Return the cost of one op call, several where a handle returns several labels."""

    def region_cost(self, region: Region, module: ModuleInfo | None, signature: RegionSignature) -> RegionCost | None:
        """Return the cost of one region call, or None to count the ops in it."""
        return None


def count(trace: Trace, cost_model: CostModel, metric: str) -> Counts:
    """Return the counts of one metric over a trace.

    A region with an exclusive cost replaces the ops inside it; the outermost such region wins. The backward pass of
    such a region is counted op by op.
    """
    costs = region_costs(trace, cost_model)
    covered = find_covered(trace, costs)
    scopes = trace.scopes()
    groups = _groups(trace)
    by_signature: dict[int, _CallCost] = {}
    entries: list[Entry] = []
    for (index, stack, phase), calls in trace.calls.items():
        if (stack, phase) in covered:
            continue
        cost = by_signature.get(index)
        if cost is None:
            op = trace.signatures[index]
            cost = by_signature[index] = cost_model.op_cost(op), *_describe(op)
        _add(entries, cost, scopes[stack], phase, calls, groups.get(stack, "") if groups else "")
    for (index, stack, phase), calls in trace.region_calls.items():
        if index not in costs or (stack, phase) in covered:
            continue
        signature = trace.region_signatures[index]
        region = trace.regions[signature.region]
        scope = scopes[stack] + ((region.name,) if region.kind == "module" else ())
        inputs, outputs = signature.inputs, signature.outputs
        dtype = find_dtype("", (), inputs, outputs)
        cost = costs[index].costs, name_region(trace, region), _elements(outputs), dtype
        _add(entries, cost, scope, phase, calls, groups.get(stack, ""))
    return Counts(metric, trace.modules, tuple(entries))


def region_costs(trace: Trace, cost_model: CostModel) -> dict[int, RegionCost]:
    """Return region signature index → cost of one call, for the regions that have a cost."""
    needs_regions = cost_model.counts_modules or any(region.kind == "function" for region in trace.regions)
    called = dict.fromkeys([index for index, _, _ in trace.region_calls]) if needs_regions else ()
    costs: dict[int, RegionCost] = {}
    for index in called:
        signature = trace.region_signatures[index]
        region = trace.regions[signature.region]
        module = trace.modules.by_name[region.name] if region.kind == "module" else None
        if (cost := cost_model.region_cost(region, module, signature)) is not None:
            costs[index] = cost
    return costs


def find_covered(trace: Trace, costs: Mapping[int, RegionCost]) -> set[tuple[int, str]]:
    """Return the (stack, phase) pairs that are counted as part of an enclosing region."""
    covering: dict[str, set[int]] = {}
    for index, _, phase in trace.region_calls:
        if index in costs and costs[index].exclusive:
            covering.setdefault(phase, set()).add(trace.region_signatures[index].region)
    stacks = list(enumerate(trace.stacks))
    pairs = ((phase, set(numbers)) for phase, numbers in covering.items())
    return {(number, phase) for phase, regions in pairs for number, stack in stacks if not regions.isdisjoint(stack)}


def _groups(trace: Trace) -> dict[int, str]:
    """Return stack → parameter group, for the ops of optimizer steps."""
    groups = {index: region.name for index, region in enumerate(trace.regions) if region.kind == "group"}
    if not groups:
        return {}
    return {number: groups[stack[-1]] for number, stack in enumerate(trace.stacks) if stack and stack[-1] in groups}


def name_region(trace: Trace, region: Region) -> str:
    """Return the name under which a region counts: `prim::PythonOp.NAME` of a function, or a module's class."""
    if region.kind == "function":
        return f"prim::PythonOp.{region.name}"
    owner = trace.modules.by_name[region.name]
    return owner.classes[0] if owner.classes else owner.class_name


def _describe(signature: Signature) -> tuple[str, int, str]:
    """Return an op's name, its output elements and its compute dtype, which are the same for every table."""
    description = _DESCRIPTIONS.get(signature)
    if description is None:
        op, inputs, outputs = signature.op, signature.inputs, signature.outputs
        description = signature.packet, _elements(outputs), find_dtype(op, signature.names, inputs, outputs)
        _DESCRIPTIONS.put(signature, description)
    return description


def _elements(outputs: tuple[Value, ...]) -> int:
    if len(outputs) == 1 and isinstance(outputs[0], TensorSpec):
        return outputs[0].numel
    return sum(spec.numel for spec in tensors_in(outputs))


def _add(entries: list[Entry], cost: _CallCost, scope: tuple[str, ...], phase: str, calls: int, group: str) -> None:
    """Append the entries of a signature's calls; the first of several costs has the number of calls, the others 0."""
    costs, op, elements, dtype = cost
    first_calls = calls
    for label, status, value, macs, flops, _, recomputed in costs:
        of_call = scope, phase, op, label, status, first_calls
        sums = value * calls, macs * calls, flops * calls, elements * first_calls
        entries.append(tuple.__new__(Entry, (*of_call, *sums, dtype, group, recomputed * calls)))
        first_calls = 0


# Kernels that multiply int8 by int8 or uint8: their float arguments are scales of the results, or quantised first.
# Sources: bitsandbytes 0.50.2, _ops.py; torchao 0.18.0, ops.py; ATen/native/quantized/cpu (FBGEMM and oneDNN),
# qlinear.cpp and qlinear_dynamic.cpp; ATen/native/QuantizedLinear.cpp. Without the dynamic linear layers of float16
# weights, which FBGEMM multiplies in float32.
_INT8_NAMES = {
    "aten": "_dyn_quant_matmul_4bit _int_mm fbgemm_linear_int8_weight fbgemm_linear_int8_weight_fp32_activation"
    " quantized_gru quantized_lstm",
    "bitsandbytes": "int8_linear_matmul int8_mixed_scaled_mm int8_scaled_mm",
    "quantized": "conv1d_dynamic conv2d_dynamic conv3d_dynamic conv_transpose1d_dynamic conv_transpose2d_dynamic"
    " conv_transpose3d_dynamic linear_dynamic linear_relu_dynamic linear_with_input_q_dq_qweight_dq_output_fp32"
    " linear_with_input_q_dq_qweight_dq_relu_output_fp32 quantized_gru_cell_dynamic quantized_lstm_cell_dynamic"
    " quantized_rnn_relu_cell_dynamic quantized_rnn_tanh_cell_dynamic",
    "torchao": "da8w4_linear_cpu",
}
_INT8 = frozenset(f"{namespace}::{name}" for namespace, names in _INT8_NAMES.items() for name in names.split())
# Their weights may be float16, which FBGEMM multiplies in float32; a GRU's and a cell's arguments do not show it.
_RECURRENT = frozenset({"aten::quantized_lstm"})
_FLOAT16 = Symbol("dtype", "float16")
# The argument that has or is the compute dtype, for ops that take scales of another dtype.
_OPERANDS = {
    "onednn::qconv1d_pointwise": "qx",
    "onednn::qconv2d_pointwise": "qx",
    "onednn::qconv3d_pointwise": "qx",
    "onednn::qconv_pointwise": "qx",
    "onednn::qlinear_pointwise": "qx",
    "torchao::qscaled_dot_product": "query",
    "fvflops::packed_linear": "compute",
    "fvflops::packed_grouped_mm": "compute",
}


def find_dtype(op: str, names: tuple[str, ...], inputs: tuple[Value, ...], outputs: tuple[Value, ...]) -> str:
    """Return the compute dtype of an op: the first floating-point or complex dtype among its inputs, else the first.

    int8 kernels are recognised by name. `op` is "" for a region.
    """
    packet = packet_of(op)
    if packet in _INT8 and not (packet in _RECURRENT and _FLOAT16 in inputs):
        return "int8"
    operand = _OPERANDS.get(packet)
    if operand in names:
        value = inputs[names.index(operand)]
        if isinstance(value, TensorSpec):
            return value.dtype
        if isinstance(value, Symbol):
            return value.name
    specs = list(tensors_in(inputs)) or list(tensors_in(outputs))
    if not specs:
        return ""
    return next((spec.dtype for spec in specs if spec.is_floating_point or spec.is_complex), specs[0].dtype)
