"""Compute dtype of an op, for `by_dtype` and to select a device's peak FLOP/s."""

from __future__ import annotations

from fvflops.trace import Symbol, TensorSpec, Value, tensors_in
from fvflops.trace.signature import packet_of

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
