"""The pointwise programs: what one output element of an op costs, written down for real and complex numbers.

A program that chooses by the data does the costlier side, and then selects; a selection is no operation.
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


def add(x: Number, y: Number, alpha: float = 1) -> Number:
    return x + scaled(y, alpha)


def subtract(x: Number, y: Number, alpha: float = 1) -> Number:
    return x - scaled(y, alpha)


def addcmul(x: Number, y: Number, z: Number, value: float = 1) -> Number:
    return x + scaled(y, value) * z


def addcdiv(x: Number, y: Number, z: Number, value: float = 1) -> Number:
    return x + scaled(y, value) / z


def lerp(x: Number, y: Number, weight: Number | float) -> Number:
    return x + (y - x) * weight


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


def elu(x: Number, alpha: float = 1) -> Number:
    return select(x.value > 0, x, scaled(exp(x) - 1, alpha))


def celu(x: Number, alpha: float = 1) -> Number:
    return select(x.value > 0, x, scaled(exp(scaled(x, 1 / alpha)) - 1, alpha))


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


def softshrink(x: Number, bound: float) -> Number:
    """Return x moved towards 0 by the bound."""
    moved = x - math.copysign(bound, x.value)
    return select(abs(x.value) > bound, moved, x.tally.number(0))


def threshold(x: Number, bound: float, value: float) -> Number:
    """Return x, or a value below the bound: a selection."""
    return select(x.value > bound, x, x.tally.number(value))


def logit(x: Number, eps: float | None = None) -> Number:
    """Return log(x/(1 − x)), x first brought within eps and 1 − eps."""
    x = x if eps is None else clamp(x, eps, 1 - eps)
    return log(x / (1 - x))


def glu(x: Number, gate: Number) -> Number:
    return x * sigmoid(gate)


# --- activations' derivatives, times the gradient g -------------------------------------------------------------------


def threshold_backward(g: Number, x: Number, bound: float) -> Number:
    """Return g, or 0 below the bound: a selection."""
    return select(x.value > bound, g, g.tally.number(0))


def hardtanh_backward(g: Number, x: Number, low: float, high: float) -> Number:
    """Return g, or 0 outside the bounds: a selection."""
    return select(low < x.value < high, g, g.tally.number(0))


def leaky_relu_backward(g: Number, x: Number, slope: float) -> Number:
    return select(x.value > 0, g, g * slope)


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


def silu_backward(g: Number, x: Number) -> Number:
    s = sigmoid(x)
    return g * s * (1 + x * (1 - s))


def elu_backward(g: Number, x: Number, alpha: float, scale: float, input_scale: float) -> Number:
    """Return g*scale, or below 0 g*alpha*scale*input_scale*exp(x*input_scale)."""
    below = g * exp(scaled(x, input_scale))
    return select(x.value > 0, g.value * scale, scaled(below, alpha * scale * input_scale))


def elu_backward_of_result(g: Number, y: Number, alpha: float, scale: float, input_scale: float) -> Number:
    below = scaled(g, input_scale) * (y + alpha * scale)
    return select(y.value > 0, g.value * scale, below)


def softplus_backward(g: Number, x: Number, beta: float) -> Number:
    """Return g*z/(z + 1), z being exp(beta*x)."""
    z = exp(scaled(x, beta))
    return g * z / (z + 1)


def mish_backward(g: Number, x: Number) -> Number:
    """Return g*(t + x*s*(1 − t^2)), s being sigmoid(x), t the tangent of softplus."""
    s, t = sigmoid(x), tanh(softplus(x))
    return g * (t + x * s * (1 - t * t))


def hardswish_backward(g: Number, x: Number) -> Number:
    """Return g*(x/3 + 1/2) between −3 and 3, g above, 0 below."""
    return select(-3 < x.value < 3, g * (x / 3 + 0.5), g.value if x.value >= 3 else 0.0)


def softshrink_backward(g: Number, x: Number, bound: float) -> Number:
    """Return g, or 0 within the bound: a selection."""
    return select(abs(x.value) > bound, g, g.tally.number(0))


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


def angle(z: Complex) -> Number:
    """Return the angle, one elementary function."""
    return z.imag.call("atan2", lambda side: math.atan2(side, z.real.value))
