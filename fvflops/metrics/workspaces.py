"""The workspaces: memory that a kernel takes for itself while it runs, which no op's results tell of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import torch

from fvflops.formulas import Call
from fvflops.trace import Signature, TensorSpec, Trace

# oneDNN's convolutions read an image of up to so many channels as it stands.
_IMAGE = 3


def _convolution_on_cpu(call: Call) -> int:
    """Return what oneDNN's convolution takes of contiguous tensors, beside its result.

    It works on blocked copies of input and weight and makes a blocked result, frees the copies, and copies the result
    into the tensor that the program gets (ideep's convolution_forward, and mkldnn_to_dense): first input, weight and
    result are there blocked, then the result twice. Channels are taken to fill their blocks, which have 8 or 16.
    Tensors in channels_last are worked on as they are; a Trace does not tell them apart.
    """
    source, weight, result = call.arguments["input"], call.arguments["weight"], call.out
    if not isinstance(source, TensorSpec) or not isinstance(weight, TensorSpec):
        return 0
    if source.dtype not in ("float32", "bfloat16", "float16"):
        return 0
    as_it_stands = source.ndim > 2 and source.shape[1] <= _IMAGE and call.arguments.get("groups") == 1
    return max((0 if as_it_stands else source.nbytes) + weight.nbytes, result.nbytes)


# Kind of device → op's name without overload → what one call takes, in bytes, beside its results.
WORKSPACES: Mapping[str, Mapping[str, Callable[[Call], int]]] = {
    "cpu": {
        f"aten::{name}": _convolution_on_cpu
        for name in ("conv1d", "conv2d", "conv3d", "convolution", "_convolution", "mkldnn_convolution")
    },
}

# Kind of device → ops that take memory of their own, of which nothing but the library that they call knows how much.
UNKNOWN: Mapping[str, frozenset[str]] = {
    "cpu": frozenset({"aten::convolution_backward", "aten::mkldnn_rnn_layer", "aten::mkldnn_rnn_layer_backward"}),
    "cuda": frozenset(
        {
            "aten::convolution",
            "aten::convolution_backward",
            "aten::cudnn_convolution",
            "aten::_cudnn_rnn",
            "aten::_cudnn_rnn_backward",
        }
    ),
}


def workspace_of(signature: Signature, device: str) -> int:
    """Return the bytes that one call takes for itself on a device, as far as a rule tells; 0 where none does.

    >>> image, weight, out = TensorSpec((1, 8, 4, 4)), TensorSpec((8, 8, 1, 1)), TensorSpec((1, 8, 4, 4))
    >>> workspace_of(Signature("aten::conv2d", ("input", "weight", "groups"), (image, weight, 1), (out,)), "cpu")
    768
    """
    rule = WORKSPACES.get(device.partition(":")[0], {}).get(signature.packet)
    return 0 if rule is None else rule(Call.of(signature))


def unseen_kernels(trace: Trace, device: str) -> Counter[str]:
    """Return op → calls of those whose kernels take memory that is not in a trace and that no rule tells.

    These are ops of libraries, and composite ops that the recording did not look into.
    """
    unknown = UNKNOWN.get(device.partition(":")[0], frozenset())
    calls: Counter[str] = Counter()
    for (item, _, _), count in trace.calls.items():
        signature = trace.signatures[item]
        if signature.packet in unknown or (signature.op in trace.stops_at and _is_composite(signature.op)):
            calls[signature.op] += count
    return calls


def _is_composite(op: str) -> bool:
    if not op.startswith("aten::"):
        return False
    try:
        return torch._C._dispatch_has_kernel_for_dispatch_key(op, "CompositeImplicitAutograd")
    except RuntimeError:  # an op that this torch does not have
        return False
