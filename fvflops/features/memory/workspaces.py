"""The workspaces: memory that a kernel takes for itself while it runs, which no op's results tell of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from fvflops.formulas import Call
from fvflops.torch_internals import has_kernel_for_key
from fvflops.trace import Signature, TensorSpec, Trace

# oneDNN's convolutions read an image of up to so many channels as it stands. Of others the blocks, which have 8 or 16
# channels, are taken to be full, and small scratchpads are left out. Tensors in channels_last are worked on as they
# are: a Trace does not tell them from contiguous ones.
_IMAGE = 3
# torch has a kernel of its own for convolutions of one image of up to so many elements (use_mkldnn in Convolution.cpp).
_SMALL = 20480


def _convolution_on_cpu(call: Call) -> int | None:
    """Return what oneDNN's convolution takes of contiguous tensors, beside its result.

    It works on blocked copies of input and weight and makes a blocked result, lets go of the copies, and copies the
    result into the tensor that the program gets (ideep's convolution_forward, and mkldnn_to_dense).
    """
    weight = call.arguments["weight"]
    if not (isinstance(weight, TensorSpec) and _is_onednn(call)):
        return None
    return max(_copied(call) + weight.nbytes, call.out.nbytes)


def _convolution_backward_on_cpu(call: Call) -> int | None:
    """Return what oneDNN's convolution takes in its backward pass, beside its results.

    First the input's gradient is made, of blocked copies of the result's gradient and of the weight, then the weight's
    and the bias', of copies of the result's gradient and of the input, while the input's is there
    (mkldnn_convolution_backward in mkldnn/Conv.cpp).
    """
    gradient, weight = call.arguments["grad_output"], call.arguments["weight"]
    if not (isinstance(gradient, TensorSpec) and isinstance(weight, TensorSpec) and _is_onednn(call)):
        return None
    of_input, of_weight, of_bias = (item.nbytes if isinstance(item, TensorSpec) else 0 for item in call.outputs)
    most = max(gradient.nbytes + weight.nbytes + of_input, 2 * of_input) if of_input else 0
    if of_weight:
        rest = of_weight + of_bias
        most = max(most, of_input + gradient.nbytes + _copied(call) + rest, of_input + 2 * rest)
    return max(most - of_input - of_weight - of_bias, 0)


def _is_onednn(call: Call) -> bool:
    """Return whether a convolution is one that the rules speak of."""
    source, weight = call.arguments["input"], call.arguments["weight"]
    if not (isinstance(source, TensorSpec) and isinstance(weight, TensorSpec)) or call.arguments.get("transposed"):
        return False
    plain = {source.dtype, weight.dtype} == {"float32"} and source.layout == "strided" and source.ndim in (3, 4)
    wide = min(weight.shape[2:]) > 3 or call.arguments.get("groups") != 1
    return plain and (wide or source.shape[0] > 1 or source.numel > _SMALL)


def _copied(call: Call) -> int:
    """Return the bytes of an input that a convolution copies."""
    source = call.arguments["input"]
    assert isinstance(source, TensorSpec)
    return 0 if source.shape[1] <= _IMAGE and call.arguments.get("groups") == 1 else source.nbytes


# Kind of device → op's name without overload → what one call takes, in bytes, beside its results, or None.
WORKSPACES: Mapping[str, Mapping[str, Callable[[Call], int | None]]] = {
    "cpu": {
        f"aten::{name}": _convolution_on_cpu
        for name in ("conv1d", "conv2d", "conv3d", "convolution", "_convolution", "mkldnn_convolution")
    }
    | {"aten::convolution_backward": _convolution_backward_on_cpu},
}

# Composite ops that have kernels of their own too, which need no temporaries: what they come down to is not what runs.
OWN_KERNELS = frozenset({"aten::mish_backward", "aten::native_channel_shuffle", "aten::silu_backward"})

# Kind of device → ops that take memory of their own, of which nothing but the library that they call knows how much.
UNKNOWN: Mapping[str, frozenset[str]] = {
    "cpu": frozenset({"aten::mkldnn_rnn_layer", "aten::mkldnn_rnn_layer_backward"}),
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


def workspace_of(signature: Signature, device: str) -> int | None:
    """Return the bytes that one call takes for itself on a device, 0 where nothing is known of any, None if unknown.

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


def unseen_kernels(trace: Trace, sizes: Sequence[int | None]) -> Counter[str]:
    """Return op → calls of those whose kernels take memory that is not in a trace and that no rule tells.

    These are ops of libraries, and composite ops that the recording did not look into. `sizes` are the workspaces of
    the trace's signatures.
    """
    calls: Counter[str] = Counter()
    for (item, _, _), count in trace.calls.items():
        op = trace.signatures[item].op
        if sizes[item] is None or (op in trace.stops_at and _is_composite(op)):
            calls[op] += count
    return calls


def _is_composite(op: str) -> bool:
    if not op.startswith("aten::") or op in OWN_KERNELS:
        return False
    try:
        return has_kernel_for_key(op, "CompositeImplicitAutograd")
    except RuntimeError:  # an op that this torch does not have
        return False
