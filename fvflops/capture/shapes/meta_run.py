"""Infer an op's results by running it on meta tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fvflops.capture.recorder.tensor_specs import OpSchema, tensors_of
from fvflops.capture.restore.restore import written_arguments
from fvflops.capture.shapes.metadata import Metadata, bits_of, intern
from fvflops.capture.shapes.shape_cache import CachedResult, Output
from fvflops.capture.shapes.symbolic_imports import without_symbolic_imports
from fvflops.torch_internals import pytree, set_conjugate, set_negative

META = torch.device("meta")


def meta_tensor_of(metadata: Metadata) -> torch.Tensor:
    """Return a meta tensor with this metadata."""
    meta_tensor = torch.empty_strided(metadata.shape, metadata.stride, dtype=metadata.dtype, device=META)
    if metadata.is_conjugate:
        set_conjugate(meta_tensor, True)
    if metadata.is_negative:
        set_negative(meta_tensor, True)
    return meta_tensor


def substitute(value: Any, tensor: Callable[[torch.Tensor], Any], device: Callable[[torch.device], Any]) -> Any:
    """Return nested arguments with tensors and devices replaced."""
    if isinstance(value, torch.Tensor):
        return tensor(value)
    if isinstance(value, torch.device):
        return device(value)
    if isinstance(value, (list, tuple)):
        items = [substitute(item, tensor, device) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict):
        return {key: substitute(item, tensor, device) for key, item in value.items()}
    return value


def unpack_result(result: Any) -> tuple[list[Any], Callable[[list[Any]], Any] | None]:
    """Return the items of an op's result, and the function that rebuilds it from items, None for a single item."""
    if not isinstance(result, (list, tuple)):
        return [result], None
    if not any(isinstance(item, (list, tuple)) for item in result):
        return list(result), tuple if isinstance(result, tuple) else list
    items, spec = pytree.tree_flatten(result)
    return items, lambda items: pytree.tree_unflatten(items, spec)


class OutputInference:
    """An op call that is run on meta tensors; `metadata` are those of `tensors`, its argument tensors in order.

    `device` is the result's device if no argument determines it. `shown_device` maps a requested device to the device
    that the run reports.
    """

    def __init__(
        self,
        schema: OpSchema,
        tensors: Sequence[torch.Tensor],
        metadata: Sequence[Metadata],
        device: torch.device,
        shown_device: Callable[[torch.device], torch.device],
    ) -> None:
        self.schema = schema
        self._tensors = tensors
        self.metadata = metadata
        self._device = device
        self._shown_device = shown_device

    def run(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, use_known: bool = False
    ) -> CachedResult:
        """Return the outcome without its signature; exceptions of the shape rule propagate.

        `use_known` passes tensors with known values themselves, for a data-dependent result.
        """
        written = {id(tensor) for value in written_arguments(self.schema, args, kwargs) for tensor in tensors_of(value)}
        meta_tensors: dict[int, torch.Tensor] = {}
        metas: list[torch.Tensor] = []
        for tensor, metadata in zip(self._tensors, self.metadata, strict=True):
            if id(tensor) not in meta_tensors:
                use_tensor = use_known and metadata.known and id(tensor) not in written
                meta_tensors[id(tensor)] = tensor if use_tensor else meta_tensor_of(metadata)
            metas.append(meta_tensors[id(tensor)])
        devices: list[torch.device] = []

        def on_meta(device: torch.device) -> torch.device:
            devices.append(self._shown_device(device))
            return META

        meta_args = [substitute(value, lambda tensor: meta_tensors[id(tensor)], on_meta) for value in args]
        meta_kwargs = {
            name: substitute(value, lambda tensor: meta_tensors[id(tensor)], on_meta)
            for name, value in kwargs.items()
            if name != "pin_memory"
        }
        device_position = self.schema.position.get("device")
        if device_position is not None and not devices and len(args) <= device_position:
            meta_kwargs["device"] = META
        with without_symbolic_imports():
            result = func(*meta_args, **meta_kwargs)
        default_device = devices[0] if devices else self._common_device()
        resized = tuple(
            (index, self._describe(meta, metadata.device))
            for index, (meta, metadata) in enumerate(zip(metas, self.metadata, strict=True))
            if (meta.shape, meta.stride()) != (metadata.shape, metadata.stride)
        )
        resized_metadata = dict(resized)
        storages = {meta.untyped_storage()._cdata: index for index, meta in reversed(list(enumerate(metas)))}
        identities = {id(meta): index for index, meta in reversed(list(enumerate(metas)))}

        def output(item: Any) -> Output:
            if not isinstance(item, torch.Tensor):
                return Output(None, value=item)
            argument = identities.get(id(item))
            if argument is not None:
                return Output(resized_metadata.get(argument, self.metadata[argument]), argument, True)
            if item.device != META:
                return Output(None, value=item)  # values that the rule computed
            _require_strided(item)
            storage = item.untyped_storage()
            source = storages.get(storage._cdata)
            if source is not None:
                view = self._describe(item, self.metadata[source].device)
                return Output(view, source, offset=int(item.storage_offset()))
            metadata = self._describe(item, default_device)
            same_size = metadata.nbytes == storage.nbytes()
            return Output(metadata, row=metadata.row if same_size else (storage.nbytes(), *metadata.row[1:]))

        items, build = unpack_result(result)
        return CachedResult(
            signature=None,
            outputs=tuple(output(item) for item in items),
            build=build,
            resized=resized,
            written=tuple(index for index, tensor in enumerate(self._tensors) if id(tensor) in written),
        )

    def _describe(self, tensor: torch.Tensor, device: torch.device) -> Metadata:
        _require_strided(tensor)
        return intern(tuple(tensor.shape), tensor.stride(), tensor.dtype, device, False, bits_of(tensor))

    def _common_device(self) -> torch.device:
        """Return an op's device: that of its tensors, where a 0-dim tensor yields to others."""
        for metadata in self.metadata:
            if metadata.shape:
                return metadata.device
        return self.metadata[0].device if self.metadata else self._device


def _require_strided(tensor: torch.Tensor) -> None:
    if tensor.layout is not torch.strided or tensor.is_nested:
        layout = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise NotImplementedError(f"its result is a {layout} tensor, which shape execution does not support")
