"""The formulas of recurrence, attention and fused layers against the products that torch runs for them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pack_padded_sequence

from fvflops.formulas import Call
from fvflops.formulas.registry import FORMULAS
from fvflops.trace import TensorSpec
from tests.support.pricing_mode import Products, meta, price, run

# --- recurrence ------------------------------------------------------------------------------------------------------

RECURRENT = [
    pytest.param(layer, options, id=f"{layer.__name__}-{options}")
    for layer, options in [
        (nn.LSTM, {}),
        (nn.LSTM, {"num_layers": 2, "bidirectional": True}),
        (nn.LSTM, {"num_layers": 2, "bidirectional": True, "proj_size": 2, "bias": False}),
        (nn.GRU, {}),
        (nn.GRU, {"num_layers": 3, "bidirectional": True}),
        (nn.RNN, {"nonlinearity": "tanh"}),
        (nn.RNN, {"nonlinearity": "relu", "num_layers": 2, "batch_first": True}),
    ]
]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("layer", "options"), RECURRENT)
def test_a_recurrent_layer_is_the_products_of_its_cells(layer, options, packed):
    module = layer(6, 5, **options)
    batch_first = options.get("batch_first", False)
    data = torch.ones(3, 7, 6) if batch_first else torch.ones(7, 3, 6)
    if packed:
        data = pack_padded_sequence(data, torch.tensor([7, 4, 2]), batch_first=batch_first)
    with torch.backends.mkldnn.flags(enabled=False):
        whole, parts = run(module, data, apart=False), run(module, data)
    assert whole.macs == parts.macs > 0
    assert whole.activations == parts.activations
    steps = 13 if packed else 21
    assert whole.macs == steps * sum(weight.numel() for weight in module.parameters() if weight.ndim == 2)


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_a_cell_is_its_two_linears(cell):
    module = cell(6, 5)
    whole, parts = run(module, torch.ones(3, 6), apart=False), run(module, torch.ones(3, 6))
    assert (whole.macs, whole.activations) == (parts.macs, parts.activations)
    assert whole.macs == 3 * sum(weight.numel() for weight in module.parameters() if weight.ndim == 2)


def test_an_lstms_kernel_and_its_backward():
    module, data = nn.LSTM(6, 5), torch.ones(7, 3, 6, requires_grad=True)
    with Products(apart=False) as forward:
        loss = module(data)[0].sum()
    with Products(apart=False) as backward:
        loss.backward()
    assert forward.macs == 21 * (20 * 6 + 20 * 5)
    assert backward.macs == 2 * forward.macs


# --- attention -------------------------------------------------------------------------------------------------------


@given(
    st.integers(1, 2), st.integers(1, 3), st.integers(1, 3), st.integers(1, 5), st.integers(1, 5), st.integers(1, 4),
    st.integers(1, 4),
)  # fmt: skip
def test_attention_is_its_two_products(B, groups, Hk, Q, K, D, Dv):
    query, key, value = meta(B, Hk * groups, Q, D), meta(B, Hk, K, D), meta(B, Hk, K, Dv)
    whole = price("scaled_dot_product_attention", args=(query, key, value), enable_gqa=groups > 1)
    assert whole.macs == B * Hk * groups * Q * K * (D + Dv)
    assert whole.activations == B * Hk * groups * Q * (K + Dv)
    repeated = [tensor.repeat_interleave(groups, 1) for tensor in (key, value)]
    scores = price("matmul", args=(query, repeated[0].mT))
    assert whole.macs == scores.macs + price("matmul", args=(meta(B, Hk * groups, Q, K), repeated[1])).macs


@pytest.mark.parametrize(
    ("query", "key", "pairs"),
    [
        ((5, 4), (6, 4), 30),
        ((3, 5, 4), (3, 6, 4), 90),
        ((2, 3, 5, 4), (1, 1, 6, 4), 180),
        ((2, 0, 5, 4), (2, 0, 6, 4), 0),
    ],
)
def test_attention_takes_any_batch(query, key, pairs):
    specs = {"query": TensorSpec(query), "key": TensorSpec(key), "value": TensorSpec(key)}
    assert FORMULAS["attention"](Call("attention", specs, (TensorSpec(query),))).macs == pairs * 8


def test_the_kernel_under_autograd_and_its_backward():
    query, key, value = (torch.ones(2, 4, size, 8, requires_grad=True) for size in (6, 5, 5))
    with Products(apart=False) as forward:
        loss = scaled_dot_product_attention(query, key, value).sum()
    with Products(apart=False) as backward:
        loss.backward()
    pairs = 2 * 4 * 6 * 5
    assert forward.macs == pairs * 16
    assert backward.macs == pairs * 40  # the four products of the math below, and the scores again
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        loss = scaled_dot_product_attention(query, key, value).sum()
    with Products(apart=False) as backward:
        loss.backward()
    assert backward.macs == pairs * 32


def test_packed_sequences_count_as_the_longest():
    specs = dict.fromkeys(("query", "key", "value"), TensorSpec((11, 4, 8)))
    arguments = {**specs, "cum_seq_q": TensorSpec((3,)), "max_q": 6, "max_k": 5}
    assert FORMULAS["attention_bshd"](Call("flash", arguments, (TensorSpec((11, 4, 8)),))).macs == 2 * 4 * 6 * 5 * 16


def test_flex_attention_has_no_names():
    spec, arguments = TensorSpec((2, 4, 6, 8)), ("argument_0", "argument_1", "argument_2")
    call = Call("higher_order::flex_attention", {**dict.fromkeys(arguments, spec), "argument_3": None}, (spec,))
    assert FORMULAS["attention"](call).macs == 2 * 4 * 6 * 6 * 16


# --- fused layers ----------------------------------------------------------------------------------------------------


def test_a_fused_encoder_layer_is_its_slow_path():
    layer, data = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), torch.ones(3, 5, 8)
    with torch.no_grad(), Products(apart=False) as fused:
        layer(data)
    assert fused.unknown == []
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        slow = run(layer, data)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    assert (fused.macs, fused.flops) == (slow.macs, slow.flops)
    assert fused.macs == 3 * 5 * (4 * 8 * 8 + 2 * 8 * 16) + 2 * 3 * 5 * 5 * 8


def test_a_fused_attention_is_its_slow_path():
    layer, data = nn.MultiheadAttention(8, 2, batch_first=True).eval(), torch.ones(3, 5, 8)
    with torch.no_grad(), Products(apart=False) as fused:
        layer(data, data, data)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        slow = run(layer, data, data, data)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    assert (fused.macs, fused.activations) == (slow.macs, slow.activations)
