"""Tensors that a program offloads to the host's memory, in shape execution for another device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from fvflops.capture.instrument.patching import Patch, Wrapper
from fvflops.capture.shapes.meta_run import META
from fvflops.capture.shapes.shape_tensor import ShapeTensor

# The host. Without an index the CPU may stand for the device, since programs create tensors there by default.
HOST = torch.device("cpu", 0)

_SAVE_ON_CPU = Patch(save_on_cpu, "__init__")


def offloaded_activations() -> Iterator[Wrapper]:
    """Yield the wrapper by which `torch.autograd.graph.save_on_cpu` copies saved shape tensors to the host and back.

    Where this machine lacks the device, its tensors are on the CPU for torch, so that `Tensor.cpu` copies nothing.
    """

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        def __init__(hooks: saved_tensors_hooks, *args: Any, **kwargs: Any) -> None:
            original(hooks, *args, **kwargs)

            def offload(tensor: torch.Tensor) -> torch.Tensor:
                if type(tensor) is not ShapeTensor:
                    return tensor  # a small one, whose values are known
                return torch.ops.aten._to_copy.default(tensor, device=HOST)

            def reload(packed: torch.Tensor) -> torch.Tensor:
                if type(packed) is not ShapeTensor:
                    return packed
                return torch.ops.aten._to_copy.default(packed, device=META)

            hooks.pack_hook, hooks.unpack_hook = offload, reload

        return __init__

    yield _SAVE_ON_CPU, around
