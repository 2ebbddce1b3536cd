"""Inputs of transformers models to which the rules in `transformers_inputs` do not apply: model_tables.yaml."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from fvflops.formulas.language.expression import Expression
from fvflops.sources.transformers.configurations import PLACEHOLDERS, read_tables
from fvflops.sources.transformers.input_request import (
    BINS,
    InputRequest,
    floats,
    image_channels,
    image_sides,
    integers,
    make_token_ids,
    ones,
    patch_grid,
)


def make_special_inputs(request: InputRequest) -> dict[str, Any]:
    """Return the inputs that model_tables.yaml has for a model type, {} where it has none."""
    entries = (item for item in read_tables()["special"] if request.model_type in item["models"])
    entry = next((item for item in entries if "accepting" not in item or request.accepts(item["accepting"])), None)
    if entry is None:
        return {}
    sizes = _Sizes(request, entry)
    return {
        name.removesuffix("?"): _make(value, sizes)
        for name, value in entry["inputs"].items()
        if not name.endswith("?") or request.accepts(name.removesuffix("?"))
    }


class _Sizes(dict[str, Any]):
    """Name of a size → its value, read from the request when an expression needs it."""

    def __init__(self, request: InputRequest, entry: Mapping[str, Any]) -> None:
        super().__init__()
        self.request, self._entry = request, entry

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> Any:
        self[name] = value = self._read(name)
        return value

    def _read(self, name: str) -> Any:
        if name in ("rows", "columns"):
            patch, square = (self.evaluate(part) for part in self._entry["grid"])
            return patch_grid(self.request, patch, math.isqrt(square))[name == "columns"]
        if name in self._entry.get("settings", {}):
            part, *names = self._entry["settings"][name]
            default = names.pop() if isinstance(names[-1], int) else None
            return self.request.setting(*names, part=part, default=default)
        value = _SIZES[name](self.request) if name in _SIZES else self.request.setting(name)
        return tuple(value) if isinstance(value, list) else value

    def evaluate(self, size: int | str) -> int:
        """Return a size, or the value of its expression."""
        return size if isinstance(size, int) else Expression.parse(size).evaluate(self)


_SIZES: Mapping[str, Callable[[InputRequest], Any]] = {
    "tokens": InputRequest.tokens,
    "codes": InputRequest.codes,
    "channels": image_channels,
    "height": lambda request: image_sides(request)[0],
    "width": lambda request: image_sides(request)[1],
    "chosen": lambda request: request.chosen_image() is not None,
    "patch": lambda request: request.setting("patch_size", part="vision"),
    "bins": lambda request: request.setting(*BINS, part="audio", default=80),
}


def _make(value: Any, sizes: _Sizes) -> Any:
    if value is None or isinstance(value, int):  # also true and false
        return value
    if isinstance(value, dict):
        return torch.cat([_make(part, sizes) for part in value["join"]], dim=1)
    if isinstance(value[0], str):
        return _KINDS[value[0]](sizes.request, *map(sizes.evaluate, value[1:]))
    is_nested = isinstance(value[0], list)
    rows = [[sizes.evaluate(size) for size in row] for row in (value if is_nested else [value])]
    return integers(rows if is_nested else rows[0])


def _video_session(request: InputRequest) -> Any:
    """Return a session of one frame, with a point on one object (SAM 2)."""
    module = inspect.getmodule(type(request.model))
    session_class = next(item for name, item in vars(module).items() if name.endswith("VideoInferenceSession"))
    side = image_sides(request)[0]
    frames = floats(request, 1, 3, side, side)
    devices = ("inference_device", "inference_state_device", "video_storage_device")
    sizes = {"video_height": side, "video_width": side, "dtype": frames.dtype}
    session = session_class(video=frames, **sizes, **dict.fromkeys(devices, frames.device))
    index = session.obj_id_to_idx(1)
    points = {"point_coords": torch.full((1, 1, 1, 2), side / 2, device="cpu"), "point_labels": ones(1, 1, 1)}
    session.add_point_inputs(index, 0, points)
    session.obj_with_new_inputs = [1]
    return session


def _placeholders(modality: str, request: InputRequest, count: int) -> torch.Tensor:
    return torch.full((1, count), request.setting(*PLACEHOLDERS[modality]), device="cpu")


def _positions(request: InputRequest, rows: int, columns: int) -> torch.Tensor:
    return integers([[[column, row] for row in range(rows) for column in range(columns)]])


_KINDS: Mapping[str, Callable[..., Any]] = {
    "floats": floats,
    "ones": lambda request, *shape: ones(*shape),
    "zeros": lambda request, *shape: torch.zeros_like(ones(*shape)),
    "true": lambda request, *shape: ones(*shape).bool(),
    "false": lambda request, *shape: ~ones(*shape).bool(),
    "tokens": lambda request, rows, length: make_token_ids(request, length).repeat(rows, 1),
    "image": partial(_placeholders, "image"),
    "audio": partial(_placeholders, "audio"),
    "positions": _positions,
    "cycle": lambda request, length, rows, columns: (torch.arange(rows * columns) % length).view(rows, columns),
    "session": _video_session,
}


def make_fixed_inputs(request: InputRequest) -> dict[str, Any]:
    """Return the inputs of a model type whose shape is fixed, None for omitted ones."""
    tables = read_tables()
    fixed = tables["fixed"].get(request.model_type, {})
    made: dict[str, Any] = {name: floats(request, *shape) for name, shape in fixed.items()}
    return made | dict.fromkeys(tables["omitted"].get(request.model_type, ()))
