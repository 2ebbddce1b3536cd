"""Multiply-adds of convolutions, forward and backward, including grouped, dilated and transposed ones."""

from __future__ import annotations

import math

from fvflops.formulas.cost import Cost
from fvflops.formulas.language.call import Call


def count_convolution(call: Call) -> Cost:
    """Return the cost of a convolution: batch * numel(weight) * positions.

    Each weight is multiplied once per position of the output, or of the input if transposed; the weight's shape already
    accounts for groups. The first argument is [B, C, *spatial] or [C, *spatial], and the bias is not counted. For
    aten::convolution, _convolution, conv1d, conv2d, conv3d, conv_transpose1d ... and the kernels of backends.
    Source: fvcore's rule, and arXiv:1603.07285 for the transposed one.

    >>> from fvflops.trace import TensorSpec
    >>> shapes = {"input": TensorSpec((2, 4, 8)), "weight": TensorSpec((6, 2, 3)), "transposed": False}
    >>> count_convolution(Call("aten::convolution", shapes, (TensorSpec((2, 6, 6)),), "c(Tensor input) -> Tensor"))
    Cost(macs=432, flops=0, activations=72)
    """
    macs = _work(call.shape(call.operands[0]), call.shape("weight"), call.out.shape, is_transposed(call))
    return Cost(macs=macs, activations=call.out.numel)


def count_convolution_backward(call: Call) -> Cost:
    """Return the cost of a convolution's backward: the forward's, once for each gradient in `output_mask`.

    The gradient of the input is the transposed convolution of grad_output with the weight, the gradient of the weight
    correlates input and grad_output: each has as many products as the forward. The gradient of the bias is a sum.
    For aten::convolution_backward and its variants.
    """
    image, weight = call.tensor("input" if "input" in call.arguments else "self"), call.tensor("weight")
    forward = _work(image.shape, weight.shape, call.shape("grad_output"), is_transposed(call))
    mask = call.arguments["output_mask"]
    wants_image, wants_weight = bool(mask[0]), bool(mask[1])  # type: ignore[index]
    return Cost(
        macs=forward * (wants_image + wants_weight), activations=image.numel * wants_image + weight.numel * wants_weight
    )


def is_transposed(call: Call) -> bool:
    """Return whether a convolution is transposed, by its argument or its name.

    >>> is_transposed(Call("aten::conv_transpose2d.input", {}, ()))
    True
    """
    return bool(call.arguments.get("transposed", "transpose" in call.op))


def _work(image: tuple[int, ...], weight: tuple[int, ...], out: tuple[int, ...], transposed: bool) -> int:
    spatial = len(weight) - 2
    batch = image[0] if len(image) == len(weight) else 1
    positions = image if transposed else out
    return batch * math.prod(weight) * math.prod(positions[len(positions) - spatial :])
