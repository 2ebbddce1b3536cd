"""The recurrence programs: RNN, LSTM and GRU cells and layers, as loops over counting numbers."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from tests.support.oracle.number import Number, Tally
from tests.support.oracle.pointwise import sigmoid, tanh
from tests.support.oracle.products import linear, transpose

Weights = Sequence[Any]  # of the input, of the hidden state, their biases or none, and the projection or none
Row = list[Number]
Gradients = list[Any]  # of the input, of both weights, and of both biases if there are any


def gate_sums(tally: Tally, x: Row, hidden: Row, weights: Weights) -> Row:
    """Return what an input and a hidden state make of a cell's weights and biases, added."""
    w_ih, w_hh, b_ih, b_hh = weights[:4]
    return [a + b for a, b in zip(linear(tally, x, w_ih, b_ih), linear(tally, hidden, w_hh, b_hh), strict=True)]


def rnn_step(tally: Tally, x: Row, state: Sequence[Row], weights: Weights, activation: str) -> tuple[Row, ...]:
    """Return the next hidden state of a plain RNN cell, for one sample."""
    sums = gate_sums(tally, x, state[0], weights)
    return ([tanh(number) if activation == "tanh" else number.max(0.0) for number in sums],)


def lstm_step(tally: Tally, x: Row, state: Sequence[Row], weights: Weights) -> tuple[Row, ...]:
    """Return the next hidden state and cell of an LSTM cell, for one sample."""
    hidden, cell = state
    sums = gate_sums(tally, x, hidden, weights)
    size = len(cell)
    i, f, g, o = (sums[first : first + size] for first in range(0, 4 * size, size))
    cells = [sigmoid(f[n]) * cell[n] + sigmoid(i[n]) * tanh(g[n]) for n in range(size)]
    result = [sigmoid(o[n]) * tanh(cells[n]) for n in range(size)]
    return (result if weights[4] is None else linear(tally, result, weights[4]), cells)


def gru_step(tally: Tally, x: Row, state: Sequence[Row], weights: Weights) -> tuple[Row, ...]:
    """Return the next hidden state of a GRU cell, for one sample: (h - n) * z + n."""
    w_ih, w_hh, b_ih, b_hh = weights[:4]
    (hidden,) = state
    first, second = linear(tally, x, w_ih, b_ih), linear(tally, hidden, w_hh, b_hh)
    size = len(hidden)
    result = []
    for n in range(size):
        r = sigmoid(first[n] + second[n])
        z = sigmoid(first[size + n] + second[size + n])
        new = tanh(first[2 * size + n] + r * second[2 * size + n])
        result.append((hidden[n] - new) * z + new)
    return (result,)


def run(
    tally: Tally,
    kind: str,
    sequences: list[list[Row]],
    states: list[list[tuple[Row, ...]]],
    weights: Sequence[Weights],
    bidirectional: bool,
) -> tuple[list[list[Row]], list[list[tuple[Row, ...]]]]:
    """Return the outputs of each sequence and the last states, after layers that may run in two directions.

    `sequences` holds for each sample its rows, which may differ in number; `states` for each layer and direction the
    first state of each sample, and `weights` its weights.
    """
    directions = 2 if bidirectional else 1
    last = []
    for layer in range(len(weights) // directions):
        outputs = []
        for direction in range(directions):
            place = layer * directions + direction
            rows, ends = [], []
            for sample, sequence in enumerate(sequences):
                state = states[place][sample]
                made = []
                for x in reversed(sequence) if direction else sequence:
                    state = step(tally, kind, x, state, weights[place])
                    made.append(state[0])
                rows.append(made[::-1] if direction else made)
                ends.append(state)
            outputs.append(rows)
            last.append(ends)
        sequences = [
            [[number for part in parts for number in part] for parts in zip(*samples, strict=True)]
            for samples in zip(*outputs, strict=True)
        ]
    return sequences, last


def step(tally: Tally, kind: str, x: Row, state: Sequence[Row], weights: Weights) -> tuple[Row, ...]:
    """Return the next state of a cell of some kind, for one sample."""
    if kind == "LSTM":
        return lstm_step(tally, x, state, weights)
    if kind == "GRU":
        return gru_step(tally, x, state, weights)
    return rnn_step(tally, x, state, weights, kind)


def lstm_slopes(grad_h: Row, grad_c: Row, gates: Sequence[Row], cell: Row, before: Row) -> tuple[Row, Row]:
    """Return the gradients of the sums of an LSTM cell's gates, and of the cell before; tanh(cell) is made again."""
    i, f, g, o = gates
    parts = [[], [], [], []]
    carried = []
    for n in range(len(cell)):
        bent = tanh(cell[n])
        down = grad_c[n] + _tanh_slope(grad_h[n] * o[n], bent)
        parts[0].append(_sigmoid_slope(down * g[n], i[n]))
        parts[1].append(_sigmoid_slope(down * before[n], f[n]))
        parts[2].append(_tanh_slope(down * i[n], g[n]))
        parts[3].append(_sigmoid_slope(grad_h[n] * bent, o[n]))
        carried.append(down * f[n])
    return [number for part in parts for number in part], carried


def gru_slopes(grad_h: Row, gates: Sequence[Row], hidden: Row, side: Row) -> tuple[Row, Row, Row]:
    """Return the gradients of the sums of a GRU cell's gates, of input and of hidden state, and what z hands back.

    `side` is what the hidden state made for the new gate, before r multiplied it.
    """
    r, z, new = gates
    units = range(len(grad_h))
    to_z = [_sigmoid_slope(grad_h[n] * (hidden[n] - new[n]), z[n]) for n in units]
    to_new = [_tanh_slope(grad_h[n] * (1.0 - z[n]), new[n]) for n in units]
    to_r = [_sigmoid_slope(to_new[n] * side[n], r[n]) for n in units]
    of_hidden = to_r + to_z + [to_new[n] * r[n] for n in units]
    return to_r + to_z + to_new, of_hidden, [grad_h[n] * z[n] for n in units]


def lstm_backward(
    tally: Tally, xs: list[Row], state: Sequence[Row], weights: Weights, grads: list[Row], last: Sequence[Row]
) -> Gradients:
    """Return the gradients of an LSTM layer's input, of its two weights and, if there are any, biases and projection.

    It is one sample's; `grads` are of the outputs, `last` of the last hidden state and cell. The gates are there from
    the forward run, and cost nothing here.
    """
    projection = weights[4] if len(weights) > 4 else None
    saved = _saved_gates(xs, state, weights, tally)
    slopes = []
    projected = []
    grad_h, grad_c = last
    for t in reversed(range(len(xs))):
        i, f, g, o, cell, before, *_ = saved[t]
        grad_h = [a + b for a, b in zip(grads[t], grad_h, strict=True)]
        if projection is not None:
            projected.insert(0, grad_h)
            grad_h = [tally.dot(grad_h, column) for column in transpose(projection)]
        towards, grad_c = lstm_slopes(grad_h, grad_c, (i, f, g, o), cell, before)
        slopes.insert(0, towards)
        grad_h = [tally.dot(slopes[0], column) for column in transpose(weights[1])]
    gradients = _weight_gradients(tally, xs, [step[6] for step in saved], weights, slopes, slopes)
    if projection is not None:
        outputs = transpose([step[7] for step in saved])
        gradients.append([[tally.dot(row, column) for column in outputs] for row in transpose(projected)])
    return gradients


def rnn_backward(
    tally: Tally,
    xs: list[Row],
    state: Sequence[Row],
    weights: Weights,
    grads: list[Row],
    last: Sequence[Row],
    activation: str,
) -> Gradients:
    """Return the gradients of a plain RNN layer, as `lstm_backward`; relu's slope selects."""
    spent = Counter(tally.done)
    hidden = [state[0]]
    for x in xs:
        hidden.append(rnn_step(tally, x, (hidden[-1],), weights, activation)[0])
    tally.done = spent
    slopes = []
    (grad_h,) = last
    for t in reversed(range(len(xs))):
        grad_h = [a + b for a, b in zip(grads[t], grad_h, strict=True)]
        if activation == "tanh":
            slope = [_tanh_slope(grad, value) for grad, value in zip(grad_h, hidden[t + 1], strict=True)]
        else:
            slope = [g if value.value > 0 else tally.zero() for g, value in zip(grad_h, hidden[t + 1], strict=True)]
        slopes.insert(0, slope)
        grad_h = [tally.dot(slope, column) for column in transpose(weights[1])]
    return _weight_gradients(tally, xs, hidden[:-1], weights, slopes, slopes)


def gru_backward(
    tally: Tally, xs: list[Row], state: Sequence[Row], weights: Weights, grads: list[Row], last: Sequence[Row]
) -> Gradients:
    """Return the gradients of a GRU layer, as `lstm_backward`; the two biases of the new gate's have their own."""
    w_ih, w_hh, b_ih, b_hh = weights[:4]
    spent = Counter(tally.done)
    hidden, saved = [state[0]], []
    for x in xs:
        first, second = linear(tally, x, w_ih, b_ih), linear(tally, hidden[-1], w_hh, b_hh)
        size = len(hidden[-1])
        r = [sigmoid(first[n] + second[n]) for n in range(size)]
        z = [sigmoid(first[size + n] + second[size + n]) for n in range(size)]
        new = [tanh(first[2 * size + n] + r[n] * second[2 * size + n]) for n in range(size)]
        saved.append((r, z, new, second[2 * size :]))
        hidden.append(gru_step(tally, x, (hidden[-1],), weights)[0])
    tally.done = spent
    of_input = []
    of_hidden = []
    (grad_h,) = last
    for t in reversed(range(len(xs))):
        r, z, new, side = saved[t]
        grad_h = [a + b for a, b in zip(grads[t], grad_h, strict=True)]
        first, second, kept = gru_slopes(grad_h, (r, z, new), hidden[t], side)
        of_input.insert(0, first)
        of_hidden.insert(0, second)
        back = [tally.dot(second, column) for column in transpose(w_hh)]
        grad_h = [a + b for a, b in zip(back, kept, strict=True)]
    return _weight_gradients(tally, xs, hidden[:-1], weights, of_input, of_hidden)


def layers_backward(
    tally: Tally,
    kind: str,
    xs: list[Row],
    states: Sequence[Sequence[Row]],
    weights: Sequence[Weights],
    grads: list[Row],
    last: Sequence[Sequence[Row]],
    bidirectional: bool,
    dropped: Sequence[tuple[Any, float]] = (),
) -> tuple[list[Row], list[Gradients]]:
    """Return the gradients of the input of a stack of layers, and of the weights of each layer and direction.

    One sample's, as `lstm_backward`; `states` and `last` have one entry for each layer and direction. Gradients of
    an input from two directions are added. `dropped` has dropout's mask and factor for each layer but the last.
    """
    directions = 2 if bidirectional else 1
    spent = Counter(tally.done)
    inputs = [xs]
    for layer in range(len(weights) // directions):
        own = slice(layer * directions, (layer + 1) * directions)
        begin = [[tuple(state)] for state in states[own]]
        (outputs,), _ = run(tally, kind, [inputs[-1]], begin, weights[own], bidirectional)
        if layer < len(dropped):
            kept, factor = dropped[layer]
            outputs = [[x * k * factor for x, k in zip(*rows, strict=True)] for rows in zip(outputs, kept, strict=True)]
        inputs.append(outputs)
    tally.done = spent
    found = []
    for layer in reversed(range(len(weights) // directions)):
        if layer < len(dropped):
            kept, factor = dropped[layer]
            grads = [[x * k * factor for x, k in zip(*rows, strict=True)] for rows in zip(grads, kept, strict=True)]
        width = len(grads[0]) // directions
        parts = []
        for direction in range(directions):
            place = layer * directions + direction
            order = slice(None, None, -1 if direction else 1)
            share = [row[direction * width : (direction + 1) * width] for row in grads]
            arguments = (inputs[layer][order], states[place], weights[place], share[order], last[place])
            gradients = _layer_backward(tally, kind, *arguments)
            parts.append(gradients[0][order])
            found.insert(direction, gradients[1:])
        grads = parts[0]
        if bidirectional:
            grads = [[a + b for a, b in zip(*rows, strict=True)] for rows in zip(*parts, strict=True)]
    return grads, found


def _layer_backward(tally: Tally, kind: str, *arguments: Any) -> Gradients:
    if kind == "LSTM":
        return lstm_backward(tally, *arguments)
    if kind == "GRU":
        return gru_backward(tally, *arguments)
    return rnn_backward(tally, *arguments, kind)


def _weight_gradients(
    tally: Tally, xs: list[Row], hidden: list[Row], weights: Weights, of_input: list[Row], of_hidden: list[Row]
) -> Gradients:
    """Return the gradients from the gates' sums', as far as these come from the input and the hidden state."""
    grad_x = [[tally.dot(row, column) for column in transpose(weights[0])] for row in of_input]
    first, second = transpose(of_input), transpose(of_hidden)
    grad_ih = [[tally.dot(gate, column) for column in transpose(xs)] for gate in first]
    grad_hh = [[tally.dot(gate, column) for column in transpose(hidden)] for gate in second]
    if weights[2] is None:
        return [grad_x, grad_ih, grad_hh]
    return [grad_x, grad_ih, grad_hh, [tally.sum(gate) for gate in first], [tally.sum(gate) for gate in second]]


def _saved_gates(xs: list[Row], state: Sequence[Row], weights: Weights, tally: Tally) -> list[list[Row]]:
    """Return for each step the gates, the cell, cell and hidden state before it, and the output, free of cost."""
    spent = Counter(tally.done)
    hidden, cell = state
    steps = []
    for x in xs:
        sums = gate_sums(tally, x, hidden, weights)
        size = len(cell)
        i, f, g, o = (sums[first : first + size] for first in range(0, 4 * size, size))
        next_hidden, next_cell = lstm_step(tally, x, (hidden, cell), weights)
        gates = [[sigmoid(n) for n in i], [sigmoid(n) for n in f], [tanh(n) for n in g], [sigmoid(n) for n in o]]
        steps.append([*gates, next_cell, cell, hidden, [a * tanh(b) for a, b in zip(gates[3], next_cell, strict=True)]])
        hidden, cell = next_hidden, next_cell
    tally.done = spent
    return steps


def _sigmoid_slope(grad: Number, value: Number) -> Number:
    return grad * (1.0 - value) * value


def _tanh_slope(grad: Number, value: Number) -> Number:
    return grad * (1.0 - value * value)
