"""Muon for hidden matrices, AdamW for all other parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch.optim import Optimizer


class Muon(Optimizer):
    """torch.optim.Muon for matrices, AdamW for all other parameters, as its authors train.

    `by_adamw` are the shapes of further matrices for AdamW, such as an embedding's. Source: K. Jordan et al., "Muon: An
    optimizer for hidden layers in neural networks" (2024): hidden matrices by Muon; embeddings, heads, gains and biases
    by AdamW.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], by_adamw: Collection[tuple[int, ...]] = ()) -> None:
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        super().__init__(trained, {})
        matrices = [item for item in trained if item.ndim == 2 and tuple(item.shape) not in by_adamw]
        chosen = {id(parameter) for parameter in matrices}
        others = [parameter for parameter in trained if id(parameter) not in chosen]
        self.inner: list[Optimizer] = [torch.optim.Muon(matrices)] if matrices else []
        self.inner += [torch.optim.AdamW(others)] if others else []

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take a step of both optimizers."""
        if closure is not None:
            raise ValueError("Muon takes no closure: call backward before step()")
        for optimizer in self.inner:
            optimizer.step()
