"""The time of one step of an inference engine: chunks of prompts and one token of each decoding sequence."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from fvflops.devices.kernel_models.fused_attention import Attention
from fvflops.devices.kernel_models.mixtures import Mixture, drawn_rows
from fvflops.devices.kernel_models.recurrent import Recurrence
from fvflops.serve.cache_size import CacheLayer
from fvflops.serve.engine_kernels import NO_OVERHEAD, EngineFigures, EngineKernels
from fvflops.serve.image_encoder import image_seconds
from fvflops.serve.serving_layout import CACHES, WEIGHTS, Precision, ServingLayout
from fvflops.serve.serving_model import AttentionLayer, Projection, ServingModel

# Classes of a step's time.
CLASSES = ("products", "attention", "experts", "states", "memory-bound", "collectives", "encoder", "engine")
_BF16 = WEIGHTS["bf16"]
# How unevenly experts are chosen, as fits measured runs best: by routers with a balancing bias, and by others.
BALANCED, UNBALANCED = 0.6, 1.2
# Numbers of cached tokens of a sequence for which decoding is computed.
_LENGTHS = (0.0, *(1.15**power for power in range(200)))
# Kernels besides products and normalisations: rotary embedding, writing to the cache, attention and its sum of splits;
# a convolution and a step of the state; choosing experts and sorting tokens.
_ATTENTION_KERNELS, _STATE_KERNELS, _ROUTER_KERNELS = 4, 3, 3
# Attention to an encoder's tokens, which writes nothing, and its sum of splits; attention inside an encoder.
_CROSS_KERNELS, _ENCODER_KERNELS = 2, 1


Chunks = Sequence[tuple[int, int]]  # new and cached tokens of prompts


class Work(NamedTuple):
    """Work of one step on one replica: (new, cached) tokens of chunks of prompts, and sequences that decode.

    `cached` is the sum of the cached tokens of these sequences, each of which verifies `drafted` tokens too.
    `all_new` are the new tokens of all replicas, which share the experts: without it each has as many. `encoded` are
    the tokens of each request that the encoder of a model with one reads in this step.
    """

    chunks: tuple[tuple[int, int], ...] = ()
    decoding: int = 0
    cached: float = 0.0
    drafted: int = 0
    all_new: int | None = None
    encoded: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        """New tokens of the step."""
        return sum(new for new, _ in self.chunks) + self.decoding * (1 + self.drafted)

    @property
    def sequences(self) -> int:
        """Positions whose logits the step computes."""
        return len(self.chunks) + self.decoding * (1 + self.drafted)


class _Merged(NamedTuple):
    """Products of one input that an engine runs as one, with the sizes on a rank."""

    columns: int
    inner: int
    per_sequence: bool
    precision: Precision


@dataclass(frozen=True, slots=True)
class EngineStep:
    """Times of steps of a model in a layout; `figures` are the engine's, `is_asynchronous` its scheduling.

    Decoding sequences verify `draft_tokens`, each of which takes the time of one layer to draft. A model with an
    encoder and a decoder reads prompts with its encoder, of `encoded` tokens on average, and decodes after a first
    token of its own.
    """

    model: ServingModel
    layout: ServingLayout
    kernels: EngineKernels
    figures: EngineFigures = NO_OVERHEAD
    is_asynchronous: bool = True
    draft_tokens: int = 0
    encoded: int = 0
    _products: Mapping[_Merged, int] = field(init=False, repr=False, compare=False)
    _encoder: Mapping[_Merged, int] = field(init=False, repr=False, compare=False)
    _known: dict[object, float] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, products in (("_products", self.model.projections), ("_encoder", self.model.encoder)):
            object.__setattr__(self, name, _merge(products, self.layout, bool(self.model.experts)))

    def bound(self, **changes: float) -> EngineStep:
        """Return the steps with the bound of each kernel, with changes to the peaks, and without overhead or drafts."""
        return replace(self, kernels=self.kernels.bound(**changes), figures=NO_OVERHEAD, draft_tokens=0)

    def work(
        self, chunks: Chunks = (), decoding: int = 0, cached: float = 0.0, drafted: int = 0, all_new: int | None = None
    ) -> Work:
        """Return the work of a step; an encoder, if any, reads the prompts and has a part of the cached tokens."""
        images = self.model.images
        if images:  # before the text of a prompt
            read = (images.number * images.tokens,) * sum(not before for _, before in chunks)
            return Work(tuple(chunks), decoding, cached, drafted, all_new, read)
        if not self.model.cross_attention:
            return Work(tuple(chunks), decoding, cached, drafted, all_new)
        own = max(0.0, cached - decoding * self.encoded)
        return Work(((1, 0),) * len(chunks), decoding, own, drafted, all_new, tuple(new for new, _ in chunks))

    def seconds(self, chunks: Chunks, decoding: int, cached: float, all_new: int | None = None) -> float:
        """Return the seconds of a step, as `StepTimes.seconds`."""
        work = self.work(chunks, decoding, cached, self.draft_tokens, all_new)
        kernels = self._with_drafts(work, self._token_seconds(work) + sum(self._length_classes(work).values()))
        return kernels + self._engine_seconds(work, kernels)

    def decode_seconds(self, decoding: int, cached: Sequence[float], all_new: int | None = None) -> list[float]:
        """Return the seconds of steps that only decode, as `StepTimes.decode_seconds`.

        Attention is timed for a geometric series of cached tokens, and interpolated linearly.
        """
        work = self.work((), decoding, 0.0, self.draft_tokens, all_new)
        rest = self._with_drafts(work, self._token_seconds(work)) + self._engine_seconds(work, 0.0)
        found: list[float] = []
        index = bisect_right(_LENGTHS, cached[0], key=lambda length: length * decoding) - 1
        while len(found) < len(cached):
            begin, end = _LENGTHS[index] * decoding, _LENGTHS[index + 1] * decoding
            first, last = (self._once(self._cached_seconds, decoding, tokens) for tokens in (begin, end))
            slope = (last - first) / (end - begin)
            between = cached[len(found) : bisect_left(cached, end, len(found))]
            found += [first + slope * (tokens - begin) + rest for tokens in between]
            index += 1
        return found

    def _cached_seconds(self, decoding: int, cached: float) -> float:
        """Return the seconds of kernels of a step that only decodes which depend on the cached tokens."""
        work = self.work((), decoding, cached, self.draft_tokens)
        return self._with_drafts(work, sum(self._length_classes(work).values()))

    def _once(self, function: Callable[..., float], *arguments: object) -> float:
        """Return the result of a method, of this object or its kernels, which is computed once."""
        key = function.__name__, *arguments
        if key not in self._known:
            self._known[key] = function(*arguments)
        return self._known[key]

    def _with_drafts(self, work: Work, kernels: float) -> float:
        """Return the seconds of kernels and of the draft, which takes a layer's time for each token."""
        return kernels * (1 + self.draft_tokens / self.model.layers) if work.decoding else kernels

    def _token_seconds(self, work: Work) -> float:
        """Return the seconds of kernels whose work depends on the number of tokens only, from a cache."""
        key = work.tokens, work.sequences, bool(work.chunks), work.all_new
        if key not in self._known:
            self._known[key] = sum(self._token_classes(work).values())
        return self._known[key]

    def _token_classes(self, work: Work) -> dict[str, float]:
        """Return class → seconds of kernels that depend on the number of tokens only."""
        computing, experts = (self.figures.computing, self.figures.experts) if work.chunks else (1.0, 1.0)
        return {
            "products": computing * self._product_seconds(self._products, work.tokens, work.sequences),
            "experts": experts * self._once(self._expert_seconds, self._all_new(work)),
            "memory-bound": self._moved_seconds(self._products, work.tokens),
            "collectives": self._collective_seconds(work.tokens, self._all_new(work)),
        }

    def _length_classes(self, work: Work) -> dict[str, float]:
        return {
            "attention": self._attention_seconds(work) + self._cross_seconds(work),
            "states": self._state_seconds(work),
            "encoder": self._encoder_seconds(work),
        }

    def _engine_seconds(self, work: Work, kernels: float) -> float:
        figures = self.figures
        step, sequence = figures.host(is_asynchronous=self.is_asynchronous)
        gaps = figures.kernel * self.launches + figures.rendezvous * self.collectives
        if work.chunks:
            launches = self.launches + (self._encoder_launches if work.encoded else 0)
            gaps = max(gaps, figures.launch * launches - kernels)
        return step + sequence * work.decoding + gaps

    def by_class(self, work: Work) -> dict[str, float]:
        """Return class → seconds of a step, over the stages of a pipeline one after the other."""
        if not work.tokens:
            return dict.fromkeys(CLASSES, 0.0)
        classes = {**self._token_classes(work), **self._length_classes(work)}
        engine = self._engine_seconds(work, sum(classes.values()))
        return {**dict.fromkeys(CLASSES, 0.0), **classes, "engine": engine}

    @property
    def collectives(self) -> int:
        """Collectives of a step."""
        layout, model = self.layout, self.model
        own = model.mixtures if layout.data > 1 else 0
        return 2 * own + (model.reductions - own + model.divided_norms // 2 if layout.tensor > 1 else 0)

    def macs(self, work: Work) -> float:
        """Return the multiply-adds of a step on all GPUs of a replica of the weights."""
        model = self.model
        total = 0.0
        for item, count in model.projections.items():
            total += count * item.elements * (work.sequences if item.per_sequence else work.tokens)
        for mixture, count in model.experts.items():
            total += count * mixture.elements / mixture.experts * mixture.topk * work.tokens
        for layer, count in model.attention.items():
            pairs = sum(_pairs(new, cached, layer.cache) for new, cached in work.chunks)
            if work.decoding:
                pairs += work.decoding * layer.cache.kept(round(work.cached / work.decoding) + 1)
            total += count * layer.heads * (layer.key_size + layer.value_size) * pairs
        for layer, count in model.cross_attention.items():
            pairs = sum(work.encoded) + work.decoding * self.encoded
            total += count * layer.heads * (layer.key_size + layer.value_size) * pairs
        if model.images:
            total += len(work.encoded) * model.images.number * model.images.macs
        return (total + sum(model.encoder_macs(tokens) for tokens in work.encoded)) * self.layout.data

    @property
    def launches(self) -> int:
        """Kernels of a step: an input is scaled for each product of quantized weights."""
        model = self.model
        products = sum((2 if item.precision.nbytes < 2 else 1) * count for item, count in self._products.items())
        attention = _ATTENTION_KERNELS * sum(model.attention.values()) + _STATE_KERNELS * sum(model.states.values())
        attention += _CROSS_KERNELS * sum(model.cross_attention.values())
        # Norms that wait for sums of other ranks are two kernels.
        norms = model.norms + (model.divided_norms if self.layout.tensor > 1 else 0)
        return products + attention + norms + model.activations + _ROUTER_KERNELS * model.mixtures

    @property
    def _encoder_launches(self) -> int:
        if self.model.images:
            return self.model.images.launches
        attention = _ENCODER_KERNELS * sum(self.model.encoder_attention.values())
        return sum(self._encoder.values()) + attention + self.model.encoder_kernels

    def _product_seconds(self, products: Mapping[_Merged, int], tokens: int, sequences: int) -> float:
        total = 0.0
        for item, count in products.items():
            size = (sequences if item.per_sequence else tokens), item.columns, item.inner
            total += count * self._once(self.kernels.product, *size, item.precision)
        return total

    def _attention_seconds(self, work: Work) -> float:
        total = 0.0
        for layer, count in self.model.attention.items():
            for new, cached in work.chunks:
                total += self.figures.computing * count * self._once(self._prompt_seconds, layer, new, cached)
            if work.decoding:
                keys = max(1, round(work.cached / work.decoding) + 1)
                total += count * self.kernels.decode(self._decode(layer, work, keys), self.layout.cache)
        return total

    def _prompt_seconds(self, layer: AttentionLayer, new: int, cached: int) -> float:
        shape = self._attention(layer, 1, new, new + cached)._replace(appends=True)
        if layer.cache.kind == "latent":
            shape = shape._replace(key_heads=shape.heads, key_bytes=2.0)
        return self.kernels.prompt(shape, self.layout.cache)

    def _cross_seconds(self, work: Work) -> float:
        """Return the time of attention to an encoder's tokens, by a first token and by each decoding sequence."""
        sizes = [(1, 1, tokens) for tokens in work.encoded]
        sizes += [(work.decoding, 1 + work.drafted, self.encoded)] * bool(work.decoding)
        return sum(
            count * self.kernels.decode(self._attend(layer, *each), self.layout.cache)
            for layer, count in self.model.cross_attention.items()
            for each in sizes
        )

    def _encoder_seconds(self, work: Work) -> float:
        """Return the time of the encoder, with the keys and values of attention to its tokens."""
        tokens = sum(work.encoded)
        if not tokens:
            return 0.0
        model, layout = self.model, self.layout
        if model.images:
            return len(work.encoded) * self._once(self._image_seconds)
        total = self._product_seconds(self._encoder, tokens, 0) + self._moved_seconds(self._encoder, tokens)
        for layer, count in model.encoder_attention.items():
            total += count * sum(self.kernels.encoder(self._attend(layer, 1, each, each)) for each in work.encoded)
        for item, count in model.encoder.items():
            if item.divided == "rows":
                total += count * self.kernels.collective("all_reduce", layout.tensor, 2.0 * tokens * item.columns)
        return total

    def _image_seconds(self) -> float:
        assert self.model.images is not None
        return image_seconds(self.model.images, self.kernels, self.layout.tensor)

    def _attention(self, layer: AttentionLayer, batch: int, queries: int, keys: int) -> Attention:
        """Return the shape of attention of a rank's heads to a cache in its dtype."""
        heads = max(1, layer.heads // self.layout.tensor)
        key_heads = min(heads, max(1, layer.cache.heads // self.layout.tensor))
        shape = Attention(batch, queries, keys, heads, key_heads, layer.key_size, value_size=layer.value_size)
        return shape._replace(window=layer.cache.window or math.inf, key_bytes=CACHES[self.layout.cache])

    def _attend(self, layer: AttentionLayer, batch: int, queries: int, keys: int) -> Attention:
        """Return the shape of attention to all of an encoder's tokens."""
        shape = self._attention(layer, batch, queries, keys)._replace(causal=False, window=math.inf)
        return shape._replace(key_bytes=2.0) if queries == keys else shape

    def _decode(self, layer: AttentionLayer, work: Work, keys: int) -> Attention:
        shape = self._attention(layer, work.decoding, 1 + work.drafted, keys + work.drafted)
        if layer.cache.kind != "latent":
            return shape
        size = layer.cache.token
        return shape._replace(key_heads=1, size=size, value_size=size - layer.key_size + layer.value_size, latent=True)

    def _all_new(self, work: Work) -> int:
        return work.tokens * self.layout.data if work.all_new is None else work.all_new

    def _expert_seconds(self, all_new: int) -> float:
        """Return the time of the experts on the tokens of all replicas."""
        layout = self.layout
        precision = WEIGHTS[layout.weights]
        divided = layout.tensor * layout.data // layout.expert
        spread = BALANCED if self.model.balances_experts else UNBALANCED
        total = 0.0
        for layer, count in self.model.experts.items():
            rows = drawn_rows(all_new, layer.experts, layer.topk, layout.expert, spread)
            dtype = self.kernels.expert_dtype(precision)
            element = 2.0 if dtype == "bf16" else 1.0 if dtype == "fp8" else precision.nbytes
            inner = max(1, layer.inner // divided)
            shape = Mixture(
                all_new, layer.topk, rows, layer.hidden, inner, precision.nbytes, element, gated=layer.gated
            )
            total += count * self.kernels.mixture(shape, precision)
        return total

    def _state_seconds(self, work: Work) -> float:
        sizes = [(work.decoding, 1)] * bool(work.decoding) + [(1, new) for new, _ in work.chunks]
        total = 0.0
        for layer, count in self.model.states.items():
            heads, *state = layer.shape if len(layer.shape) == 3 else (1, 1, 1)
            heads = max(1, heads // self.layout.tensor)
            for batch, tokens in sizes:
                total += count * self.kernels.state(Recurrence(batch, tokens, heads, heads, *state))
        return total

    def _moved_seconds(self, products: Mapping[_Merged, int], tokens: int) -> float:
        """Return the time of kernels between products: each reads and writes about three times a product's input."""
        moved: Counter[int] = Counter()
        for item, count in products.items():
            if not item.per_sequence:
                moved[item.inner] += count
        return sum(count * self.kernels.moved(3 * 2.0 * tokens * inner) for inner, count in moved.items())

    def _collective_seconds(self, tokens: int, all_new: int) -> float:
        model, layout, kernels = self.model, self.layout, self.kernels
        payload = 2.0 * tokens * model.hidden
        sums = model.reductions
        total = 0.0
        if layout.data > 1:
            sums -= model.mixtures
            ranks = layout.tensor * layout.data
            if layout.expert > 1:
                topk = max((layer.topk for layer in model.experts), default=0)
                sent = payload * min(topk, layout.expert) / max(1, layout.tensor)
                total += model.mixtures * 2 * kernels.collective("all_to_all", ranks, sent)
            else:
                total += model.mixtures * 2 * kernels.collective("all_gather", ranks, 2.0 * all_new * model.hidden)
        total += sums * kernels.collective("all_reduce", layout.tensor, payload)
        # One all-reduce for the norms of queries and of keys, a float32 each.
        total += model.divided_norms // 2 * kernels.collective("all_reduce", layout.tensor, 8.0 * tokens)
        return total + (layout.pipeline - 1) * (kernels.collective("send", 2, payload) if layout.pipeline > 1 else 0)


def _pairs(new: int, cached: int, cache: CacheLayer) -> int:
    """Return the pairs of a new token and a token that it attends to, of a prompt under a causal mask."""
    whole = new * cached + new * (new + 1) // 2
    beyond = cached + new - cache.window
    if not cache.window or beyond <= 0:
        return whole
    first = max(0, cached - cache.window)
    return whole - (beyond * (beyond + 1) - first * (first + 1)) // 2


def _merge(projections: Mapping[Projection, int], layout: ServingLayout, has_experts: bool) -> Mapping[_Merged, int]:
    """Return the products of a rank; products of one input are merged, as for queries, keys and values."""
    quantized = WEIGHTS[layout.weights]
    if quantized.only_experts and has_experts:
        quantized = _BF16
    together: dict[tuple[object, ...], list[tuple[Projection, int]]] = defaultdict(list)
    for item, count in projections.items():
        parent = item.name.rpartition(".")[0]
        key = (parent, item.inner, item.divided, count) if item.divided == "columns" else (item, count)
        together[key].append((item, count))
    found: Counter[_Merged] = Counter()
    for items in together.values():
        first, count = items[0]
        columns = sum(_divided_columns(item, layout.tensor) for item, _ in items)
        inner = first.inner // layout.tensor if first.divided == "rows" else first.inner
        precision = quantized if first.is_quantized else _BF16
        found[_Merged(columns, max(1, inner), first.per_sequence, precision)] += count
    return found


def _divided_columns(item: Projection, ranks: int) -> int:
    if item.divided != "columns":
        return item.columns
    return math.ceil(item.columns / min(ranks, item.heads or ranks))
