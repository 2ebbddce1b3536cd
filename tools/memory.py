#!/usr/bin/env python3
"""Compares predicted with measured memory on the CPU: tools/memory.py [--only NAME] [--limit PERCENT] [--ranks N,...].

Of each model the first and the second training step of a program, and of some a forward pass without gradients, whose
peaks are predicted in shape execution and measured by torch.profiler's memory records. Both are bytes over what is
there before: the parameters, buffers and inputs. With --ranks also the steps of each of N processes that train a Llama
together by gloo. Prints a table; exits with 1 if a model whose kernels are known is off by more.
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

from tests.support.measured_memory import Autocast, compare_forward, compare_steps  # noqa: E402
from tests.support.models.mixed_precision_adam import MixedPrecisionAdam  # noqa: E402
from tests.support.ranks.rank_memory import compare_ranks  # noqa: E402
from tests.support.torchvision_schemas import define_torchvision_schemas  # noqa: E402

SGD = partial(torch.optim.SGD, lr=0.01, momentum=0.9)


FUSED = partial(torch.optim.AdamW, fused=True)
FOREACH = partial(torch.optim.AdamW, foreach=True)


class Case(NamedTuple):
    """A model with its inputs, its loss (None: the result's own), optimizer, and classes of checkpointed modules."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[[Any], torch.Tensor] | None
    optimizer: Any
    checkpointed: tuple[type[nn.Module], ...] = ()
    forward: bool = True


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


def _variant(
    make: Callable[[], Case], *, autocast: bool = False, dtype: torch.dtype | None = None, **changes: Any
) -> Case:
    """Return another way to train a model: under autocast, in another dtype, with other fields of its case."""
    case = make()._replace(forward=False, **changes)
    model = case.model if dtype is None else case.model.to(dtype)
    return case._replace(model=Autocast(model) if autocast else model)


def _checkpointed_vit() -> Case:
    from timm.models.vision_transformer import Block

    return _variant(_vit, optimizer=FOREACH, checkpointed=(Block,))


def _checkpointed_llama() -> Case:
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    return _variant(_llama, autocast=True, optimizer=FUSED, checkpointed=(LlamaDecoderLayer,))


def _quantised_llama() -> Case:
    from torchao.optim import AdamW8bit

    return _variant(_llama, optimizer=AdamW8bit)


# Name → what makes the case, and why its figures may differ, "" where they should agree.
CASES: dict[str, tuple[Callable[[], Case], str]] = {
    "ResNet-50, 4 images, SGD": (_resnet, ""),
    "MobileNetV3-L, 4 images, SGD": (_mobilenet, ""),
    "ViT-S/16, 4 images, AdamW": (_vit, ""),
    "GPT-2, 2 × 128, AdamW": (_gpt2, ""),
    "BERT, 6 layers, 4 × 128, AdamW": (_bert, ""),
    "Llama, 6 layers, 4 × 128, AdamW": (_llama, ""),
    "GRU, 2 layers, 8 × 64, SGD": (partial(_recurrent, nn.GRU), ""),
    "GPT-2, autocast, fused AdamW": (partial(_variant, _gpt2, autocast=True, optimizer=FUSED), ""),
    "BERT, foreach AdamW": (partial(_variant, _bert, optimizer=FOREACH), ""),
    "ViT-S/16, checkpoints, foreach AdamW": (_checkpointed_vit, ""),
    "Llama, autocast, checkpoints, fused": (_checkpointed_llama, ""),
    "Llama, bfloat16, 32-bit copies": (
        partial(_variant, _llama, dtype=torch.bfloat16, optimizer=MixedPrecisionAdam),
        "",
    ),
    "Llama, 8-bit AdamW of torchao": (_quantised_llama, ""),
    "LSTM, 2 layers, 8 × 64, SGD": (partial(_recurrent, nn.LSTM), "oneDNN's LSTM takes memory that only it knows"),
}


def compare(case: Case) -> Iterator[tuple[str, int, int]]:
    """Yield (what is run, predicted bytes, measured bytes)."""
    model, args, kwargs, loss, optimizer, checkpointed, forward = case
    if forward:
        yield "forward", *compare_forward(model.eval(), args, kwargs)
    model.train()
    steps = compare_steps(model, args, kwargs, loss=loss, optimizer=optimizer, checkpointed=checkpointed)
    for name, (predicted, measured) in zip(("first step", "second step"), steps, strict=True):
        yield name, predicted, measured


def compare_processes(processes: int) -> Iterator[tuple[str, str, int, int]]:
    """Yield (mesh and optimizer, the rank's step, predicted bytes, measured bytes)."""
    meshes = [{"fsdp": processes}, {"tp": processes}]
    if processes > 2:
        meshes.append({"fsdp": processes // 2, "tp": 2})
    cases = [(mesh, "AdamW") for mesh in meshes] + [({"fsdp": processes}, name) for name in ("fused", "foreach")]
    names = [f"Llama, {', '.join(f'{axis}={size}' for axis, size in mesh.items())}, {name}" for mesh, name in cases]
    names.append(f"Llama, fsdp={processes}, mixed, checkpoints")
    for name, ranks in zip(names, compare_ranks(processes, cases), strict=True):
        for rank, steps in enumerate(ranks):
            for step, (predicted, measured) in zip(("first", "second"), steps, strict=True):
                yield name, f"rank {rank}, {step}", predicted, measured


def main() -> int:
    """Run the comparison and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="only models whose name contains this")
    parser.add_argument("--limit", type=float, default=2.0, help="the largest difference in percent (default: 2)")
    parser.add_argument("--ranks", default="", help="also compare runs of this many processes, such as 2,4")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    define_torchvision_schemas()
    torch.compiler.set_stance("force_eager")  # torchao compiles its optimizers, whose temporaries are then others
    begun, failed = time.perf_counter(), False
    print(f"{'model':38}{'run':16}{'predicted':>16}{'measured':>16}{'off':>9}")
    for name, what, predicted, measured, excuse in _compare_all(arguments.only, arguments.ranks):
        off = 100 * (predicted / measured - 1)
        wrong = abs(off) > arguments.limit
        failed |= wrong and not excuse
        print(f"{name:38}{what:16}{predicted:16,}{measured:16,}{off:+8.2f}%  {excuse if wrong else ''}", flush=True)
    print(f"{time.perf_counter() - begun:.0f} s")
    return 1 if failed else 0


def _compare_all(only: str, ranks: str) -> Iterator[tuple[str, str, int, int, str]]:
    """Yield (name, what is run, predicted bytes, measured bytes, why they may differ)."""
    for name, (make, excuse) in CASES.items():
        if only in name:
            torch.manual_seed(0)
            case = make()
            for what, predicted, measured in compare(case):
                yield name, what, predicted, measured, excuse
            del case
            gc.collect()
    for processes in map(int, filter(None, ranks.split(","))):
        for name, what, predicted, measured in compare_processes(processes):
            yield name, what, predicted, measured, ""


if __name__ == "__main__":
    sys.exit(main())
