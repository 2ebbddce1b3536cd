"""The formulas of recurrence, attention and fused layers against the products that torch runs for them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
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


# --- fused layers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "inputs", "hidden"),
    [
        (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1, 16),
        (nn.MultiheadAttention(8, 2, batch_first=True), 3, 0),
    ],
)
def test_a_fused_layer_is_its_slow_path(layer, inputs, hidden):
    layer, data = layer.eval(), (torch.ones(3, 5, 8),) * inputs
    with torch.no_grad(), Products(apart=False) as fused:
        layer(*data)
    assert fused.unknown == []
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        slow = run(layer, *data)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    assert fused.macs == slow.macs == 3 * 5 * (4 * 8 * 8 + 2 * 8 * hidden) + 2 * 3 * 5 * 5 * 8
    assert fused.flops == slow.flops if hidden else fused.activations == slow.activations
