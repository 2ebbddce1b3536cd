"""State that a count restores: what it is before and after, beside the count."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.support.first_answers.counts import count, train

X = (3, 4)
TABLE: dict[str, Any] = {}


@functools.cache
def cached(size: int) -> torch.Tensor:
    """Return a table that is made once."""
    return torch.arange(size).float() @ torch.ones(size, size)


class Keeping(nn.Module):
    """A module that keeps what it computes, in many places."""

    shared: Any = None

    def __init__(self, keep: Callable[[Keeping, torch.Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.kept: list[Any] = []
        self.keep = keep

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.layer(x))
        self.keep(self, x)
        return x + cached(4)


def _share(model: Keeping, x: torch.Tensor) -> None:
    Keeping.shared = x


def _step(model: Keeping, x: torch.Tensor) -> None:
    model.steps += 1
    model.norm.running_mean.mul_(0.5)


def _rename(model: Keeping, x: torch.Tensor) -> None:
    model.extra = nn.Linear(4, 4)
    model.last = x


def _draw(model: Keeping, x: torch.Tensor) -> None:
    model.kept = [random.random(), torch.rand(2)]


def _draw_numpy(model: Keeping, x: torch.Tensor) -> None:
    import numpy

    model.kept = [numpy.random.rand()]


def _switch(model: Keeping, x: torch.Tensor) -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    model.eval()


def _switch_attention(model: Keeping, x: torch.Tensor) -> None:
    torch.backends.cuda.enable_flash_sdp(False)
    torch.set_float32_matmul_precision("high")


def _patch(model: Keeping, x: torch.Tensor) -> None:
    model.layer.register_forward_hook(lambda module, args, result: result)
    model.layer.weight.requires_grad_(False)


KEEPERS = {
    "list": lambda model, x: model.kept.append(x),
    "class attribute": _share,
    "global": lambda model, x: TABLE.setdefault("x", x),
    "buffers": _step,
    "attributes": _rename,
    "random numbers": _draw,
    "random numbers of numpy": _draw_numpy,
    "settings": _switch,
    "settings of kernels": _switch_attention,
    "hooks and flags": _patch,
}


def _state(model: Keeping) -> dict[str, Any]:
    return {
        "weights": {name: tensor.tolist() for name, tensor in model.state_dict().items()},
        "kept": [len(model.kept), Keeping.shared is None, sorted(TABLE), sorted(vars(model)), model.training],
        "cached": cached.cache_info().currsize,
        "hooks": len(model.layer._forward_hooks),
        "flags": [parameter.requires_grad for parameter in model.parameters()],
        "settings": [str(torch.get_default_dtype()), torch.is_grad_enabled(), torch.get_float32_matmul_precision()],
        "flash": torch.backends.cuda.flash_sdp_enabled(),
        "random": [random.getstate()[1][:5], torch.get_rng_state()[:64].tolist()],
    }


def _count(keep: Callable[[Keeping, torch.Tensor], Any], **options: Any) -> Any:
    cached.cache_clear()
    TABLE.clear()
    model, x = Keeping(keep), torch.rand(X)
    before = _state(model)
    counted = count(model, x, **options)
    return {"counted": counted, "after": _state(model), "restored": _state(model) == before}


def _train(keep: Callable[[Keeping, torch.Tensor], Any]) -> Any:
    cached.cache_clear()
    model, x = Keeping(keep), torch.rand(X)
    before = _state(model)
    counted = train(model, x, optimizer=torch.optim.AdamW)
    return {"counted": counted, "restored": _state(model) == before}


CASES = {
    **{name: partial(_count, keep) for name, keep in KEEPERS.items()},
    **{
        f"{name}, real": partial(_count, KEEPERS[name], execution="real")
        for name in ("list", "global", "buffers", "settings", "random numbers of numpy")
    },
    **{f"{name}, training": partial(_train, KEEPERS[name]) for name in ("list", "buffers")},
}
