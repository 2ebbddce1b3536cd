"""How an engine divides a model among GPUs, and in which precision it keeps weights and cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from fvflops.serve.serving_model import Projection, ServingError, ServingModel
from fvflops.text import explaining_arguments


class Precision(NamedTuple):
    """Bytes of an element with its scales, the dtype of products, and whether only experts' weights have it.

    `figures` is the name of the figures of mixtures, where it is not the dtype.
    """

    nbytes: float
    dtype: str
    only_experts: bool = False
    figures: str = ""


# Scales: one fp16 for 128 int4 weights; one byte for 32 of mxfp4 and for 16 of nvfp4 (OCP Microscaling, NVIDIA).
WEIGHTS = {
    "bf16": Precision(2.0, "bf16"),
    "fp8": Precision(1.0, "fp8"),
    "int8": Precision(1.0, "int8"),
    "int4": Precision(0.5 + 2 / 128, "bf16"),
    "mxfp4": Precision(0.5 + 1 / 32, "bf16", only_experts=True, figures="mxfp4"),
    "nvfp4": Precision(0.5 + 1 / 16, "fp4"),
}
CACHES = {"bf16": 2.0, "fp8": 1.0}


@explaining_arguments
@dataclass(frozen=True, slots=True, kw_only=True)
class ServingLayout:
    """GPUs of one replica of a model and the precision of its weights and cache.

    `tensor` ranks divide heads and matrices, `pipeline` ranks the layers; `data` groups of `tensor` ranks each compute
    the attention of their own sequences, and share the experts. `expert` ranks divide the experts of a layer, and the
    others of `tensor` x `data` each expert's matrices.
    """

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    data: int = 1
    weights: str = "bf16"
    cache: str = "bf16"

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "expert", "data"):
            if getattr(self, name) < 1:
                raise ServingError(f"{name} ranks must be at least 1; got {getattr(self, name)}")
        if self.tensor * self.data % self.expert:
            ranks = self.tensor * self.data
            raise ServingError(f"{self.expert} ranks of experts must divide the {ranks} ranks of a stage")
        for name, known in (("weights", WEIGHTS), ("cache", CACHES)):
            if getattr(self, name) not in known:
                raise ServingError(f"{name} must be one of {', '.join(known)}; got {getattr(self, name)!r}")

    @property
    def gpus(self) -> int:
        """GPUs of one replica."""
        return self.tensor * self.pipeline * self.data

    def weight_bytes(self, model: ServingModel) -> float:
        """Return the bytes of weights on one GPU; embeddings, logits and routers are in bf16."""
        total = self.product_bytes(model, model.projections) + self.product_bytes(model, model.encoder)
        counted = sum(count * item.elements for item, count in (*model.projections.items(), *model.encoder.items()))
        for layer, count in model.experts.items():
            total += count * layer.elements * WEIGHTS[self.weights].nbytes / (self.tensor * self.data)
            counted += count * layer.elements
        others = max(0, model.parameters - counted)
        total *= min(1.0, model.parameters / counted)  # weights that several layers share are kept once
        return (total + 2.0 * others / self.tensor) / self.pipeline

    def product_bytes(self, model: ServingModel, products: Mapping[Projection, int]) -> float:
        """Return the bytes of the weights of a model's products on one rank of tensor parallelism, of all layers."""
        precision = WEIGHTS[self.weights]
        only_experts = precision.only_experts and bool(model.experts)
        total = 0.0
        for item, count in products.items():
            quantized = item.is_quantized and not only_experts
            share = max(1 / self.tensor, 1 / item.heads if item.heads else 0.0) if item.divided else 1.0
            total += count * item.elements * share * (precision.nbytes if quantized else 2.0)
        return total
