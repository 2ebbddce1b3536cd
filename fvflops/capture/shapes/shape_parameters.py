"""Replace a model's parameters and buffers by shape tensors, for runs with autograd."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from fvflops.capture.model.model_index import ModelIndex
from fvflops.capture.model.script_copy import ScriptCopy
from fvflops.capture.recorder.tensor_specs import rebuild
from fvflops.capture.shapes.shape_mode import ShapeMode
from fvflops.torch_internals import is_wrapper_subclass, pytree

_PLAIN = frozenset({torch.Tensor, nn.Parameter})


class ShapeParameters:
    """Shape tensors for tensors on other devices than the run's: autograd requires gradients on the tensor's device."""

    def __init__(self, mode: ShapeMode) -> None:
        self._mode = mode
        self._copies: dict[int, torch.Tensor] = {}
        self._copy_ids: set[int] = set()  # a copy of a wrapper subclass may report another device than the run's
        self._originals: list[torch.Tensor] = []  # keeps them alive, since ids are reused

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the shape tensor for a tensor, or the tensor itself if it can be used unchanged."""
        if tensor.device == self._mode.device or tensor.layout is not torch.strided or id(tensor) in self._copy_ids:
            return tensor
        shape_copy = self._copies.get(id(tensor))
        if shape_copy is None:
            if is_wrapper_subclass(tensor):  # DTensor, quantized weight
                shape_copy = rebuild(tensor, self.of).requires_grad_(tensor.requires_grad)
                shape_copy._is_param = isinstance(tensor, nn.Parameter)
            elif type(tensor) not in _PLAIN and not tensor.requires_grad:
                return tensor  # such as bitsandbytes' Params4bit, whose attributes the forward reads
            elif self._mode.concrete.resolve(tensor)[1].known:
                return tensor  # the run computes with its values, and it needs no gradient
            else:
                shape_copy = self._mode.shape_tensor_for(tensor)
            self._copies[id(tensor)] = shape_copy
            self._copy_ids.add(id(shape_copy))
            self._originals.append(tensor)
        return shape_copy

    def in_values(self, values: Any) -> Any:
        return pytree.tree_map_only(torch.Tensor, self.of, values)

    def replace_in(self, model_index: ModelIndex, scripts: Iterable[ScriptCopy]) -> None:
        """Replace a model's parameters and buffers, which a snapshot restores; TorchScript's in its copies."""
        for script in scripts:
            script.share_tensors(self.of)
        for module in model_index.names:
            if isinstance(module, torch.jit.ScriptModule):
                continue
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        tensors[name] = self.of(tensor)  # type: ignore[assignment]
            if isinstance(module, nn.RNNBase):
                flat = [None if item is None else self.of(item) for item in module._flat_weights]
                module._flat_weights = flat
                # Otherwise its forward would see new weights, and flatten them again for cuDNN.
                module._flat_weight_refs = [
                    None if item is None else weakref.ref(item)  # type: ignore[arg-type]
                    for item in flat
                ]
        owners = self._mode.recorder.module_of_tensor
        owners.update({id(shape_copy): owners[key] for key, shape_copy in self._copies.items() if key in owners})
