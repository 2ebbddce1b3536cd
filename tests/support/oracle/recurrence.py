"""The recurrence programs: RNN, LSTM and GRU cells and layers, on arrays of [..., units]."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from tests.support.oracle.number import Tally, each, linear, matmul
from tests.support.oracle.pointwise import select, sigmoid, tanh

Weights = Sequence[Any]  # of the input, of the hidden state, their biases or none, and the projection or none
State = Sequence[Any]  # the hidden state, and for an LSTM the cell
Gradients = list[Any]  # of the input, of both weights, of both biases and of the projection if there are any


@contextmanager
def free_of_cost(tally: Tally) -> Iterator[None]:
    """Forget what is done inside: the forward run left it."""
    spent = Counter(tally.done)
    yield
    tally.done = spent


def lstm_gates(tally: Tally, x: Any, hidden: Any, weights: Weights) -> list[Any]:
    sums = linear(tally, x, weights[0], weights[2]) + linear(tally, hidden, weights[1], weights[3])
    i, f, g, o = np.split(sums, 4, -1)
    return [sigmoid(i), sigmoid(f), tanh(g), sigmoid(o)]


def gru_gates(tally: Tally, x: Any, hidden: Any, weights: Weights) -> list[Any]:
    """Return the gates, and what the hidden state makes for the new one, before r multiplies it."""
    first = np.split(linear(tally, x, weights[0], weights[2]), 3, -1)
    second = np.split(linear(tally, hidden, weights[1], weights[3]), 3, -1)
    r, z = sigmoid(first[0] + second[0]), sigmoid(first[1] + second[1])
    return [r, z, tanh(first[2] + r * second[2]), second[2]]


def step(tally: Tally, kind: str, x: Any, state: State, weights: Weights) -> tuple[Any, ...]:
    """Return the next state of a cell of some kind; a GRU's is (h - n) * z + n."""
    if kind == "LSTM":
        i, f, g, o = lstm_gates(tally, x, state[0], weights)
        cell = f * state[1] + i * g
        result = o * tanh(cell)
        return (result if weights[4] is None else linear(tally, result, weights[4]), cell)
    if kind == "GRU":
        _, z, new, _ = gru_gates(tally, x, state[0], weights)
        return ((state[0] - new) * z + new,)
    sums = linear(tally, x, weights[0], weights[2]) + linear(tally, state[0], weights[1], weights[3])
    return (tanh(sums) if kind == "tanh" else each(lambda number: number.max(0.0), sums),)


def run(tally, kind, sequences, states, weights, bidirectional):
    """Return the outputs of each sequence and the last states, after layers that may run in two directions.

    `sequences` holds for each sample its rows, which may differ in number; `states` for each layer and direction the
    first state of each sample, and `weights` its weights.
    """
    directions, last = 1 + bidirectional, []
    for first in range(0, len(weights), directions):
        outputs = []
        for place in range(first, first + directions):
            order = slice(None, None, -1 if place > first else 1)
            rows, ends = [], []
            for state, sequence in zip(states[place], sequences, strict=True):
                made = []
                for x in sequence[order]:
                    state = step(tally, kind, x, state, weights[place])
                    made.append(state[0])
                rows.append(np.stack(made)[order])
                ends.append(state)
            outputs.append(rows)
            last.append(ends)
        sequences = [np.concatenate(ways, -1) for ways in zip(*outputs, strict=True)]
    return list(sequences), last


def lstm_slopes(grad_h: Any, grad_c: Any, gates: Sequence[Any], cell: Any, before: Any) -> tuple[Any, Any]:
    """Return the gradients of the sums of an LSTM cell's gates, and of the cell before; tanh(cell) is made again."""
    i, f, g, o = gates
    bent = tanh(cell)
    down = grad_c + _tanh_slope(grad_h * o, bent)
    slopes = (
        _sigmoid_slope(down * g, i),
        _sigmoid_slope(down * before, f),
        _tanh_slope(down * i, g),
        _sigmoid_slope(grad_h * bent, o),
    )
    return np.concatenate(slopes, -1), down * f


def gru_slopes(grad_h: Any, gates: Sequence[Any], hidden: Any, side: Any) -> tuple[Any, Any, Any]:
    """Return the gradients of the sums of a GRU cell's gates, of input and of hidden state, and what z hands back.

    `side` is what the hidden state made for the new gate, before r multiplied it.
    """
    r, z, new = gates
    to_z = _sigmoid_slope(grad_h * (hidden - new), z)
    to_new = _tanh_slope(grad_h * (1.0 - z), new)
    to_r = _sigmoid_slope(to_new * side, r)
    both = (to_r, to_z)
    return np.concatenate((*both, to_new), -1), np.concatenate((*both, to_new * r), -1), grad_h * z


def layer_backward(tally, kind, xs, state, weights, grads, last):
    """Return the gradients of a layer's input, of its two weights and, if there are any, biases and projection.

    It is one sample's; `grads` are of the outputs, `last` of the last state. The gates are there from the forward run,
    and cost nothing here.
    """
    projection = weights[4] if kind == "LSTM" else None
    states, gates = [state], []
    with free_of_cost(tally):
        for x in xs:
            if kind in ("LSTM", "GRU"):
                gates.append((lstm_gates if kind == "LSTM" else gru_gates)(tally, x, states[-1][0], weights))
            states.append(step(tally, kind, x, states[-1], weights))
        outputs = (
            [own[3] * tanh(after[1]) for own, after in zip(gates, states[1:], strict=True)] if kind == "LSTM" else []
        )
    of_input, of_hidden, projected = [], [], []
    grad_h, grad_c = last if kind == "LSTM" else (last[0], None)
    for t in reversed(range(len(xs))):
        grad_h = grads[t] + grad_h
        hidden, after = states[t][0], states[t + 1]
        if kind == "LSTM":
            if projection is not None:
                projected.insert(0, grad_h)
                grad_h = matmul(tally, grad_h, projection)
            first, grad_c = lstm_slopes(grad_h, grad_c, gates[t], after[1], states[t][1])
            second, kept = first, None
        elif kind == "GRU":
            first, second, kept = gru_slopes(grad_h, gates[t][:3], hidden, gates[t][3])
        else:
            slope = _tanh_slope if kind == "tanh" else _relu_slope
            first = second = slope(grad_h, after[0])
            kept = None
        of_input.insert(0, first)
        of_hidden.insert(0, second)
        grad_h = matmul(tally, second, weights[1])
        grad_h = grad_h if kept is None else grad_h + kept
    first, second, hidden = np.stack(of_input), np.stack(of_hidden), np.stack([before[0] for before in states[:-1]])
    gradients = [matmul(tally, first, weights[0]), matmul(tally, first.T, xs), matmul(tally, second.T, hidden)]
    if weights[2] is not None:
        gradients += [tally.sum(first, 0), tally.sum(second, 0)]
    if projection is not None:
        gradients.append(matmul(tally, np.stack(projected).T, np.stack(outputs)))
    return gradients


def layers_backward(tally, kind, xs, states, weights, grads, last, bidirectional, dropped=()):
    """Return the gradients of the input of a stack of layers, and of the weights of each layer and direction.

    One sample's, as `layer_backward`; `states` and `last` have one entry for each layer and direction. Gradients of
    an input from two directions are added. `dropped` has dropout's mask and factor for each layer but the last.
    """
    directions, inputs = 1 + bidirectional, [xs]
    layers = [range(first, first + directions) for first in range(0, len(weights), directions)]
    with free_of_cost(tally):
        for layer, places in enumerate(layers):
            own = slice(places.start, places.stop)
            (outputs,), _ = run(tally, kind, [inputs[-1]], [[s] for s in states[own]], weights[own], bidirectional)
            if layer < len(dropped):
                outputs = outputs * dropped[layer][0] * dropped[layer][1]
            inputs.append(outputs)
    found = []
    for layer, places in reversed(list(enumerate(layers))):
        if layer < len(dropped):
            grads = grads * dropped[layer][0] * dropped[layer][1]
        parts = []
        for place, share in zip(places, np.split(grads, directions, -1), strict=True):
            order = slice(None, None, -1 if place > places.start else 1)
            arguments = (inputs[layer][order], states[place], weights[place], share[order], last[place])
            gradients = layer_backward(tally, kind, *arguments)
            parts.append(gradients[0][order])
            found.insert(place - places.start, gradients[1:])
        grads = parts[0] + parts[1] if bidirectional else parts[0]
    return grads, found


def _sigmoid_slope(grad: Any, value: Any) -> Any:
    return grad * (1.0 - value) * value


def _tanh_slope(grad: Any, value: Any) -> Any:
    return grad * (1.0 - value * value)


def _relu_slope(grad: Any, value: Any) -> Any:
    return each(lambda g, y: select(y.value > 0, g, 0.0), grad, value)
