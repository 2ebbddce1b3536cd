"""The memory of a GPU that serves a model: weights, activations of the largest step, and the rest for the cache."""

from __future__ import annotations

from dataclasses import dataclass

from fvflops.devices.devices import Device
from fvflops.serve.cache_size import sequence_bytes
from fvflops.serve.serving_layout import CACHES, WEIGHTS, ServingLayout
from fvflops.serve.serving_model import ServingError, ServingModel

# Bytes of the driver's context with its kernels, of NCCL's communicators, and of CUDA graphs of decoding steps.
CONTEXT, NCCL, GRAPHS = 512 * 2**20, 2**30, 512 * 2**20
# Bytes per logit while a step samples: the product, its copy in float32, the sorted copy and the order. Fitted to the
# start-up logs of vLLM 0.19.0 for seven models (tests/data/serving_startup).
_LOGITS = 14


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingMemory:
    """Bytes of one GPU; `cache` is the rest of `usable`, negative where the model does not fit.

    `token` is what one more token of a long sequence adds, `sequence` the cache of a sequence of the longest `length`.
    """

    total: float
    usable: float
    weights: float
    activations: float
    graphs: float
    reserve: float
    token: float
    sequence: float
    length: int
    replicas: int

    @property
    def cache(self) -> float:
        """Bytes of the cache."""
        return self.usable - self.weights - self.activations - self.graphs - self.reserve

    @property
    def sequences(self) -> float:
        """Sequences of the longest length that fit, on all replicas of the attention."""
        return max(0.0, self.cache) / self.sequence * self.replicas

    @property
    def tokens(self) -> int:
        """Tokens that fit in sequences of the longest length, on all replicas of the attention."""
        return int(self.sequences * self.length)


def find_memory(
    model: ServingModel,
    layout: ServingLayout,
    device: Device,
    *,
    length: int,
    utilisation: float = 0.9,
    step_tokens: int = 8192,
    step_sequences: int = 256,
    encoded: int = 0,
) -> ServingMemory:
    """Return how a GPU's memory is used for sequences of up to `length` tokens.

    `step_tokens` and `step_sequences` are the maxima of a step, `encoded` the tokens of `length` that an encoder reads.
    Raises ServingError for a device whose memory is not known.
    """
    if device.memory is None:
        raise ServingError(f"the memory of {device.name} is not known: add memory to it, in bytes")
    ranks, element = layout.tensor, CACHES[layout.cache]
    # Layers with a window or a state do not grow with a long sequence.
    growing = [layer for layer in model.cache if not layer.window and layer.kind != "cross attention"]
    token = sequence_bytes(growing, 1, element, ranks=ranks) - sequence_bytes(growing, 0, element, ranks=ranks)
    return ServingMemory(
        total=device.memory,
        usable=utilisation * device.memory,
        weights=layout.weight_bytes(model),
        activations=_activation_bytes(model, layout, step_tokens, min(step_sequences, step_tokens)),
        graphs=GRAPHS,
        reserve=CONTEXT + (NCCL if layout.gpus > 1 else 0),
        token=token / layout.pipeline,
        sequence=sequence_bytes(model.cache, length, element, ranks=ranks, encoded=encoded) / layout.pipeline,
        length=length,
        replicas=layout.data,
    )


def _activation_bytes(model: ServingModel, layout: ServingLayout, tokens: int, sequences: int) -> float:
    """Return the bytes of the largest step: hidden states, the widest part of a layer, the logits, or images."""
    widest = max(
        _width(item.columns, item.divided == "columns", layout.tensor)
        + _width(item.inner, item.divided == "rows", layout.tensor)
        for item in (*model.projections, *model.encoder)
        if not item.per_sequence
    )
    for layer in model.experts:
        divided = layout.tensor * layout.data / layout.expert
        columns = (3 if layer.gated else 2) * layer.inner / divided + 2 * layer.hidden
        widest = max(widest, layer.topk / layout.expert * columns)
    logits = _LOGITS * sequences * model.vocabulary
    images = 0.0
    if model.images:  # engines encode as many at once as a step has tokens for
        at_once = min(model.images.number, max(1, tokens // model.images.tokens))
        images = model.images._replace(number=at_once).activation_bytes(layout.tensor)
    return max(images, 2.0 * tokens * (2 * model.hidden + widest), 2.0 * tokens * model.hidden + logits)


def _width(size: int, is_divided: bool, ranks: int) -> float:
    return size / ranks if is_divided else float(size)


def weights_read(model: ServingModel, layout: ServingLayout, experts: float, *, encodes: bool = False) -> float:
    """Return the bytes of weights of products and experts that a step reads on one GPU.

    `experts` is the fraction of the experts' weights that it reads, 0 to 1; with `encodes` it reads the encoder's too.
    """
    read = layout.product_bytes(model, model.projections)
    read += layout.product_bytes(model, model.encoder) if encodes else 0.0
    elements = sum(count * layer.elements for layer, count in model.experts.items())
    read += experts * elements * WEIGHTS[layout.weights].nbytes / (layout.tensor * layout.data)
    return read / layout.pipeline
