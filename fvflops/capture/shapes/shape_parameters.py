"""The stand-ins: shape tensors in the place of a model's parameters and buffers, for a run under autograd."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from fvflops.capture.model.model_index import ModelIndex
from fvflops.capture.shapes.shape_mode import ShapeMode
from fvflops.torch_internals import is_wrapper_subclass, pytree


class ShapeParameters:
    """Shape tensors for those tensors that are on another device than the run.

    Autograd wants a gradient on the device of what it belongs to.
    """

    def __init__(self, mode: ShapeMode) -> None:
        self._mode = mode
        self._twins: dict[int, torch.Tensor] = {}
        self._kept: list[torch.Tensor] = []

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what stands for a tensor: itself, where it may stay."""
        if tensor.device == self._mode.device or tensor.layout is not torch.strided:
            return tensor
        twin = self._twins.get(id(tensor))
        if twin is None:
            if is_wrapper_subclass(tensor):
                twin = self._wrap_again(tensor)
            elif self._mode.reals.resolve(tensor)[1].known:
                return tensor  # the run computes with its numbers, and autograd wants no gradient of it
            else:
                twin = self._mode.stand_in(tensor)
            self._twins[id(tensor)] = twin
            self._kept.append(tensor)
        return twin

    def in_values(self, values: Any) -> Any:
        """Return nested values with what stands for their tensors."""
        return pytree.tree_map_only(torch.Tensor, self.of, values)

    def put_into(self, reading: ModelIndex) -> None:
        """Put what stands for them in the place of a model's parameters and buffers; a snapshot puts these back."""
        for module in reading.names:
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        tensors[name] = self.of(tensor)  # type: ignore[assignment]
            if isinstance(module, nn.RNNBase):
                flat = [None if item is None else self.of(item) for item in module._flat_weights]
                module._flat_weights = flat
                # Else its forward would take the weights for new ones, and lay them out anew for cuDNN.
                module._flat_weight_refs = [
                    None if item is None else weakref.ref(item)  # type: ignore[arg-type]
                    for item in flat
                ]
        homes = self._mode.recorder.module_of_tensor
        homes.update({id(twin): homes[key] for key, twin in self._twins.items() if key in homes})

    def _wrap_again(self, tensor: Any) -> torch.Tensor:
        """Return a wrapper (a DTensor, a quantised weight) like another, around other tensors."""
        names, context = tensor.__tensor_flatten__()
        held = {name: getattr(tensor, name) for name in names}
        inner = {name: self.of(value) if isinstance(value, torch.Tensor) else value for name, value in held.items()}
        again = type(tensor).__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())
        again.requires_grad_(tensor.requires_grad)
        again._is_param = isinstance(tensor, nn.Parameter)
        return again
