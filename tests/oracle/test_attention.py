"""Attention, its backward pass and layers that contain it, against programs that count their operations."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from tests.support.models.parts import Applied
from tests.support.oracle import attention
from tests.support.oracle.claim import DEFAULT, EXACT, check_counts, check_product, check_results, sources
from tests.support.oracle.number import Tally
from tests.support.random_cases import random_cases

aten = torch.ops.aten

cases = random_cases(8)
sizes = st.integers(1, 3)
scales = st.sampled_from([None, None, 0.7, 1.0])


def draw_mask(data, source, queries, keys, *, floats=True):
    """Return None, a float mask to add, or a bool mask that leaves each query at least one key."""
    kind = data.draw(st.sampled_from(["none", "float", "bool"] if floats else ["none", "bool"]))
    if kind == "none":
        return None
    if kind == "float":
        return source(queries, keys)
    visible = source(queries, keys) > 0
    visible[:, 0] = True
    return visible


def as_numbers(tally, mask):
    if mask is None:
        return None
    return mask.numpy() if mask.dtype is torch.bool else tally.numbers(mask)


@cases
@given(sources, sizes, sizes, sizes, sizes, sizes, sizes, scales, st.data())
def test_attention(source, b, h, shared, q, k, d, scale, data):
    dv = data.draw(sizes)
    mask = draw_mask(data, source, q, k)
    causal = mask is None and data.draw(st.booleans())

    def program(tally, *tensors):
        return attention.attention(tally, *tensors, as_numbers(tally, mask), causal, scale)

    check_product(
        program,
        lambda query, key, value: F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=causal, scale=scale, enable_gqa=shared > 1
        ),
        source(b, h * shared, q, d),
        source(b, h, k, d),
        source(b, h, k, dv),
    )


@cases
@given(sources, sizes, sizes, sizes, sizes, sizes, scales, st.data())
def test_flash_attention_for_cpu(source, b, h, q, k, d, scale, data):
    causal = data.draw(st.booleans())
    check_product(
        lambda tally, *tensors: attention.attention(tally, *tensors, None, causal, scale),
        lambda query, key, value: aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, scale=scale
        )[0],
        source(b, h, q, d),
        source(b, h, k, d),
        source(b, h, k, d),
    )


DEFAULT_SKIPPING, EXACT_SKIPPING = (
    replace(table, constants={**table.constants, "attention_skips_masked": 1}) for table in (DEFAULT, EXACT)
)


@cases
@given(sources, sizes, sizes, sizes, sizes, sizes, st.booleans())
def test_attention_that_skips_causally_masked_pairs(source, b, h, q, k, d, causal):
    tally = Tally()
    tensors = (source(b, h, q, d), source(b, h, k, d), source(b, h, k, d))

    def attend(query, key, value):
        return F.scaled_dot_product_attention(query, key, value, is_causal=causal)

    mine = attention.attention(tally, *map(tally.numbers, tensors), None, causal, skip=True)
    check_results(mine, attend(*tensors))
    check_counts(tally, attend, *tensors, default=DEFAULT_SKIPPING, exact=[EXACT_SKIPPING])


@cases
@given(sources, sizes, sizes, sizes, sizes, sizes, scales, st.data())
def test_attention_backward(source, b, h, q, k, d, scale, data):
    mask = draw_mask(data, source, q, k)
    # Each query sees at least one key: otherwise there is no gradient to compare.
    causal = mask is None and data.draw(st.booleans())
    added = (
        None
        if mask is None
        else mask
        if mask.is_floating_point()
        else torch.zeros(q, k).double().masked_fill(~mask, -1e300)
    )
    query, key, value = source(b, h, q, d), source(b, h, k, d), source(b, h, k, d)
    out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, attn_mask=added, scale=scale
    )

    def differentiate(grad, query, key, value, out, logsumexp):
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, out, logsumexp, 0.0, causal, attn_mask=added, scale=scale
        )

    check_product(
        lambda tally, *tensors: attention.attention_backward(
            tally, *tensors, None if added is None else tally.numbers(added), causal, scale
        ),
        differentiate,
        source(b, h, q, d),
        query,
        key,
        value,
        out,
        logsumexp.double(),
    )


@cases
@given(sources, sizes, st.integers(1, 2), sizes, sizes, st.integers(1, 2), st.booleans(), st.booleans(), st.data())
def test_multi_head_attention(source, b, heads, q, k, d, biased, need_weights, data):
    width = heads * d
    model = torch.nn.MultiheadAttention(width, heads, bias=biased, batch_first=True, dtype=torch.float64).eval()
    mask = source(q, k) if data.draw(st.booleans()) else None
    inputs = (source(b, q, width), source(b, k, width), source(b, k, width))
    options = {"attn_mask": mask, "need_weights": need_weights}
    weights = (model.in_proj_weight, model.in_proj_bias, model.out_proj.weight, model.out_proj.bias)
    tally = Tally()
    mine = attention.multi_head_attention(
        tally,
        *map(tally.numbers, inputs),
        *[None if weight is None else tally.numbers(weight) for weight in weights],
        heads,
        mask=as_numbers(tally, mask),
        asks_weights=need_weights,
    )
    check_results(mine, model(*inputs, **options))
    check_counts(tally, lambda *inputs: model(*inputs, **options), *inputs)
    check_counts(
        tally, Applied(lambda self, *inputs: self.model(*inputs, **self.options), model=model, options=options), *inputs
    )


@cases
@given(sources, sizes, st.integers(1, 2), sizes, st.integers(1, 2), sizes, st.booleans())
def test_encoder_layer(source, b, heads, tokens, d, hidden, norm_first):
    model = torch.nn.TransformerEncoderLayer(
        2 * heads * d, 2 * heads, hidden, batch_first=True, norm_first=norm_first, dtype=torch.float64
    ).eval()
    tally = Tally()
    parameters = {name: tally.numbers(parameter) for name, parameter in model.named_parameters()}
    inputs = source(b, tokens, 2 * heads * d)
    mine = attention.encoder_layer(tally, tally.numbers(inputs), parameters, 2 * heads, norm_first, 1e-5)
    check_results(mine, model(inputs))
    check_counts(tally, model, inputs)


@cases
@given(sources, sizes, st.integers(1, 2), sizes, sizes, st.booleans())
def test_fused_multi_head_attention(source, b, heads, tokens, d, need_weights):
    """The fast path's op, called directly, counts the same as the module's slow path."""
    width = heads * d
    weights = (source(3 * width, width), source(3 * width), source(width, width), source(width))

    def attend(query, *weights):
        results = aten._native_multi_head_attention(
            query, query, query, width, heads, *weights, None, need_weights, True
        )
        return results if need_weights else (results[0], None)

    check_product(
        lambda tally, query, *weights: attention.multi_head_attention(
            tally, query, query, query, *weights, heads, asks_weights=need_weights
        ),
        attend,
        source(b, tokens, width),
        *weights,
    )


@cases
@given(sources, sizes, sizes, st.integers(1, 2), sizes, st.booleans())
def test_fused_encoder_layer(source, b, tokens, d, hidden, norm_first):
    """The fast path's op, called directly, without dropout and the surrounding module."""
    width = 2 * d
    shapes = {
        "self_attn.in_proj_weight": (3 * width, width),
        "self_attn.in_proj_bias": (3 * width,),
        "self_attn.out_proj.weight": (width, width),
        "self_attn.out_proj.bias": (width,),
        "norm1.weight": (width,),
        "norm1.bias": (width,),
        "norm2.weight": (width,),
        "norm2.bias": (width,),
        "linear1.weight": (hidden, width),
        "linear1.bias": (hidden,),
        "linear2.weight": (width, hidden),
        "linear2.bias": (width,),
    }
    inputs, parameters = source(b, tokens, width), [source(*shape) for shape in shapes.values()]

    def encode(source, *parameters):
        return aten._transformer_encoder_layer_fwd(
            source, width, 2, *parameters[:4], False, norm_first, 1e-5, *parameters[4:]
        )

    check_product(
        lambda tally, source, *parameters: attention.encoder_layer(
            tally, source, dict(zip(shapes, parameters, strict=True)), 2, norm_first, 1e-5
        ),
        encode,
        inputs,
        *parameters,
    )
