"""Models that counters are compared on, each with its multiply-adds by closed-form arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class Subject:
    """A model in eval mode with its inputs; `step` asks for a training step, with the sum of the output as loss."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    step: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    """A column of the comparison: a model, and the function that returns its exact multiply-adds."""

    title: str
    build: Callable[[], Subject]
    macs: Callable[[Subject], int]


def sum_layers(subject: Subject) -> int:
    """Return the multiply-adds of the convolutions and linear layers that are called as modules, by their outputs."""
    return sum(_macs_of_layers(subject))


def sum_step(subject: Subject) -> int:
    """Return a training step's MACs: each layer's once forward and twice backward; the first needs no input gradient.

    Valid for a model whose only products are those layers.
    """
    layers = _macs_of_layers(subject)
    return 3 * sum(layers) - layers[0]


def _macs_of_layers(subject: Subject) -> list[int]:
    found: list[int] = []

    def add(layer: nn.Module, _: object, out: torch.Tensor) -> None:
        weight = layer.weight
        assert isinstance(weight, torch.Tensor)
        found.append(out.numel() * weight[0].numel())  # each output element sums over one filter, or one row

    layers = [module for module in subject.model.modules() if isinstance(module, (nn.Conv2d, nn.Linear))]
    hooks = [layer.register_forward_hook(add) for layer in layers]
    with torch.no_grad():
        subject.model(*subject.args, **subject.kwargs)
    for hook in hooks:
        hook.remove()
    return found


def _build_torchvision(name: str, *, step: bool = False) -> Subject:
    import torchvision

    model = torchvision.models.get_model(name).train(step)
    return Subject(model, (torch.randn(2 if step else 1, 3, 224, 224),), step=step)


def _count_swin(subject: Subject) -> int:
    """Add to the layers what torchvision's windowed attention computes without them: projections and both products."""
    macs = sum_layers(subject)
    for width, tokens, blocks in ((96, 56 * 56, 2), (192, 28 * 28, 2), (384, 14 * 14, 6), (768, 7 * 7, 2)):
        macs += blocks * tokens * (4 * width * width + 2 * 49 * width)  # windows of 7 x 7 tokens
    return macs


def _count_vit(_: Subject) -> int:
    width, tokens, layers = 768, 197, 12
    layer = 12 * width * width * tokens + 2 * tokens * tokens * width
    return 196 * 3 * 16 * 16 * width + layers * layer + 1000 * width


def _build_gpt2() -> Subject:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(use_cache=False)
    return Subject(GPT2LMHeadModel(config).eval(), (torch.ones(1, 512, dtype=torch.int64),))


def _count_gpt2(_: Subject) -> int:
    width, tokens, layers, words = 768, 512, 12, 50257
    return layers * (12 * width * width * tokens + 2 * tokens * tokens * width) + words * width * tokens


def _build_llama() -> Subject:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=32000,
        use_cache=False,
    )
    ids = torch.ones(1, 512, dtype=torch.int64)
    return Subject(LlamaForCausalLM(config).eval(), (), {"input_ids": ids, "attention_mask": torch.ones_like(ids)})


def _count_llama(_: Subject) -> int:
    width, inner, tokens, layers, words, shared = 512, 1376, 512, 4, 32000, 4
    projections = (2 * width * width + 2 * width * width // shared) * tokens
    attention = 2 * tokens * tokens * width
    return layers * (projections + attention + 3 * width * inner * tokens) + words * width * tokens


def _build_lstm() -> Subject:
    return Subject(nn.LSTM(128, 256, num_layers=2, batch_first=True).eval(), (torch.randn(1, 64, 128),))


def _count_lstm(_: Subject) -> int:
    return 64 * 4 * 256 * ((128 + 256) + (256 + 256))


def _build_depthwise(*, step: bool = False) -> Subject:
    model = nn.Sequential(
        nn.Conv2d(3, 64, 3, padding="same"),
        nn.Conv2d(64, 64, 3, padding=1, groups=64),
        nn.Conv2d(64, 128, 1),
        nn.Conv2d(128, 128, 5, padding="same", groups=128),
        nn.Conv2d(128, 64, 1),
    )
    return Subject(model.train(step), (torch.randn(1, 3, 64, 64),), step=step)


class _Attention(nn.Module):
    """Attention between given queries, keys and values, and a projection of the result."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(64, 64, bias=False)

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return self.out(F.scaled_dot_product_attention(query, key, value))


def _build_attention() -> Subject:
    query, key = torch.randn(1, 8, 256, 64), torch.randn(1, 8, 512, 64)
    return Subject(_Attention().eval(), (query, key, torch.randn(1, 8, 512, 64)))


def _count_attention(_: Subject) -> int:
    return 8 * 256 * 512 * (64 + 64) + 8 * 256 * 64 * 64


CASES = (
    Case("ResNet-50", lambda: _build_torchvision("resnet50"), sum_layers),
    Case("MobileNetV3-L", lambda: _build_torchvision("mobilenet_v3_large"), sum_layers),
    Case("Swin-T", lambda: _build_torchvision("swin_t"), _count_swin),
    Case("ViT-B/16", lambda: _build_torchvision("vit_b_16"), _count_vit),
    Case("GPT-2", _build_gpt2, _count_gpt2),
    Case("Llama", _build_llama, _count_llama),
    Case("LSTM", _build_lstm, _count_lstm),
    Case("depthwise", _build_depthwise, sum_layers),
    Case("SDPA", _build_attention, _count_attention),
    Case("step, MobileNetV3-L", lambda: _build_torchvision("mobilenet_v3_large", step=True), sum_step),
    Case("step, depthwise", lambda: _build_depthwise(step=True), sum_step),
)
