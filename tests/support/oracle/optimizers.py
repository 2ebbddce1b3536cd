"""The optimizer programs: one step of one parameter, as torch.optim takes it.

What depends on the step's number alone (bias corrections, step sizes) is not an operation on the parameter.
"""

from dataclasses import dataclass

from tests.support.oracle.number import Number, scaled


@dataclass(frozen=True, slots=True)
class Adam:
    lr: float
    beta1: float
    beta2: float
    weight_decay: float
    eps: float
    amsgrad: bool
    maximize: bool
    decoupled: bool


def adam(p, g, mean, square, top, step, settings):
    s = settings
    if s.maximize:
        g = -g
    if s.weight_decay != 0:
        if s.decoupled:
            p = p * (1 - s.lr * s.weight_decay)
        else:
            g = g + s.weight_decay * p
    mean = mean * s.beta1 + (1 - s.beta1) * g
    square = square * s.beta2 + (1 - s.beta2) * g * g
    if s.amsgrad:
        top = top.max(square)
    root = (top if s.amsgrad else square).sqrt() / (1 - s.beta2**step) ** 0.5
    p = p - s.lr / (1 - s.beta1**step) * mean / (root + s.eps)
    return p, mean, square, top


@dataclass(frozen=True, slots=True)
class Sgd:
    lr: float
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    maximize: bool


def sgd(p: Number, g: Number, buffer: Number, settings: Sgd, first: bool) -> tuple[Number, Number]:
    s = settings
    if s.maximize:
        g = -g
    if s.weight_decay != 0:
        g = g + s.weight_decay * p
    if s.momentum != 0:
        buffer = g if first else s.momentum * buffer + scaled(g, 1 - s.dampening)
        g = g + s.momentum * buffer if s.nesterov else buffer
    return p - s.lr * g, buffer


def adagrad(p: Number, g: Number, total: Number, lr: float, weight_decay: float, eps: float) -> tuple[Number, Number]:
    if weight_decay != 0:
        g = g + weight_decay * p
    total = total + g * g
    return p - lr * g / (total.sqrt() + eps), total
