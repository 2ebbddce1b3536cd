"""The cases: the models that are counted, what they take, and where their loss is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from fvflops.zoo import ZOO
from tests.support.torchvision_schemas import define_torchvision_schemas

Step = Literal["forward", "forward+backward"]
STEPS: tuple[Step, ...] = ("forward", "forward+backward")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model and its one input; `logits` names the field of its result, "" where the result is the tensor itself.

    `fits` says that its weights fit in memory, so that peers which need numbers can run it. `macs` is what a forward
    run comes to in matmuls and attention, where a closed form is known.
    """

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    logits: str = ""
    fits: bool = True
    macs: int | None = None

    def build_on(self, device: str) -> nn.Module:
        """Build the model on a device, in the mode in which modules are built."""
        with torch.device(device):
            return self.build()

    def make_input(self, device: str) -> torch.Tensor:
        """Return the input on a device: zeros, which are valid token ids too."""
        return torch.zeros(self.shape, dtype=self.dtype, device=device)

    def reduce(self, result: Any) -> torch.Tensor:
        """Return a loss: the sum of the logits."""
        return (getattr(result, self.logits) if self.logits else result).sum()


def _build_swin_t() -> nn.Module:
    define_torchvision_schemas()
    import torchvision

    return torchvision.models.swin_t(weights=None)


def _build_llama(config: Mapping[str, Any]) -> nn.Module:
    define_torchvision_schemas()  # transformers imports torchvision where it is installed
    import transformers

    settings: dict[str, Any] = {**config, "rope_theta": 500_000.0}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))


def _llama(
    layers: int, hidden: int, heads: int, intermediate: int, tokens: int = 8192, vocabulary: int = 128_256
) -> Case:
    """Return a Llama-3 of transformers, with 8 heads of keys and values, on one sequence."""
    tokens, vocabulary = 8192, 128_256
    config = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "intermediate_size": intermediate,
        "vocab_size": vocabulary,
        "max_position_embeddings": 131_072,
    }
    of_one_layer = 2 * hidden * hidden + 2 * hidden * (8 * hidden // heads) + 3 * hidden * intermediate
    matmul_parameters = layers * of_one_layer + hidden * vocabulary
    return Case(
        build=partial(_build_llama, config),
        shape=(1, tokens),
        dtype=torch.int64,
        logits="logits",
        fits=False,
        # Attention is counted densely, as it is bounded: without a discount for the causal half.
        macs=matmul_parameters * tokens + 2 * layers * tokens * tokens * hidden,
    )


CASES: dict[str, Case] = {
    "resnet50": Case(build=ZOO["resnet50"].build, shape=(1, 3, 224, 224), macs=4_089_184_256),
    "vit_b_16": Case(build=ZOO["vit_b_16"].build, shape=(1, 3, 224, 224), macs=17_563_828_224),
    "swin_t": Case(build=_build_swin_t, shape=(1, 3, 224, 224)),
    "gpt2": Case(build=ZOO["gpt2"].build, shape=(1, 1024), dtype=torch.int64, macs=145_824_153_600),
    "llama3_8b": _llama(layers=32, hidden=4096, heads=32, intermediate=14_336),
    "llama3_70b": _llama(layers=80, hidden=8192, heads=64, intermediate=28_672),
    "llama3_405b": _llama(layers=126, hidden=16_384, heads=128, intermediate=53_248),
}
