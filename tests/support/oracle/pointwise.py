"""The pointwise programs: what one output element of an op costs, written down for real and complex numbers.

A program that chooses by the data does the costlier side, and then selects; a selection is not an operation.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tests.support.oracle.number import Complex, Number, scaled

# --- elementary functions ---------------------------------------------------------------------------------------------

exp, log, tanh = np.exp, np.log, np.tanh  # of a number or an array: numpy calls the method of this name


def select(condition: bool, chosen: Number | float, other: Number | float) -> Number:
    """Return one of two values that are both there: no operation. A plain one is the cheaper side, not counted."""
    tally = next(value.tally for value in (chosen, other) if isinstance(value, Number))
    value = chosen if condition else other
    return value if isinstance(value, Number) else tally.number(value)


def erf(x: Number) -> Number:
    return x.call("erf", math.erf)


def power(x: Number, exponent: Number | float) -> Number:
    plain = exponent.value if isinstance(exponent, Number) else exponent
    return x.call("pow", lambda value: value**plain)


def scalar(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[float], float]:
    """Return torch's function of one number, for those that Python's math lacks."""
    return lambda value: function(torch.tensor(value, dtype=torch.float64)).item()


# --- arithmetic -------------------------------------------------------------------------------------------------------


def clamp(x: Number, low: float | None = None, high: float | None = None) -> Number:
    x = x if low is None else x.max(low)
    return x if high is None else x.min(high)


def rounded(function: Callable[[float], float]) -> Callable[[Number], Number]:
    return lambda x: x.call("round", function)


def sign(x: Number) -> Number:
    return x.call("sign", lambda value: (value > 0) - (value < 0))


def remainder(x: Number, y: Number) -> Number:
    return x - (x / y).call("round", math.floor) * y


def cross(x: Any, y: Any) -> Any:
    """Return the cross products of vectors along the last axis."""
    after, before = [1, 2, 0], [2, 0, 1]
    return x[..., after] * y[..., before] - x[..., before] * y[..., after]


# --- activations ------------------------------------------------------------------------------------------------------


def leaky_relu(x: Number, slope: Number | float) -> Number:
    return select(x.value > 0, x, x * slope)


SELU_ALPHA, SELU_SCALE = 1.6732632423543772, 1.0507009873554805


def selu(x: Number) -> Number:
    """Return scale*x, or scale*alpha*(exp(x) − 1) below 0; scale*alpha is one number."""
    return select(x.value > 0, SELU_SCALE * x.value, (exp(x) - 1) * (SELU_SCALE * SELU_ALPHA))


def sigmoid(x: Number) -> Number:
    return 1 / (1 + exp(-x))


def gelu_tanh(x: Number) -> Number:
    return x * (1 + tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x)))) * 0.5


def softplus(x: Number, beta: float = 1) -> Number:
    return scaled(log(1 + exp(scaled(x, beta))), 1 / beta)


def log_sigmoid(x: Number) -> Number:
    """Return min(x, 0) − log(1 + exp(−|x|)), which does not overflow."""
    return x.min(0) - log(1 + exp(-abs(x)))


def softshrink(x: Number, y: Number, bound: float) -> Number:
    """Return y, or 0 where x is within the bound: a selection."""
    return select(abs(x.value) > bound, y, 0.0)


def logit(x: Number) -> Number:
    return log(x / (1 - x))


# --- activations' derivatives, times the gradient g -------------------------------------------------------------------


def prelu_backward(g: Number, x: Number, slope: Number) -> tuple[Number, Number]:
    """Return the gradients of the number and of its slope: g and 0, or below 0 g*slope and g*x."""
    return select(x.value > 0, g, g * slope), select(x.value > 0, g.tally.number(0), g * x)


def gelu_backward(g: Number, x: Number) -> Number:
    cdf = 0.5 * (1 + erf(x * math.sqrt(0.5)))
    pdf = exp(x * x * -0.5) * (1 / math.sqrt(2 * math.pi))
    return g * (cdf + x * pdf)


def gelu_tanh_backward(g: Number, x: Number) -> Number:
    """Return g times the derivative of gelu_tanh, a product: half of 1 + t, and x/2 times t's derivative."""
    c, k = math.sqrt(2 / math.pi), 0.044715
    square = x * x
    t = tanh(c * (x + k * (square * x)))
    return g * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * (c * (1 + 3 * k * square)))


def mish_backward(g: Number, x: Number) -> Number:
    """Return g*(t + x*s*(1 − t^2)), s being sigmoid(x), t the tangent of softplus."""
    s, t = sigmoid(x), tanh(softplus(x))
    return g * (t + x * s * (1 - t * t))


def log_sigmoid_backward(g: Number, x: Number, buffer: Number) -> Number:
    """Return g*(m ± b/(1 + b)), b being exp(−|x|) as the forward pass left it; m is 1 below 0, else 0."""
    part = buffer / (1 + buffer)
    return g * (1 - part if x.value < 0 else 0 + part)


def glu_backward(g: Number, x: Number, gate: Number) -> tuple[Number, Number]:
    """Return the gradients of both halves: g*s and g*s*x*(1 − s), s being sigmoid(gate)."""
    s = sigmoid(gate)
    own = g * s
    return own, own * x * (1 - s)


# --- complex numbers --------------------------------------------------------------------------------------------------


def complex_exp(z: Complex) -> Complex:
    """Return exp(x)*(cos y + i sin y)."""
    radius = exp(z.real)
    return Complex(radius * z.imag.call("cos", math.cos), radius * z.imag.call("sin", math.sin))
