"""Sizes of images and audio in a checkpoint's preprocessor configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from fvflops.sources.json_settings import read_settings

# In the order in which they are read. Newer processors keep each preprocessor's settings below these keys.
_FILES = ("preprocessor_config.json", "processor_config.json")
_NESTED = ("image_processor", "feature_extractor", "audio_processor")
_BINS = ("num_mel_bins", "feature_size")
_MIN_BINS = 8  # the feature size of a waveform is 1


def read_preprocessor(folder: str) -> dict[str, Any]:
    """Return image_size (height, width), sampling_rate (samples/s) and bins that a folder's preprocessors name."""
    settings: list[Mapping[str, Any]] = []
    for name in _FILES:
        path = os.path.join(folder, name)
        if os.path.isfile(path):
            whole = read_settings(path, name)
            settings += [whole, *(whole[key] for key in _NESTED if isinstance(whole.get(key), Mapping))]
    found: dict[str, Any] = {}
    for part in settings:
        sides = _read_sides(part)
        bins = [part[name] for name in _BINS if isinstance(part.get(name), int) and part[name] >= _MIN_BINS]
        if sides is not None:
            found.setdefault("image_size", sides)
        if bins:
            found.setdefault("bins", bins[0])
        if isinstance(part.get("sampling_rate"), int):
            found.setdefault("sampling_rate", part["sampling_rate"])
    return found


def _read_sides(settings: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the height and width to which images are cropped or resized; of a shortest edge alone, a square.

    >>> _read_sides({"size": {"shortest_edge": 800, "longest_edge": 1333}})
    (800, 800)
    >>> _read_sides({"size": {"shortest_edge": 256}, "crop_size": {"height": 224, "width": 224}})
    (224, 224)
    """
    names = ("size",) if settings.get("do_center_crop") is False else ("crop_size", "size")
    for name in names:
        size = settings.get(name)
        if isinstance(size, int):
            return size, size
        if isinstance(size, Mapping):
            edges = (size.get("height"), size.get("width"))
            if not all(isinstance(edge, int) for edge in edges):
                edges = (size.get("shortest_edge"),) * 2
            if isinstance(edges[0], int) and isinstance(edges[1], int):
                return edges[0], edges[1]
    return None
