#!/usr/bin/env python3
"""Compares predicted with measured memory on the CPU: tools/memory.py [--only NAME] [--limit PERCENT].

Of each model a forward pass without gradients, and the first and the second training step of a program, whose peaks are
predicted by shapes and measured by torch.profiler's memory records. Both are bytes over what is there before: the
parameters, buffers and inputs. Prints a table; exits with 1 if a model whose kernels are known is off by more.
"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from tests.support.measured_memory import compare_forward, compare_steps  # noqa: E402
from tests.support.torchvision_schemas import define_torchvision_schemas  # noqa: E402

SGD = partial(torch.optim.SGD, lr=0.01, momentum=0.9)


class Case(NamedTuple):
    """A model with its inputs, its loss (None: the result's own) and what makes its optimizer."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[[Any], torch.Tensor] | None
    optimizer: Any


class Recurrent(nn.Module):
    """A language model of recurrent layers, as in torch's word_language_model example."""

    def __init__(self, layers: Callable[..., nn.RNNBase]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5000, 256)
        self.layers = layers(256, 512, 2, batch_first=True)
        self.head = nn.Linear(512, 5000)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embedding(tokens))[0])


def _classify(logits: torch.Tensor) -> torch.Tensor:
    logits = logits.flatten(0, -2)
    return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))


def _images(model: nn.Module, optimizer: Any) -> Case:
    return Case(model, (torch.randn(4, 3, 224, 224),), {}, _classify, optimizer)


def _resnet() -> Case:
    import torchvision

    return _images(torchvision.models.resnet50(), SGD)


def _mobilenet() -> Case:
    import torchvision

    return _images(torchvision.models.mobilenet_v3_large(), SGD)


def _vit() -> Case:
    import timm

    return _images(timm.create_model("vit_small_patch16_224"), torch.optim.AdamW)


def _gpt2() -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    tokens = torch.randint(0, 50000, (2, 128))
    return Case(
        GPT2LMHeadModel(GPT2Config()),
        (),
        {"input_ids": tokens, "labels": tokens, "use_cache": False},
        None,
        torch.optim.AdamW,
    )


def _bert() -> Case:
    from transformers import BertConfig, BertForSequenceClassification

    tokens = torch.randint(0, 30000, (4, 128))
    model = BertForSequenceClassification(BertConfig(num_hidden_layers=6))
    return Case(model, (), {"input_ids": tokens, "labels": torch.zeros(4, dtype=torch.long)}, None, torch.optim.AdamW)


def _llama() -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    tokens = torch.randint(0, 8000, (4, 128))
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=8000,
    )
    return Case(
        LlamaForCausalLM(config),
        (),
        {"input_ids": tokens, "labels": tokens, "use_cache": False},
        None,
        torch.optim.AdamW,
    )


def _recurrent(layers: type[nn.RNNBase]) -> Case:
    return Case(Recurrent(layers), (torch.randint(0, 5000, (8, 64)),), {}, _classify, SGD)


# Name → what makes the case, and why its figures may differ, "" where they should agree.
CASES: dict[str, tuple[Callable[[], Case], str]] = {
    "ResNet-50, 4 images, SGD": (_resnet, ""),
    "MobileNetV3-L, 4 images, SGD": (_mobilenet, ""),
    "ViT-S/16, 4 images, AdamW": (_vit, ""),
    "GPT-2, 2 × 128, AdamW": (_gpt2, ""),
    "BERT, 6 layers, 4 × 128, AdamW": (_bert, ""),
    "Llama, 6 layers, 4 × 128, AdamW": (_llama, ""),
    "GRU, 2 layers, 8 × 64, SGD": (partial(_recurrent, nn.GRU), ""),
    "LSTM, 2 layers, 8 × 64, SGD": (partial(_recurrent, nn.LSTM), "oneDNN's LSTM takes memory that only it knows"),
}


def compare(case: Case) -> Iterator[tuple[str, int, int]]:
    """Yield (what is run, predicted bytes, measured bytes)."""
    model, args, kwargs, loss, optimizer = case
    yield "forward", *compare_forward(model.eval(), args, kwargs)
    model.train()
    steps = compare_steps(model, args, kwargs, loss=loss, optimizer=optimizer)
    for name, (predicted, measured) in zip(("first step", "second step"), steps, strict=True):
        yield name, predicted, measured


def main() -> int:
    """Run the comparison and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="only models whose name contains this")
    parser.add_argument("--limit", type=float, default=3.0, help="the largest difference in percent (default: 3)")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    define_torchvision_schemas()
    begun, failed = time.perf_counter(), False
    print(f"{'model':34}{'run':13}{'predicted':>16}{'measured':>16}{'off':>9}")
    for name, (make, excuse) in CASES.items():
        if arguments.only not in name:
            continue
        torch.manual_seed(0)
        case = make()
        for what, predicted, measured in compare(case):
            off = 100 * (predicted / measured - 1)
            wrong = abs(off) > arguments.limit
            failed |= wrong and not excuse
            print(f"{name:34}{what:13}{predicted:16,}{measured:16,}{off:+8.2f}%  {excuse if wrong else ''}", flush=True)
        del case
        gc.collect()
    print(f"{time.perf_counter() - begun:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
