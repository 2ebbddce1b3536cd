"""Sizes of a model's default inputs: `--batch`, `--seq` and `--image-size`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import nn

from fvflops.capture.model.read_module_tree import describe_inputs
from fvflops.sources.options import SourceOptions, option_of
from fvflops.text import printable

_SIZES = ("batch", "seq", "image_size")  # fields of SourceOptions
POSITION_NAMES = ("position", "pos_emb", "wpe")  # in the names of weights with a row for each position


def chosen_sizes(options: SourceOptions) -> list[str]:
    """Return the fields of the options that are sizes of default inputs and are set."""
    return [name for name in _SIZES if getattr(options, name) is not None]


def resize_inputs(inputs: Any, kwargs: Mapping[str, Any], options: SourceOptions, model: str) -> tuple[Any, Any]:
    """Return inputs in the sizes of the options, with the values of the given ones, repeated where there are too few.

    A batch is axis 0 of every tensor, a sequence axis 1 of the integer tensors of two axes, and an image the last two
    axes of the floating-point tensors of four or more. An option that applies to no tensor raises ValueError.
    """
    values: Any = (inputs, dict(kwargs))
    for name in chosen_sizes(options):
        applied: list[torch.Tensor] = []
        values = _map_tensors(values, _RESIZE[name], getattr(options, name), applied)
        if not applied:
            raise_unused((name,), model, inputs, kwargs)
    inputs, kwargs = values
    return inputs, kwargs


def check_positions(model: nn.Module, options: SourceOptions) -> None:
    """Raise ValueError for more tokens than the model has learned positions: on meta their lookup does not raise."""
    for name, module in model.named_modules():
        is_table = isinstance(module, nn.Embedding) and any(part in name for part in POSITION_NAMES)
        if options.seq is not None and is_table and module.num_embeddings < options.seq:
            refuse_length(options.seq, model, name, module.num_embeddings)


def refuse_length(tokens: int, model: nn.Module, table: str, limit: int) -> NoReturn:
    """Raise ValueError: more tokens than a model has positions, in the weight or buffer `table`."""
    has = f"{type(model).__name__} has positions for {limit} tokens only ({printable(table)})"
    raise ValueError(f"--seq {tokens}: {has}: pass at most --seq {limit}")


def raise_unused(names: Iterable[str], model: str, inputs: Any, kwargs: Mapping[str, Any]) -> None:
    """Raise ValueError: an option that sets no size of the model's default inputs."""
    for name in names:
        positional = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
        described = ", ".join(describe_inputs(tuple(positional), kwargs)) or "none"
        problem = f"{option_of(name)} does not apply to the default inputs of {model} ({described})"
        raise ValueError(f"{problem}: omit it, or pass --input for each input")


def _map_tensors(value: Any, change: Callable[..., Any], size: Any, applied: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        changed = change(value, size)
        if changed is None:
            return value
        applied.append(changed)
        return changed
    if type(value) is list and value and all(isinstance(item, torch.Tensor) for item in value):
        return _resize_list(value, change, size, applied)
    if isinstance(value, Mapping):
        return {key: _map_tensors(item, change, size, applied) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_map_tensors(item, change, size, applied) for item in value)
    return value


def _resize_list(images: list[torch.Tensor], change: Callable[..., Any], size: Any, applied: list[torch.Tensor]) -> Any:
    """Return a list of images, as detectors accept: each is (channels, height, width), and the list is the batch."""
    if change is _set_batch:
        images = [images[index % len(images)] for index in range(size)]
        applied += images
        return images
    resized = [_map_tensors(image[None], change, size, applied) for image in images]
    return [image[0] for image in resized]


def _set_batch(tensor: torch.Tensor, batch: int) -> torch.Tensor | None:
    return _cycle(tensor, 0, batch) if tensor.ndim else None


def _set_length(tensor: torch.Tensor, length: int) -> torch.Tensor | None:
    if tensor.ndim != 2 or tensor.is_floating_point() or tensor.is_complex():
        return None
    return _cycle(tensor, 1, length)


def _set_image(tensor: torch.Tensor, sides: tuple[int, int]) -> torch.Tensor | None:
    if tensor.ndim < 4 or not tensor.is_floating_point():
        return None
    return _cycle(_cycle(tensor, -2, sides[0]), -1, sides[1])


def _cycle(tensor: torch.Tensor, axis: int, size: int) -> torch.Tensor:
    """Return a tensor of another size along an axis, whose values are repeated in turn.

    >>> _cycle(torch.tensor([[1, 2, 3]]), 1, 5).tolist()
    [[1, 2, 3, 1, 2]]
    """
    return tensor.index_select(axis, torch.arange(size, device=tensor.device) % max(1, tensor.shape[axis]))


_RESIZE: Mapping[str, Callable[..., torch.Tensor | None]] = {
    "batch": _set_batch,
    "seq": _set_length,
    "image_size": _set_image,
}
