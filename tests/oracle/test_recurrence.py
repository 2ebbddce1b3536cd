"""The oracle of recurrence: RNN, LSTM and GRU layers and cells, against programs that count their ops."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fvflops.capture.recorder.tensor_specs import describe_call
from tests.support.oracle import recurrence
from tests.support.oracle.claim import check_counts, check_price, check_results, sources
from tests.support.oracle.number import Tally
from tests.support.random_cases import random_cases

aten = torch.ops.aten

cases = random_cases(6)
sizes = st.integers(1, 3)

KINDS = ("tanh", "relu", "GRU", "LSTM")


def make(kind, inputs, hidden, **options):
    options = {"dtype": torch.float64, **options}
    if kind in ("tanh", "relu"):
        return torch.nn.RNN(inputs, hidden, nonlinearity=kind, **options).eval()
    return getattr(torch.nn, kind)(inputs, hidden, **options).eval()


def weights_of(tally, model):
    """Return for each layer and direction its weights, biases and projection, None for each that is missing."""
    result = []
    for layer in range(model.num_layers):
        for suffix in ("", "_reverse")[: 2 if model.bidirectional else 1]:
            names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")
            found = [getattr(model, f"{name}_l{layer}{suffix}", None) for name in names]
            result.append([None if weight is None else tally.numbers(weight) for weight in found])
    return result


def run(tally, kind, model, sequences):
    """Return what the program makes of samples whose first states are zeros: outputs, and the last states in order."""
    places = model.num_layers * (2 if model.bidirectional else 1)
    own = tally.zeros(getattr(model, "proj_size", 0) or model.hidden_size)
    state = (own, tally.zeros(model.hidden_size)) if kind == "LSTM" else (own,)
    states = [[state for _ in sequences] for _ in range(places)]
    outputs, last = recurrence.run(tally, kind, sequences, states, weights_of(tally, model), model.bidirectional)
    parts = [[[sample[part] for sample in samples] for samples in last] for part in range(len(state))]
    return outputs, parts


def split_states(kind, states):
    return states if kind == "LSTM" else (states,)


@pytest.mark.parametrize("kind", KINDS)
@cases
@given(sources, sizes, sizes, sizes, sizes, st.integers(1, 2), st.booleans(), st.booleans(), st.booleans())
def test_layers(kind, source, steps, batch, inputs, hidden, layers, two_ways, biased, projected):
    more = {"proj_size": 1} if kind == "LSTM" and projected and hidden > 1 else {}
    model = make(kind, inputs, hidden, num_layers=layers, bidirectional=two_ways, bias=biased, batch_first=True, **more)
    x = source(batch, steps, inputs)
    tally = Tally()
    outputs, parts = run(tally, kind, model, tally.numbers(x))
    expected, states = model(x)
    check_results([outputs, *parts], [expected, *split_states(kind, states)])
    check_counts(tally, model, x)


@pytest.mark.parametrize("kind", KINDS)
@cases
@given(sources, st.lists(sizes, min_size=1, max_size=3), sizes, sizes, st.integers(1, 2), st.booleans())
def test_packed_sequences(kind, source, lengths, inputs, hidden, layers, two_ways):
    """Sequences of different lengths: only the steps that are there run."""
    model = make(kind, inputs, hidden, num_layers=layers, bidirectional=two_ways)
    sequences = [source(length, inputs) for length in sorted(lengths, reverse=True)]
    packed = torch.nn.utils.rnn.pack_sequence(sequences)
    tally = Tally()
    outputs, parts = run(tally, kind, model, [tally.numbers(sequence) for sequence in sequences])
    expected, states = model(packed)
    rows = torch.nn.utils.rnn.unpack_sequence(expected)
    check_results([*outputs, *parts], [*rows, *split_states(kind, states)])
    check_counts(tally, model, packed)


@pytest.mark.parametrize("kind", KINDS)
@cases
@given(sources, sizes, sizes, sizes, st.booleans())
def test_cells(kind, source, batch, inputs, hidden, biased):
    options = {"bias": biased, "dtype": torch.float64}
    if kind in ("tanh", "relu"):
        model = torch.nn.RNNCell(inputs, hidden, nonlinearity=kind, **options)
    else:
        model = getattr(torch.nn, f"{kind}Cell")(inputs, hidden, **options)
    x, states = source(batch, inputs), [source(batch, hidden) for _ in range(2 if kind == "LSTM" else 1)]
    tally = Tally()
    found = [getattr(model, name) for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
    weights = [None if weight is None else tally.numbers(weight) for weight in found] + [None]
    results = recurrence.step(tally, kind, tally.numbers(x), [tally.numbers(state) for state in states], weights)
    state = tuple(states) if kind == "LSTM" else states[0]
    expected = model(x, state)
    check_results(results, expected if kind == "LSTM" else (expected,))
    check_counts(tally, model, x, state)


MODES = {"relu": 0, "tanh": 1, "LSTM": 2, "GRU": 3}


@pytest.mark.parametrize("kind", KINDS)
@cases
@given(sources, sizes, sizes, sizes, st.booleans())
def test_backward(kind, source, steps, inputs, hidden, biased):
    """One layer, one sample: what the fused ops compute that exist where a model trains, priced by their shapes."""
    model = make(kind, inputs, hidden, bias=biased)
    states = [source(1, 1, hidden) for _ in range(2 if kind == "LSTM" else 1)]
    x = source(steps, 1, inputs).requires_grad_()
    y, last = model(x, tuple(states) if kind == "LSTM" else states[0])
    last = split_states(kind, last)
    grads = [source(*tensor.shape) for tensor in (y, *last)]
    expected = torch.autograd.grad((y, *last), (x, *model.parameters()), grads)

    tally = Tally()
    weights = weights_of(tally, model)[0]
    rows, towards = (tally.numbers(tensor[:, 0].detach()) for tensor in (x, grads[0]))
    state, ends = ([tally.numbers(tensor[0, 0]) for tensor in tensors] for tensors in (states, grads[1:]))
    mine = recurrence.layer_backward(tally, kind, rows, state, weights, towards, ends)
    check_results(mine, [expected[0].squeeze(1), *expected[1:]])

    parameters = [parameter.detach() for parameter in model.parameters()]
    signatures = [_describe_cudnn(kind, x, parameters, states, y, grads)]
    if kind == "LSTM":
        signatures.append(_describe_onednn(x, parameters, states, y, last, grads))
    for signature in signatures:
        check_price(signature, tally)


def _describe_cudnn(kind, x, parameters, states, y, grads):
    """Return the signature of cuDNN's backward of one layer, which asks for all gradients."""
    cell, grad_of_cell = (states[1], grads[2]) if kind == "LSTM" else (None, None)
    arguments = (x, parameters, len(parameters), torch.empty(0), states[0], cell, y, *grads[:2], grad_of_cell)
    options = (MODES[kind], y.shape[-1], 0, 1, False, 0.0, True, False, [], None, torch.empty(0), [True] * 4)
    results = (x, torch.empty(0), states[0], cell, parameters)
    return describe_call(aten._cudnn_rnn_backward.default, (*arguments, *options), {}, results)


def _describe_onednn(x, parameters, states, y, last, grads):
    """Return the signature of oneDNN's backward of one layer; absent biases are zeros of the weights' shapes."""
    weights = parameters if len(parameters) == 4 else [*parameters, *map(torch.zeros_like, parameters)]
    options = (False, 2, y.shape[-1], 1, len(parameters) == 4, True, False, [], False, torch.empty(0))
    arguments = (x, *weights, *states, y, *last, *grads, *options)
    return describe_call(aten.mkldnn_rnn_layer_backward.default, arguments, {}, (x, *weights, *states))


def test_a_shorter_sequence_costs_less():
    """What the packing test could not see if the program ran every sample to the longest one's end."""
    model = make("tanh", 1, 1)
    tallies = []
    for lengths in ((2, 2), (2, 1)):
        tally = Tally()
        outputs, _ = run(tally, "tanh", model, [tally.numbers(torch.ones(length, 1)) for length in lengths])
        assert [len(output) for output in outputs] == list(lengths)
        tallies.append(tally.macs)
    assert tallies == [8, 6]
