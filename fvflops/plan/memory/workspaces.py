"""Workspaces: memory that a kernel allocates while it runs, besides its results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import reduce

import torch

from fvflops.formulas import Call
from fvflops.formulas.schema import is_composite
from fvflops.trace import Signature, StopsAt, TensorSpec, Trace, tensors_in

# oneDNN's convolutions read inputs of up to this many channels without a blocked copy. For others the blocks, of 8 or
# 16 channels, are assumed to be full, and small scratchpads are ignored. Tensors in channels_last are not copied, but
# a Trace does not distinguish them from contiguous ones.
_MAX_PLAIN_CHANNELS = 3
# torch uses its native kernel for one input of up to this many elements (use_mkldnn in Convolution.cpp).
_NATIVE_KERNEL_ELEMENTS = 20480
_ARITHMETIC = ("add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_")
_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", "convolution", "_convolution", "mkldnn_convolution")
_CUDNN = ("convolution", "convolution_backward", "cudnn_convolution", "_cudnn_rnn", "_cudnn_rnn_backward")


def _convolution_on_cpu(call: Call) -> int | None:
    """Return the workspace in bytes of oneDNN's convolution of contiguous tensors.

    It copies input and weight to a blocked format, computes a blocked result, frees the copies, and copies the result
    to a dense tensor (ideep's convolution_forward, and mkldnn_to_dense).
    """
    weight = call.arguments["weight"]
    if not (isinstance(weight, TensorSpec) and _is_onednn(call)):
        return None
    return max(_copied_input_bytes(call) + weight.nbytes, call.out.nbytes)


def _convolution_backward_on_cpu(call: Call) -> int | None:
    """Return the workspace in bytes of the backward pass of oneDNN's convolution.

    It computes first the input's gradient, from blocked copies of the result's gradient and of the weight, then the
    weight's and the bias's, from copies of the result's gradient and of the input, while the input's gradient is alive
    (mkldnn_convolution_backward in mkldnn/Conv.cpp).
    """
    gradient, weight = call.arguments["grad_output"], call.arguments["weight"]
    if not (isinstance(gradient, TensorSpec) and isinstance(weight, TensorSpec) and _is_onednn(call)):
        return None
    of_input, of_weight, of_bias = (item.nbytes if isinstance(item, TensorSpec) else 0 for item in call.outputs)
    peak = max(gradient.nbytes + weight.nbytes + of_input, 2 * of_input) if of_input else 0
    if of_weight:
        of_parameters = of_weight + of_bias
        peak = max(
            peak, of_input + gradient.nbytes + _copied_input_bytes(call) + of_parameters, of_input + 2 * of_parameters
        )
    return max(peak - of_input - of_weight - of_bias, 0)


def _is_onednn(call: Call) -> bool:
    source, weight = call.arguments["input"], call.arguments["weight"]
    if not (isinstance(source, TensorSpec) and isinstance(weight, TensorSpec)) or call.arguments.get("transposed"):
        return False
    supported = {source.dtype, weight.dtype} == {"float32"} and source.layout == "strided" and source.ndim in (3, 4)
    large_kernel = min(weight.shape[2:]) > 3 or call.arguments.get("groups") != 1
    return supported and (large_kernel or source.shape[0] > 1 or source.numel > _NATIVE_KERNEL_ELEMENTS)


def _copied_input_bytes(call: Call) -> int:
    """Return the bytes of the blocked copy of a convolution's input, 0 where none is made."""
    source = call.arguments["input"]
    assert isinstance(source, TensorSpec)
    return 0 if source.shape[1] <= _MAX_PLAIN_CHANNELS and call.arguments.get("groups") == 1 else source.nbytes


def _mixed_arithmetic_on_cpu(call: Call) -> int:
    """Return the workspace in bytes of arithmetic on tensors of several dtypes: copies of them in the common dtype."""
    operands = [value for value in call.arguments.values() if isinstance(value, TensorSpec) and value.ndim]
    dtypes = [getattr(torch, operand.dtype) for operand in operands]
    if len(set(dtypes)) < 2:
        return 0
    common = reduce(torch.promote_types, dtypes)
    tensors = [*zip(operands, dtypes, strict=True), (call.out, getattr(torch, call.out.dtype))]
    return sum(spec.numel * common.itemsize for spec, dtype in tensors if dtype is not common)


def _reduce_scatter_on_cpu(call: Call) -> int | None:
    """Return the workspace in bytes of gloo's reduce-scatter: it reduces a copy of its input."""
    source = call.arguments.get("input_tensor", call.arguments.get("input"))
    return source.nbytes if isinstance(source, TensorSpec) else None


# Device type → op without overload → the workspace of one call in bytes, or None where the rule does not apply.
WORKSPACES: Mapping[str, Mapping[str, Callable[[Call], int | None]]] = {
    "cpu": {
        **dict.fromkeys([f"aten::{name}" for name in _CONVOLUTIONS], _convolution_on_cpu),
        **dict.fromkeys([f"aten::{name}" for name in _ARITHMETIC], _mixed_arithmetic_on_cpu),
        "aten::convolution_backward": _convolution_backward_on_cpu,
        # gloo receives into a copy of the result.
        "c10d::_allgather_base_": lambda call: call.out.nbytes,
        "c10d::_reduce_scatter_base_": _reduce_scatter_on_cpu,
        "_c10d_functional::all_gather_into_tensor": lambda call: call.out.nbytes,
        "_c10d_functional::reduce_scatter_tensor": _reduce_scatter_on_cpu,
    }
}

# Composite op → the devices that have a kernel for it, without temporaries: there its decomposition is not used.
# Source: torch's native_functions.yaml, the same in every release that this table is tested with.
OWN_KERNELS: Mapping[str, tuple[str, ...]] = {
    "aten::_fused_rms_norm": ("cuda",),
    "aten::mish_backward": ("cpu", "cuda"),
    "aten::native_channel_shuffle": ("cpu",),
    "aten::silu_backward": ("cpu", "cuda"),
}

# Namespaces of torch's own ops, whose workspaces are known, or zero.
_NAMESPACES = frozenset({"aten", "prims", "profiler", "fsdp", "c10d", "_c10d_functional", "_c10d_functional_autograd"})

# Ops of other libraries whose CUDA kernels update their arguments in place, without further memory.
# Source: bitsandbytes 0.50.2, csrc/kernels.cu.
_IN_PLACE = frozenset({"bitsandbytes::optimizer_update_32bit", "bitsandbytes::optimizer_update_8bit_blockwise"})

# Device type → ops of libraries whose workspace is not known in advance.
UNKNOWN: Mapping[str, frozenset[str]] = {
    "cpu": frozenset({"aten::mkldnn_rnn_layer", "aten::mkldnn_rnn_layer_backward"}),
    "cuda": frozenset(f"aten::{name}" for name in _CUDNN),
}


def own_kernels(device_type: str) -> StopsAt:
    """Return the composite ops that a recording on a kind of device does not decompose."""
    return StopsAt(frozenset(op for op, kinds in OWN_KERNELS.items() if device_type in kinds))


def workspace_of(signature: Signature, device: str) -> int | None:
    """Return the workspace of one call on a device in bytes, None if unknown; 0 for ops that are not listed here.

    >>> image, weight = TensorSpec((2, 8, 4, 4)), TensorSpec((8, 8, 1, 1))
    >>> convolution = Signature("aten::conv2d", ("input", "weight", "groups"), (image, weight, 1), (image,))
    >>> workspace_of(convolution, "cpu")  # copies of the image and the weight
    1280
    """
    kind = device.partition(":")[0]
    rule = WORKSPACES.get(kind, {}).get(signature.packet)
    if rule is not None:
        return rule(Call.of(signature))
    return None if signature.packet in UNKNOWN.get(kind, ()) else 0


def kernels_with_unknown_workspace(trace: Trace, sizes: Sequence[int | None]) -> Counter[str]:
    """Return op → calls for ops whose workspace no rule computes.

    These are kernels of libraries, ops that are not torch's, and composite ops that the recording did not decompose.
    `sizes` are the workspaces of the trace's signatures.
    """
    calls: Counter[str] = Counter()
    ops = {signature.op for signature in trace.signatures if signature.op.startswith("aten::")}
    composite = {op for op in ops if op in trace.stops_at and op not in OWN_KERNELS and is_composite(op)}
    for (item, _, _), count in trace.calls.items():
        signature = trace.signatures[item]
        op = signature.op
        is_foreign = op.partition("::")[0] not in _NAMESPACES and not (
            op in _IN_PLACE and any(spec.device.startswith("cuda") for spec in tensors_in(signature.inputs))
        )
        if sizes[item] is None or is_foreign or op in composite:
            calls[op] += count
    return calls
