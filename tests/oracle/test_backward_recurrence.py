"""The backward pass of recurrences in full: stacks, two directions, projections, dropout, frozen weights, cells."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fvflops import FlopCountAnalysis, record_call
from fvflops.capture.recorder.tensor_specs import describe_call
from tests.support.models.parts import Parts
from tests.support.oracle import recurrence
from tests.support.oracle.claim import DEFAULT, EXACT, check_price, check_results, sources
from tests.support.oracle.number import Tally
from tests.support.random_cases import random_cases

aten = torch.ops.aten

cases = random_cases(5)
sizes = st.integers(1, 3)

MODES = {"relu": 0, "tanh": 1, "LSTM": 2, "GRU": 3}
every_kind = pytest.mark.parametrize("kind", MODES)
NOTHING = torch.empty(0)


def make(kind, *args, **options):
    if kind in ("tanh", "relu"):
        return nn.RNN(*args, nonlinearity=kind, dtype=torch.float64, **options)
    return getattr(nn, kind)(*args, dtype=torch.float64, **options)


def weights_of(layer, number=0):
    """Return for each direction the parameters of a layer: weights, biases and projection, or None."""
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")
    ways = ("", "_reverse")[: 2 if layer.bidirectional else 1]
    return [[getattr(layer, f"{name}_l{number}{way}", None) for name in names] for way in ways]


def describe(op, kind, x, parameters, states, y, grads, mask, **options):
    """Return the signature of the backward of a whole stack as cuDNN or MIOpen runs it."""
    cell, grad_of_cell = (states[1], grads[2]) if kind == "LSTM" else (None, None)
    layers, dropout, two_ways = (options.get(name, 0) for name in ("layers", "dropout", "two_ways"))
    head = (x, parameters, options["stride"], NOTHING, states[0], cell, y, *grads[:2], grad_of_cell, MODES[kind])
    projected = () if op is aten.miopen_rnn_backward.default else (options.get("projection", 0),)
    tail = (layers, False, dropout, True, bool(two_ways), [], None, NOTHING, mask)
    results = (x, NOTHING, states[0], cell, parameters)
    return describe_call(op, (*head, options["hidden"], *projected, *tail), {}, results)


@every_kind
@cases
@given(sources, sizes, sizes, sizes, st.integers(1, 2), st.booleans(), st.booleans(), st.booleans())
def test_a_stack_of_layers(kind, source, steps, inputs, hidden, layers, two_ways, biased, dropping):
    """Against layers of torch's, one on the other with dropout between them that is written out."""
    ways, factor = 1 + two_ways, 2.0
    widths = [inputs, *[hidden * ways] * (layers - 1)]
    stack = [make(kind, width, hidden, bias=biased, bidirectional=two_ways) for width in widths]
    parts = 2 if kind == "LSTM" else 1
    states = [[source(ways, 1, hidden) for _ in range(parts)] for _ in stack]
    kept = [(source(steps, 1, hidden * ways) > 0).double() for _ in stack[1:]] if dropping else []
    x = source(steps, 1, inputs).requires_grad_()
    y, last = x, []
    for place, (layer, state) in enumerate(zip(stack, states, strict=True)):
        y, end = layer(y, tuple(state) if kind == "LSTM" else state[0])
        last.append(end if kind == "LSTM" else (end,))
        if place < len(kept):
            y = y * kept[place] * factor
    slopes = source(*y.shape), [[source(*part.shape) for part in end] for end in last]
    parameters = [parameter for layer in stack for parameter in layer.parameters()]
    flat = [part for end in last for part in end], [part for end in slopes[1] for part in end]
    expected = torch.autograd.grad((y, *flat[0]), (x, *parameters), (slopes[0], *flat[1]))

    tally = Tally()

    def rows_of(ends):
        return [[tally.numbers(part[way, 0].detach()) for part in end] for end in ends for way in range(ways)]

    weights = [
        [None if weight is None else tally.numbers(weight.detach()) for weight in own]
        for layer in stack
        for own in weights_of(layer)
    ]
    grad_x, found = recurrence.layers_backward(
        tally,
        kind,
        tally.numbers(x[:, 0].detach()),
        rows_of(states),
        weights,
        tally.numbers(slopes[0][:, 0]),
        rows_of(slopes[1]),
        two_ways,
        [(mask[:, 0].numpy(), factor) for mask in kept],
    )
    check_results([grad_x, *[gradient for own in found for gradient in own]], [expected[0].squeeze(1), *expected[1:]])

    options = {"layers": layers, "two_ways": two_ways, "hidden": hidden, "stride": 4 if biased else 2}
    options["dropout"] = 0.5 if kept else 0.0
    given_ = [[torch.cat([state[part] for state in states]) for part in range(parts)], y]
    given_.append([slopes[0], *[torch.cat([end[part] for end in slopes[1]]) for part in range(parts)]])
    plain = [parameter.detach() for parameter in parameters]
    for op in (aten._cudnn_rnn_backward.default, aten.miopen_rnn_backward.default):
        check_price(describe(op, kind, x.detach(), plain, *given_, [True] * 4, **options), tally)
    if kind == "LSTM":
        arguments = (NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, x.detach(), NOTHING, given_[0], plain)
        more = (biased, layers, options["dropout"], True, two_ways, False)
        results = (x, plain, given_[0])
        check_price(describe_call(aten.lstm_mps_backward.default, (*arguments, *more), {}, results), tally)

    # Frozen weights: without the products of their gradients, and the sums of the biases'.
    frozen = describe(
        aten._cudnn_rnn_backward.default, kind, x.detach(), plain, *given_, [True] * 3 + [False], **options
    )
    ours, all_ = EXACT.price(frozen), tally.flops(dict(EXACT.constants))
    assert 2 * ours.macs == tally.macs == 2 * DEFAULT.price(frozen).macs
    assert all_ - 2 * ours.macs - ours.flops == tally.macs + tally_of_biases(plain, steps)


def tally_of_biases(parameters, steps):
    """Return the additions that make the gradients of biases: one for each of their numbers in each step."""
    return steps * sum(parameter.numel() for parameter in parameters if parameter.ndim == 1)


@cases
@given(sources, sizes, sizes, st.integers(2, 3), st.booleans(), st.booleans())
def test_a_projection(source, steps, inputs, hidden, biased, two_ways):
    """The gradients reach the cell through the projection, by which there are fewer of them to add."""
    ways, size = 1 + two_ways, hidden - 1
    layer = make("LSTM", inputs, hidden, bias=biased, bidirectional=two_ways, proj_size=size)
    states = [source(ways, 1, size), source(ways, 1, hidden)]
    x = source(steps, 1, inputs).requires_grad_()
    y, last = layer(x, tuple(states))
    slopes = [source(*tensor.shape) for tensor in (y, *last)]
    parameters = list(layer.parameters())
    expected = torch.autograd.grad((y, *last), (x, *parameters), slopes)
    tally = Tally()
    weights = [
        [None if weight is None else tally.numbers(weight.detach()) for weight in own] for own in weights_of(layer)
    ]
    starts, ends = (
        [[tally.numbers(part[way, 0]) for part in parts] for way in range(ways)] for parts in (states, slopes[1:])
    )
    rows = tally.numbers(x[:, 0].detach()), starts, weights, tally.numbers(slopes[0][:, 0]), ends, two_ways
    grad_x, found = recurrence.layers_backward(tally, "LSTM", *rows)
    check_results([grad_x, *[gradient for own in found for gradient in own]], [expected[0].squeeze(1), *expected[1:]])
    options = {"layers": 1, "two_ways": two_ways, "hidden": hidden, "stride": 5 if biased else 3, "projection": size}
    plain = [parameter.detach() for parameter in parameters]
    call = (aten._cudnn_rnn_backward.default, "LSTM", x.detach(), plain, states, y, slopes, [True] * 4)
    check_price(describe(*call, **options), tally)


@cases
@given(sources, sizes, sizes, st.booleans())
def test_a_fused_lstm_cell(source, batch, hidden, biased):
    """The gates alone, whose products are ops of their own: their gradients, and the sum that both biases share."""
    sums, cx = source(batch, 4 * hidden).requires_grad_(), source(batch, hidden).requires_grad_()
    i, f, g, o = (gate.tanh() if n == 2 else gate.sigmoid() for n, gate in enumerate(sums.chunk(4, 1)))
    cy = f * cx + i * g
    slopes = source(batch, hidden), source(batch, hidden)
    expected = torch.autograd.grad((o * cy.tanh(), cy), (sums, cx), slopes)
    tally = Tally()
    kept = [tally.numbers(tensor.detach()) for tensor in (*slopes, i, f, g, o, cy, cx)]
    towards, cells = recurrence.lstm_slopes(*kept[:2], kept[2:6], *kept[6:])
    check_results([towards, cells], expected)
    if biased:
        tally.sum(towards, 0)
    arguments = (*slopes, cx.detach(), cy.detach(), sums.detach(), biased)
    results = (sums, cx, sums[0] if biased else None)
    check_price(describe_call(aten._thnn_fused_lstm_cell_backward_impl.default, arguments, {}, results), tally)


@cases
@given(sources, sizes, sizes, st.booleans())
def test_a_fused_gru_cell(source, batch, hidden, biased):
    first, second = (source(batch, 3 * hidden).requires_grad_() for _ in range(2))
    hx, slope = source(batch, hidden).requires_grad_(), source(batch, hidden)
    parts = list(zip(first.chunk(3, 1), second.chunk(3, 1), strict=True))
    r, z = ((one + other).sigmoid() for one, other in parts[:2])
    new = (parts[2][0] + r * parts[2][1]).tanh()
    expected = torch.autograd.grad((hx - new) * z + new, (first, second, hx), slope)
    tally = Tally()
    kept = [tally.numbers(tensor.detach()) for tensor in (slope, r, z, new, hx, parts[2][1])]
    found = recurrence.gru_slopes(kept[0], kept[1:4], *kept[4:])
    check_results(found, expected)
    if biased:
        for part in found[:2]:
            tally.sum(part, 0)
    arguments = (slope, torch.ones(batch, 5 * hidden), biased)
    results = (first, second, hx, *((first[0], second[0]) if biased else (None, None)))
    check_price(describe_call(aten._thnn_fused_gru_cell_backward.default, arguments, {}, results), tally)


T, B, IN, H = 3, 2, 5, 4


class Fused(Parts):
    """cuDNN's op with the parameters of an LSTM."""

    def forward(self, x, hidden, cell):
        weights = [parameter for _, parameter in self.layer.named_parameters()]
        buffer = torch.empty(0, device=x.device)
        options = (MODES["LSTM"], H, 0, self.layer.num_layers, False, 0.0, True, self.layer.bidirectional, [], None)
        return aten._cudnn_rnn(x, weights, 4, buffer, hidden, cell, *options)


def count(model, inputs, table, **options):
    """Return phase → flops of what runs inside of a model: the loss is outside."""
    trace = record_call(model, inputs, {}, loss=lambda result: result[0].sum(), **options)
    found = {"forward": 0, "backward": 0}
    for entry in FlopCountAnalysis.from_trace(trace, table=table).counts().entries:
        if entry.scope:
            found[entry.phase] += entry.value
    return found


def test_cudnns_op_does_without_frozen_weights():
    """In shapes, on any machine: the op as it is called where the weights, or the inputs, have no gradients."""
    layer = nn.LSTM(IN, H, 2, bidirectional=True)
    forward = T * B * 2 * 4 * H * (IN + H + 2 * H + H)
    units, sums, biases = T * B * 4 * H * (23 + 8), T * B * (IN + 2 * H), T * B * 4 * 4 * H * 2
    for trained in (True, False):
        for parameter in layer.parameters():
            parameter.requires_grad_(trained)
        for wanted in (True, False)[: 1 + trained]:
            x = torch.randn(T, B, IN, requires_grad=wanted)
            inputs = (x, *(torch.zeros(4, B, H) for _ in range(2)))
            options = {"execution": "shapes", "device": "cuda"}
            assert count(Fused(layer=layer), inputs, "default", **options) == {
                "forward": forward,
                # The gradients of input and states are made in any case.
                "backward": forward * (1 + trained),
            }
            exact = count(Fused(layer=layer), inputs, "exact", **options)["backward"]
            assert exact == 2 * forward * (1 + trained) + units + sums + biases * trained


# In the backward of T steps of single ops, where the first hidden state has no gradient: of each unit of each sample
# the products of gates, the slopes of sigmoids and tangents (3 each), and the sums of gradients that meet.
UNFUSED = {
    # Two gradients of each of f*c, i*g and o*tanh(c), but not the first c's; h and c meet between steps.
    "LSTM": (4, (6 * T - 1) + 3 * 5 * T + 2 * (T - 1)),
    # Of r*h and (h - n)*z two each, the sign of n; n is met twice, h three times between steps.
    "GRU": (3, 4 * T + T + 3 * 3 * T + T + 2 * (T - 1)),
    "RNN": (1, 3 * T + (T - 1)),
}


@pytest.mark.parametrize("execution", ["shapes", "real"])
@pytest.mark.parametrize("kind", UNFUSED)
def test_single_ops_by_hand(kind, execution):
    """Beside the gates: the bias of the input once for all steps; that and the weight of the hidden state step by step.

    These are added up: (T - 1) times their size.
    """
    gates, each = UNFUSED[kind]
    layer, x = getattr(nn, kind)(IN, H), torch.randn(T, B, IN, requires_grad=True)
    macs = 2 * T * B * gates * H * (IN + H) - B * gates * H * H
    biases = 2 * T * B * gates * H
    with torch.backends.mkldnn.flags(enabled=False):
        found = count(layer, (x,), "exact", execution=execution)["backward"]
    assert found == 2 * macs + B * H * each + biases + (T - 1) * gates * H * (H + 1)


@pytest.mark.parametrize("execution", ["shapes", "real"])
def test_the_fused_lstm_of_a_cpu_by_hand(execution):
    """One op for each layer and direction, added outside of it: 23 operations and tanh again for each unit."""
    layer, x = nn.LSTM(IN, H, 2, bidirectional=True), torch.randn(T, B, IN, requires_grad=True)
    macs = 2 * T * B * 2 * 4 * H * (IN + H + 2 * H + H)
    units, sums = T * B * 4 * H * (2 * 4 + 23 + 8), T * B * (IN + 2 * H)
    assert count(layer, (x,), "exact", execution=execution)["backward"] == 2 * macs + units + sums
