"""Work of an inference engine for a token of a model: products, attention, mixtures and states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from fvflops.devices.kernel_models.fused_attention import Attention
from fvflops.devices.kernel_models.products import Product
from fvflops.serve.cache_size import CacheLayer


class ServingError(ValueError):
    """A model whose serving cannot be estimated, or a layout that does not divide it."""


class Projection(NamedTuple):
    """A product of tokens with a weight of `columns` by `inner` elements.

    `divided` says how ranks of tensor parallelism divide it: its "columns", its "rows" (the inner dimension, so that
    results are summed), or "" where each rank has all of it. `heads` of keys limit the division of their columns, 0 for
    no limit. `per_sequence` is True for logits, which engines compute for each sequence's last token only. `of_cached`
    is True where the model expands all cached tokens of a latent cache at each step; engines fold it into the queries.
    """

    name: str
    columns: int
    inner: int
    divided: str = ""
    heads: int = 0
    per_sequence: bool = False
    is_quantized: bool = True
    of_cached: bool = False

    @property
    def elements(self) -> int:
        """Elements of the weight."""
        return self.columns * self.inner


class AttentionLayer(NamedTuple):
    """Attention of new tokens to a cache: query heads, and the layer's cache. `latent` heads share one latent key.

    `key_size` and `value_size` are elements of a head of a prompt's attention.
    """

    heads: int
    key_size: int
    value_size: int
    cache: CacheLayer


class ExpertLayer(NamedTuple):
    """A mixture of experts with matrices of `hidden` by `inner` elements: two up where it is gated, and one down.

    `runs_all` is True where the model multiplies each token with all experts; engines with `topk` only.
    """

    experts: int
    topk: int
    hidden: int
    inner: int
    gated: bool
    runs_all: bool = False

    @property
    def elements(self) -> int:
        """Elements of the weights of all experts."""
        return self.experts * (3 if self.gated else 2) * self.hidden * self.inner


class ImageEncoder(NamedTuple):
    """Work of `number` images of a prompt, each of which becomes `tokens` tokens.

    `products` and `attention` are one image's, with their numbers; `kernels` are its normalisations and
    activation functions, `macs` its multiply-adds.
    """

    number: int
    tokens: int
    products: Mapping[Product, int]
    attention: Mapping[Attention, int]
    kernels: int
    macs: int

    @property
    def launches(self) -> int:
        """Kernels of the encoder, which reads all images of a prompt at once."""
        return sum(self.products.values()) + sum(self.attention.values()) + self.kernels

    def ranks(self, ranks: int) -> int:
        """Return how many ranks of tensor parallelism divide it: all, or one where they do not divide its heads."""
        return 1 if any(shape.heads % ranks for shape in self.attention) else ranks

    def activation_bytes(self, ranks: int) -> float:
        """Return the bytes of the widest product's operand and result, in two bytes an element."""
        widths = [shape.rows * shape.batch * (shape.inner + shape.columns / ranks) for shape in self.products]
        return 2.0 * self.number * max(widths, default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingModel:
    """Work of an engine for a causal language model: each part with the number of layers that have it.

    `states` are layers of the cache with a state, which each step reads and writes. `reductions` are sums over the
    ranks of tensor parallelism a token, `norms` normalisations, of which `divided_norms` are over a divided dimension,
    and `activations` activation functions outside of mixtures. `hidden` is the width of the hidden state, `layers` the
    number of layers. `parameters` are counted in the whole model. `encoder` are products that run once a request for
    each token of an encoder, keys and values of cross attention among them, and `encoder_kernels` its normalisations
    and activation functions. It reads `encoded` tokens of each request, 0 where as many as the request has. `images`
    are each prompt's, None where prompts are text; `reads_images` is whether the model accepts images.
    `balances_experts` is whether a bias of the router keeps experts about equally busy. `positions` is the maximum of
    tokens in its configuration, 0 if there is none.
    """

    name: str
    layers: int
    hidden: int
    vocabulary: int
    parameters: int
    projections: Mapping[Projection, int]
    attention: Mapping[AttentionLayer, int]
    experts: Mapping[ExpertLayer, int]
    states: Mapping[CacheLayer, int]
    cache: tuple[CacheLayer, ...]
    reductions: int
    norms: int
    activations: int
    encoder: Mapping[Projection, int] = field(default_factory=dict)
    encoder_attention: Mapping[AttentionLayer, int] = field(default_factory=dict)
    cross_attention: Mapping[AttentionLayer, int] = field(default_factory=dict)
    divided_norms: int = 0
    encoder_kernels: int = 0
    encoded: int = 0
    images: ImageEncoder | None = None
    reads_images: bool = False
    balances_experts: bool = False
    positions: int = 0

    @property
    def mixtures(self) -> int:
        """Layers with experts."""
        return sum(self.experts.values())

    def encoder_macs(self, encoded: int) -> int:
        """Return the multiply-adds of an encoder's products and attention for `encoded` tokens."""
        total = sum(count * encoded * item.elements for item, count in self.encoder.items())
        return total + attention_macs(self.encoder_attention, encoded, encoded)


def attention_macs(layers: Mapping[AttentionLayer, int], queries: int, keys: int) -> int:
    """Return the multiply-adds of all pairs of queries and keys, given their numbers."""
    pairs = queries * keys
    return sum(count * pairs * layer.heads * (layer.key_size + layer.value_size) for layer, count in layers.items())
