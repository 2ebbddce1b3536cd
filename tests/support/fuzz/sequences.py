"""Blocks of sequences: linear layers, recurrences, attention and transformers, embeddings."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.support.fuzz.block import Draw, Function, Kind, Made, kinds, weight
from tests.support.models.parts import Parts

_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


def linear(draw):
    c, out = draw.shape[-1], draw.size(1, 12)
    return Made(nn.Linear(c, out, bias=draw.flag()), draw.positions * c * out)


class First(Parts):
    def forward(self, x):
        return self.module(x)[0]


def recurrence(draw):
    """Multiply-adds of a step: gates by hidden, times what comes in and what comes back; and a projection's."""
    n, t, c = draw.shape
    kind = draw.of("LSTM", "GRU", "RNN")
    hidden, layers, bidirectional = draw.size(2, 6), draw.size(1, 3), draw.flag()
    projected = draw.of(0, hidden - 1) if kind == "LSTM" else 0
    options = {"proj_size": projected} if projected else {}
    if kind == "RNN":
        options["nonlinearity"] = draw.of("tanh", "relu")
    if layers > 1:
        options["dropout"] = draw.of(0.0, 0.3)
    made = getattr(nn, kind)(
        c, hidden, layers, bias=draw.flag(), batch_first=True, bidirectional=bidirectional, **options
    )
    back, directions, macs = projected or hidden, 1 + bidirectional, 0
    for layer in range(layers):
        into = c if layer == 0 else directions * back
        macs += directions * n * t * (_GATES[kind] * hidden * (into + back) + projected * hidden)
    return Made(First(module=made), macs, backward=None)


class Cells(Parts):
    def forward(self, x):
        state, outputs = None, []
        for token in x.unbind(1):
            state = self.cell(token, state)
            outputs.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(outputs, 1)


def cell(draw):
    n, t, c = draw.shape
    kind, hidden = draw.of("LSTM", "GRU", "RNN"), draw.size(2, 6)
    made = getattr(nn, f"{kind}Cell")(c, hidden, bias=draw.flag())
    return Made(Cells(cell=made), n * t * _GATES[kind] * hidden * (c + hidden), backward=None)


class SelfAttention(Parts):
    """Multi-head attention of a sequence to itself or to another, with or without its weights and a mask."""

    def forward(self, x):
        memory = x if self.keys == x.shape[1] else x[:, : self.keys]
        mask = None
        if self.causal:
            mask = torch.ones(x.shape[1], memory.shape[1], dtype=torch.bool, device=x.device).triu(1)
        return self.attention(x, memory, memory, need_weights=self.weights, attn_mask=mask)[0]


def heads_of(draw: Draw, width: int) -> int:
    return draw.divisor(width)


def multi_head_attention(draw):
    """Four projections, and two products of every query with every key, of which two options add one each."""
    n, t, c = draw.shape
    keys = draw.of(t, draw.size(1, t))
    more_keys, zero_key = draw.flag(), draw.rng.random() < 0.3
    causal = draw.flag() and not (more_keys or zero_key)
    attention = nn.MultiheadAttention(
        c,
        heads_of(draw, c),
        dropout=draw.of(0.0, 0.2),
        bias=draw.flag(),
        add_bias_kv=more_keys,
        add_zero_attn=zero_key,
        kdim=c if draw.flag() else None,
        batch_first=True,
    )
    projections = 2 * n * t * c * c + 2 * n * keys * c * c
    products = 2 * n * t * (keys + more_keys + zero_key) * c
    macs = projections + products
    # The fused kernel computes the scores again.
    backward = (2 * macs, 2 * projections + products * 5 // 2)
    return Made(SelfAttention(attention=attention, keys=keys, weights=draw.flag(), causal=causal), macs, backward)


def attention(draw):
    """Scaled dot-product attention, its heads the channels: grouped queries, masks, and keys of another number."""
    n, t, c = draw.shape
    groups, heads, width = draw.of(1, 1, 2), draw.size(1, 3), draw.of(4, 8)
    queries = groups * heads
    kind = draw.of("none", "causal", "bool", "float")
    dropout, scale = draw.of(0.0, 0.0, 0.3), draw.of(None, 0.7)

    def forward(x, q, k, v):
        query = (x @ q).unflatten(-1, (queries, width)).transpose(1, 2)
        key, value = ((x @ w).unflatten(-1, (heads, width)).transpose(1, 2) for w in (k, v))
        mask = None
        if kind == "bool":
            mask = torch.ones(t, t, dtype=torch.bool, device=x.device).tril()
        elif kind == "float":
            mask = torch.zeros(t, t, device=x.device)
        out = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=kind == "causal",
            scale=scale,
            enable_gqa=groups > 1,
        )
        return out.transpose(1, 2).flatten(2)

    projections = n * t * c * width * (queries + 2 * heads)
    products = 2 * n * queries * t * t * width
    module = Function(forward, weight(c, queries * width), weight(c, heads * width), weight(c, heads * width))
    return Made(module, projections + products, (2 * (projections + products), 2 * projections + products * 5 // 2))


def encoder_layer(draw):
    n, t, c = draw.shape
    ffn = draw.size(2, 9)
    layer = nn.TransformerEncoderLayer(
        c,
        heads_of(draw, c),
        ffn,
        dropout=draw.of(0.0, 0.1),
        activation=draw.of("relu", "gelu", F.silu),
        norm_first=draw.flag(),
        bias=draw.flag(),
        batch_first=True,
    )
    layers = draw.size(1, 2)
    module = layer if layers == 1 else nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    projections = layers * (4 * n * t * c * c + 2 * n * t * c * ffn)
    products = layers * 2 * n * t * t * c
    return Made(module, projections + products, (2 * (projections + products), 2 * projections + products * 5 // 2))


class Decoder(Parts):
    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.layer(x, x[:, : self.keys], tgt_mask=mask, tgt_is_causal=True)


def decoder_layer(draw):
    n, t, c = draw.shape
    ffn, keys = draw.size(2, 9), draw.size(1, t)
    layer = nn.TransformerDecoderLayer(
        c, heads_of(draw, c), ffn, dropout=draw.of(0.0, 0.1), norm_first=draw.flag(), batch_first=True
    )
    projections = 6 * n * t * c * c + 2 * n * keys * c * c + 2 * n * t * c * ffn
    products = 2 * n * t * (t + keys) * c
    return Made(
        Decoder(layer=layer, keys=keys),
        projections + products,
        (2 * (projections + products), 2 * projections + products * 5 // 2),
    )


class LookedUp(Parts):
    """A table looked up by what the model computes, times a number by which gradients reach what is in front of it."""

    def forward(self, x):
        return self.table(x.argmax(-1)) * x.mean()


def embedding(draw):
    table = nn.Embedding(draw.shape[-1], draw.size(1, 8), padding_idx=draw.of(None, 0), scale_grad_by_freq=draw.flag())
    return Made(LookedUp(table=table))


def embedding_bag(draw):
    bag = nn.EmbeddingBag(draw.shape[-1], draw.size(1, 8), mode=draw.of("sum", "mean", "max"))
    return Made(LookedUp(table=bag))


class Tied(Parts):
    """A linear layer called twice, and its weight used once more; an attribute of another name holds it too."""

    def forward(self, x):
        return F.linear(self.again(self.layer(x)), self.layer.weight.t())


def tied(draw):
    c = draw.shape[-1]
    layer = nn.Linear(c, c)
    return Made(Tied(layer=layer, again=layer), 3 * draw.positions * c * c)


KINDS = {
    **kinds("sequence", linear),
    "linear_of_vector": Kind("vector", linear),
    **kinds("sequence", recurrence, cell, multi_head_attention, attention, encoder_layer, decoder_layer, embedding),
    **kinds("sequence", embedding_bag, gives="vector"),
    **kinds("sequence", tied),
}
