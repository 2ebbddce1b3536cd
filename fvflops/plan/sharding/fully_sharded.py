"""Fully sharded data parallelism (FSDP2): which modules are sharded, when they are gathered, in which precision."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import nn

from fvflops.capture.restore.torch_state import parameter_groups
from fvflops.plan.sharding.expert_parallel import DividedExperts, shard_experts_fully
from fvflops.text import suggest

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Precision:
    """Data types of a training step: parameters that the optimizer updates, compute, reduction."""

    parameters: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype

    @property
    def is_uniform(self) -> bool:
        return self.compute == self.parameters


PRECISIONS: Mapping[str, Precision] = {
    "fp32": Precision(torch.float32, torch.float32, torch.float32),
    "bf16": Precision(torch.bfloat16, torch.bfloat16, torch.bfloat16),
    "bf16-mixed": Precision(torch.float32, torch.bfloat16, torch.float32),
    "bf16-mixed-reduce": Precision(torch.float32, torch.bfloat16, torch.bfloat16),
}


def find_named(name: str | None, known: Mapping[str, T], what: str) -> T | None:
    """Return the value of a name, None for None; another name raises ValueError."""
    if name is None:
        return None
    if name not in known:
        raise ValueError(f"no {what} {name!r}{suggest(name, known)}: they are {', '.join(known)}")
    return known[name]


def find_precision(name: str | None) -> Precision | None:
    return find_named(name, PRECISIONS, "precision")


def shard_fully(
    model: nn.Module,
    mesh: Any,
    *,
    reshard_after_forward: bool,
    precision: Precision | None,
    experts: DividedExperts | None = None,
) -> None:
    """Apply `fully_shard` to each member of a model's outermost module lists and to the root, in place.

    Divided experts are sharded before, over other ranks. With `reshard_after_forward` the parameters of all modules
    except the root are gathered again for the backward pass (ZeRO-3), without they stay gathered (ZeRO-2).
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    dtypes = () if precision is None else (precision.compute, precision.reduce)
    policy = MixedPrecisionPolicy(*dtypes)
    # For the root, None is torch's default, which does not reshard.
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
    if experts is not None:
        shard_experts_fully(experts, reshard_after_forward=reshard_after_forward, mp_policy=policy)
    for block in find_blocks(model):
        fully_shard(block, reshard_after_forward=reshard_after_forward, **options)
    fully_shard(model, reshard_after_forward=None if reshard_after_forward else False, **options)


def autocast(precision: Precision | None, device: str) -> AbstractContextManager[Any]:
    """Return the context in which a model without FSDP2 computes in the precision."""
    if precision is None or precision.is_uniform:
        return nullcontext()
    return torch.autocast(device, dtype=precision.compute)


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the members of a model's outermost module lists, the units of FSDP2."""
    blocks: list[nn.Module] = []
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            blocks += child
        else:
            blocks += find_blocks(child)
    return list(dict.fromkeys(blocks))


def unsharded_class(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module before `fully_shard`, which replaces it by a class of FSDPModule and that one."""
    bases: tuple[type[nn.Module], ...] = type(module).__bases__
    return bases[-1] if bases[0].__name__ == "FSDPModule" else type(module)


def materialise(model: nn.Module) -> None:
    """Give parameters uninitialised memory, never written to, so never allocated: FSDP2 rejects the meta device."""

    def allocate(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, nn.Parameter):
            return torch.empty_like(tensor, device="cpu")
        return torch.zeros_like(tensor, device="cpu") if tensor.device.type == "meta" else tensor

    model._apply(allocate)


def is_fully_sharded(model: nn.Module) -> bool:
    return next(_sharded_modules(model), None) is not None


def list_gathered(model: nn.Module) -> tuple[bool, ...]:
    """Return whether the parameters of each module that FSDP2 shards are gathered."""
    return tuple(_is_gathered(module) for module in _sharded_modules(model))


def set_gathered(model: nn.Module, gathered: tuple[bool, ...]) -> None:
    """Gather or reshard each module that FSDP2 shards, so that `list_gathered` returns `gathered`."""
    for module, wanted in zip(_sharded_modules(model), gathered, strict=True):
        if wanted != _is_gathered(module):
            module.unshard() if wanted else module.reshard()


def unshard(model: nn.Module) -> None:
    """Gather the parameters of all modules, as a pipeline schedule does before it runs a stage."""
    handles = [module.unshard(async_op=True) for module in _sharded_modules(model)]
    for handle in handles:
        handle.wait()


def reshard(model: nn.Module) -> None:
    for module in _sharded_modules(model):
        module.reshard()


def accumulate_only(model: Any) -> None:
    """Let backward passes accumulate gradients without reducing them, as a pipeline stage does for each microbatch."""
    model.set_is_last_backward(False)
    model.set_reshard_after_backward(False)
    model.set_requires_gradient_sync(False)
    if hasattr(model, "finalize_backward"):
        model.set_manual_backward_finalization(True)


def reduce_gradients(model: Any) -> None:
    """Reduce the accumulated gradients, as a pipeline stage does after the last microbatch."""
    if hasattr(model, "finalize_backward"):  # torch 2.15
        model.set_requires_gradient_sync(True)
        model.set_reshard_after_backward(True)
        model.finalize_backward()
        return
    from fvflops.torch_internals import reduce_stage_gradients

    # The scaling by the number of microbatches is not needed: a summed loss has none.
    reduce_stage_gradients(SimpleNamespace(submod=model, scale_grads=lambda factor: None), 1)


def _sharded_modules(model: nn.Module) -> Iterator[Any]:
    from torch.distributed.fsdp import FSDPModule

    return (module for module in model.modules() if isinstance(module, FSDPModule))


def _is_gathered(module: nn.Module) -> bool:
    return any(group.is_unsharded for group in parameter_groups([module]))
