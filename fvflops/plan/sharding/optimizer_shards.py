"""Gradients that are accumulated in buffers, and this rank's shards of parameters, for a distributed optimizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from fvflops.capture.recorder.recorder import Recorder
from fvflops.capture.shapes.metadata import dtype_name
from fvflops.capture.training_step import OptimizerMaker, make_optimizer
from fvflops.plan.added_optimizers import MasterWeights, Muon, local_part
from fvflops.plan.rank_step import Gradient
from fvflops.plan.sharding.fully_sharded import find_named

GRADIENT_DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Their update of an element depends on its whole matrix.
_BY_MATRIX = (Muon, torch.optim.Adafactor, *([torch.optim.Muon] if hasattr(torch.optim, "Muon") else []))


def find_gradient_dtype(name: str | None) -> torch.dtype | None:
    return find_named(name, GRADIENT_DTYPES, "data type of gradients")


class Shard(NamedTuple):
    """A rank's part of the parameters that some replicas have in common, as one vector, as long for each of them."""

    numel: int
    dtype: torch.dtype


def divide_parameters(parameters: Iterable[Gradient]) -> list[Shard]:
    """Return the shards of some parameters: one for each group of replicas and each dtype.

    >>> from fvflops.trace import TensorSpec
    >>> specs = {"weight": TensorSpec((8, 1)), "bias": TensorSpec((3,))}
    >>> divide_parameters(Gradient(name, spec, "dp", 4) for name, spec in specs.items())
    [Shard(numel=3, dtype=torch.float32)]
    """
    sizes = Counter[tuple[Any, int, str]]()
    for parameter in parameters:
        sizes[parameter.group, parameter.replicas, parameter.spec.dtype] += parameter.spec.numel
    return [Shard(-(-numel // replicas), getattr(torch, dtype)) for (_, replicas, dtype), numel in sizes.items()]


@dataclass(frozen=True, slots=True)
class Shards:
    """The shards of a rank, and the process group of all ranks that have others of the same parameters."""

    items: Sequence[Shard]
    group: Any


class GradientBuffers:
    """Buffers in which gradients are accumulated, each as its parameter's `main_grad`, while the context lasts.

    The parameters' own gradients are freed at once. Source: Megatron-LM's distributed data parallelism, with float32
    its accumulate_allreduce_grads_in_fp32, the default for bfloat16.

    >>> weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    >>> with GradientBuffers([weight], torch.float32):
    ...     weight.sum().backward()
    ...     weight.sum().backward()
    ...     print(weight.grad, weight.main_grad)
    None tensor([2., 2.])
    """

    def __init__(self, parameters: Iterable[nn.Parameter], dtype: torch.dtype | None = None) -> None:
        self._parameters: list[Any] = [item for item in dict.fromkeys(parameters) if item.requires_grad]
        self._dtype = dtype
        self._placements: dict[Any, Any] = {}  # of gradients that are sums yet to be reduced over tp
        self._hooks: list[Any] = []

    def __enter__(self) -> GradientBuffers:
        for parameter in self._parameters:
            parameter.main_grad = torch.zeros_like(local_part(parameter), dtype=self._dtype)
            self._hooks.append(parameter.register_post_accumulate_grad_hook(self._accumulate))
        return self

    def __exit__(self, *_: object) -> None:
        for hook, parameter in zip(self._hooks, self._parameters, strict=True):
            hook.remove()
            del parameter.main_grad
        self._hooks.clear()

    def collect(self) -> None:
        """Accumulate gradients that were computed outside of autograd's engine."""
        for parameter in self._parameters:
            self._accumulate(parameter)

    @torch.no_grad()
    def _accumulate(self, parameter: Any) -> None:
        gradient = parameter.grad
        if gradient is None:
            return
        placements = getattr(gradient, "placements", None)
        if (
            placements != getattr(parameter, "placements", None)
            and gradient.to_local().shape == parameter.main_grad.shape
        ):
            self._placements[parameter] = placements
            parameter.main_grad.add_(gradient.to_local())
        else:
            parameter.main_grad.add_(local_part(gradient, parameter))
        parameter.grad = None

    @torch.no_grad()
    def reduce_partial_sums(self) -> None:
        """Reduce gradients of which each rank of tp has a part, such as a norm's with sequence parallelism."""
        from torch.distributed.tensor import DTensor

        for parameter, placements in self._placements.items():
            partial_sum = DTensor.from_local(parameter.main_grad, parameter.device_mesh, placements, run_check=False)
            parameter.main_grad.copy_(local_part(partial_sum, parameter))

    @torch.no_grad()
    def zero(self) -> None:
        for parameter in self._parameters:
            parameter.main_grad.zero_()


def accumulated(
    model: nn.Module, dtype: str | None, *, is_needed: bool
) -> AbstractContextManager[GradientBuffers | None]:
    """Return the context in which gradients are accumulated in buffers, if they are needed or their dtype is given."""
    if dtype is None and not is_needed:
        return nullcontext()
    return GradientBuffers(model.parameters(), find_gradient_dtype(dtype))


def shard_optimizer(
    maker: OptimizerMaker, shards: Shards, gradient_dtype: str | None, recorder: Recorder, *, device: torch.device
) -> Optimizer:
    """Return an optimizer of a rank's shards of parameters and of their gradients.

    They are parts of the buffers of all parameters and of all gradients, so that they take no memory. An optimizer that
    is not elementwise raises ValueError.
    """
    if isinstance(maker, Optimizer):
        raise ValueError("optimizer_sharding needs what creates the optimizer from a rank's shards, not an optimizer")
    if _find_class(maker) in _BY_MATRIX:
        raise ValueError(
            f"{_find_class(maker).__name__} updates whole matrices, of which optimizer_sharding gives a rank parts: "
            "choose another optimizer, such as AdamW"
        )
    tensors = []
    for shard in shards.items:
        tensor: Any = torch.empty(shard.numel, dtype=shard.dtype, device=device).requires_grad_()
        gradient = torch.empty(shard.numel, dtype=find_gradient_dtype(gradient_dtype) or shard.dtype, device=device)
        for index in recorder.storages_of((tensor, gradient)):
            recorder.storages[index] = (0, *recorder.storages[index][1:])
        tensor.main_grad = gradient
        if gradient.dtype == tensor.dtype:
            tensor.grad = gradient
        tensors.append(tensor)
    given: Any = SimpleNamespace(parameters=lambda: tensors)
    optimizer = make_optimizer(maker, given)
    name = type(optimizer).__name__
    if isinstance(optimizer, MasterWeights):
        optimizer.group = shards.group
    elif any(tensor.grad is None for tensor in tensors):
        raise ValueError(
            f"{name} updates {dtype_name(tensors[0].dtype)} parameters by gradients of that type: omit gradient_dtype, "
            "or use master weights"
        )
    return optimizer


def _find_class(maker: Any) -> Any:
    """Return the class of the optimizer that a partial makes; with master weights, the class for the copies."""
    while isinstance(maker, partial):
        maker = maker.keywords["make"] if maker.func is MasterWeights else maker.func
    return maker
