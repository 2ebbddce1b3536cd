"""Compare predicted memory with the count of CUDA's allocator, over whole training steps."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from fvflops import FlopCountAnalysis, TrainingStepAnalysis, predict_memory
from fvflops.zoo.gpt2 import GPT2, Block, GPT2Config
from fvflops.zoo.llama import CONFIGS, Llama
from tests.support.cuda_cases.case import to_format
from tests.support.cuda_cases.runs import attempt
from tests.support.schemas.torchvision_schemas import define_torchvision_schemas

define_torchvision_schemas()

SGD = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
ADAMW = torch.optim.AdamW


class Case(NamedTuple):
    """A model with an input, and how it is trained."""

    model: nn.Module
    x: torch.Tensor
    optimizer: Callable[..., Any]
    autocast: torch.dtype | None = None
    checkpoint: tuple[Any, ...] = ()
    inner: bool = False


def _torchvision(name: str, batch: int, optimizer: Callable[..., Any] = SGD, **options: Any) -> Case:
    import torchvision

    return Case(torchvision.models.get_model(name, weights=None), torch.randn(batch, 3, 224, 224), optimizer, **options)


def _vit_small() -> Case:
    import timm

    return Case(timm.create_model("vit_small_patch16_224"), torch.randn(16, 3, 224, 224), partial(ADAMW, foreach=False))


def _gpt2(batch: int = 4, dtype: torch.dtype = torch.float32, **options: Any) -> Case:
    options.setdefault("optimizer", ADAMW)
    model = GPT2(GPT2Config(dropout=0.0)).to(dtype)
    return Case(model, torch.randint(0, 50000, (batch, 1024)), **options)


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5000, 256)
        self.layers = nn.LSTM(256, 512, 2, batch_first=True)
        self.head = nn.Linear(512, 5000)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embedding(tokens))[0])


CASES: dict[str, Callable[[], Case]] = {
    "resnet50 × 16, SGD": lambda: _torchvision("resnet50", 16),
    "resnet50 × 16, channels_last, bf16 autocast": lambda: _torchvision(
        "resnet50", 16, autocast=torch.bfloat16, inner=True
    ),
    "mobilenet_v3_large × 16, SGD": lambda: _torchvision("mobilenet_v3_large", 16),
    "convnext_tiny × 8, AdamW": lambda: _torchvision("convnext_tiny", 8, ADAMW),
    "swin_t × 8, AdamW": lambda: _torchvision("swin_t", 8, ADAMW),
    "vit_b_16 × 8, AdamW": lambda: _torchvision("vit_b_16", 8, ADAMW),
    "timm vit_small × 16, AdamW one by one": _vit_small,
    "gpt2 × 4, AdamW": _gpt2,
    "gpt2 × 4, AdamW fused": lambda: _gpt2(optimizer=partial(ADAMW, fused=True)),
    "gpt2 × 4, bf16 autocast": lambda: _gpt2(autocast=torch.bfloat16),
    "gpt2 × 4, bf16": lambda: _gpt2(dtype=torch.bfloat16),
    "gpt2 × 4, checkpointed": lambda: _gpt2(checkpoint=(Block,)),
    "llama tiny × 8, AdamW": lambda: Case(Llama(CONFIGS["llama_tiny"]), torch.randint(0, 100, (8, 128)), ADAMW),
    "LSTM × 32, SGD": lambda: Case(_Recurrent(), torch.randint(0, 5000, (32, 64)), SGD),
}  # fmt: skip


def _loss(result: Any) -> torch.Tensor:
    logits = result if isinstance(result, torch.Tensor) else result[0]
    logits = logits.flatten(0, -2)
    return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long, device=logits.device))


def compare_memory(share: int, shares: int) -> dict[str, Any]:
    """Return "case" → bytes over the memory before: predicted and measured peaks, forward, first and second step."""
    found: dict[str, Any] = {}
    for name in list(CASES)[share::shares]:
        found[name] = attempt(partial(_compare, CASES[name]))
        gc.collect()
        torch.cuda.empty_cache()
    return found


def _compare(make: Callable[[], Case]) -> dict[str, Any]:
    torch.manual_seed(0)
    case = make()
    form = torch.channels_last if case.inner else torch.preserve_format
    model, x = to_format(case.model.cuda(), form), case.x.cuda()
    if case.inner:
        x = x.to(memory_format=form)
    around = nullcontext if case.autocast is None else partial(torch.autocast, "cuda", case.autocast)

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor) -> Any:
            with around():
                return self.model(x)

    whole = Around().train()
    found: dict[str, Any] = {}
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    forward = attempt(lambda: predict_memory(FlopCountAnalysis(whole, x)))
    analysis = TrainingStepAnalysis(
        whole, x, loss=_loss, optimizer=case.optimizer, checkpoint=case.checkpoint, device="cuda"
    )
    first, later = predict_memory(analysis, first_step=True), predict_memory(analysis)
    found["taken by predicting"] = torch.cuda.max_memory_allocated() - before
    found["left by predicting"] = torch.cuda.memory_allocated() - before
    if not isinstance(forward, dict):
        found["forward"] = [forward.peak - forward.baseline, _measure_forward(whole, x)]
    measured = _measure_steps(case, whole, x)
    found["first step"] = [first.peak - first.baseline, measured[0]]
    found["second step"] = [later.peak - first.baseline, measured[1]]
    return found


def _measure_forward(model: nn.Module, x: torch.Tensor) -> int:
    with torch.no_grad():
        model(x)  # libraries take their workspaces the first time
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        model(x)
    return torch.cuda.max_memory_allocated() - before


def _measure_steps(case: Case, model: nn.Module, x: torch.Tensor) -> list[int]:
    if case.checkpoint:
        from torch.utils.checkpoint import checkpoint

        for module in model.modules():
            if isinstance(module, case.checkpoint):
                module.forward = partial(checkpoint, module.forward, use_reentrant=False)
    # Libraries' workspaces stay allocated: not the step's.
    _loss(model(x)).backward()
    model.zero_grad(set_to_none=True)
    gc.collect()
    torch.cuda.synchronize()
    before, peaks = torch.cuda.memory_allocated(), []
    optimizer = case.optimizer(model.parameters())
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        optimizer.zero_grad()
        _loss(model(x)).backward()
        optimizer.step()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    return peaks
