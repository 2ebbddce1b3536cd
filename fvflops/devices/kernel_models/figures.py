"""Figures of kernels by GPU, read from a YAML file; a GPU not in it gets a near generation's, or the mean."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from statistics import geometric_mean, mode
from typing import Any

from fvflops import paths
from fvflops.devices.devices import Device, find_device
from fvflops.devices.kernel_models.collectives import CollectiveFigures, PeerFigures
from fvflops.devices.kernel_models.fused_attention import AttentionFigures, DecodeFigures
from fvflops.devices.kernel_models.memory_bound import MemoryFigures
from fvflops.devices.kernel_models.mixtures import MixtureFigures
from fvflops.devices.kernel_models.products import ProductFigures
from fvflops.devices.kernel_models.recurrent import RecurrentFigures
from fvflops.formulas.yaml_document import Node, read_entries

FIGURES = paths.SCHEME + "kernel_figures.yaml"
CLASSES: Mapping[str, type] = {
    "product": ProductFigures,
    "attention": AttentionFigures,
    "encoder": AttentionFigures,
    "decode": DecodeFigures,
    "trtllm decode": DecodeFigures,
    "latent": AttentionFigures,
    "latent decode": DecodeFigures,
    "recurrent": RecurrentFigures,
    "mixture": MixtureFigures,
    "memory": MemoryFigures,
    "collective": CollectiveFigures,
    "peers": PeerFigures,
}
_CAPABILITY = "capability"
# Class → its name, for the classes of most kernels of a training step.
_STEPS = {"product": "products", "attention": "attention", "memory": "memory-bound kernels"}
# Classes whose kernels are written for a chip: for a GPU without figures, other chips of its family are nearer than the
# mean. For the other classes the mean has the smaller errors (tools/kernel_times.py, which leaves out each GPU).
_OF_CHIPS = ("product", "attention", "encoder", "decode", "latent", "latent decode", "recurrent")
# Class → figure that is a fraction of the matrix peak → the figure that it is a factor of.
_TILES = {"large": "", "medium": "large", "small": "medium"}
_PROMPTS = {"peak": "", "narrow": "peak", "wide": "peak"}
_FRACTIONS: Mapping[str, Mapping[str, str]] = {
    "product": _TILES,
    "mixture": _TILES,
    "attention": _PROMPTS,
    "encoder": _PROMPTS,
    "latent": _PROMPTS,
    "decode": {"peak": ""},
    "latent decode": {"peak": ""},
}
# Matrix units are slower per clock cycle below this ratio (of GeForce: 0.5); between, datasheets state other clocks.
# They are then busy for at most this fraction of the time.
_SLOWER, _BUSY = 0.75, 0.97
# Figures with a few possible values, whose mean is the most frequent value.
_CHOICES = ("rows", "packed")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFigures:
    """Parameters of the times of a GPU's kernels besides its datasheet.

    `by_class` is class → dtype → figures, a dtype by its short name; `devices` is class → the GPU whose kernels were
    measured. `capability` is CUDA's compute capability, and `source` says who measured.
    """

    capability: tuple[int, int] | None
    by_class: Mapping[str, Mapping[str, Any]]
    devices: Mapping[str, str]
    source: str

    def of(self, kind: str, dtype: str) -> Any:
        """Return the figures of a class of kernels in a dtype, else in bf16, else in the first one of the class."""
        by_dtype = self.by_class[kind]
        return by_dtype.get(dtype) or by_dtype.get("bf16") or next(iter(by_dtype.values()))


def find_figures(device: Device, *, exclude: Collection[str] = ()) -> KernelFigures | None:
    """Return the figures of a GPU; for a class that it lacks, the mean of the nearest generation or of all GPUs.

    None where the datasheet lacks a needed value. `exclude` are GPUs whose figures are not used. Means are geometric.

    >>> from fvflops import find_device
    >>> find_figures(find_device("H100 PCIe")).devices["product"], find_figures(find_device("TPU v4"))
    ('H100 SXM and H200', None)
    """
    if not device.multiprocessors or not device.bandwidth:
        return None
    entries = {name: item for name, item in load_figures().items() if name not in exclude}
    by_class: dict[str, Mapping[str, Any]] = {}
    devices: dict[str, str] = {}
    for kind in CLASSES:
        measured = {name: item for name, item in entries.items() if kind in item.by_class}
        names = _find_nearest(device, measured, kind in _OF_CHIPS)
        devices[kind] = " and ".join(names) or f"the mean of {len(measured)} GPUs"
        by_class[kind] = _average([measured[name].by_class[kind] for name in names or measured])
        if names and device.name not in names:
            by_class[kind] = _with_ecc(by_class[kind], device, names)
        if device.name not in names and {_generation(entries[name]) for name in names} == {_generation(device)}:
            by_class[kind] = _at_rate(by_class[kind], _FRACTIONS.get(kind, {}), device, names)
    source = f"of {_name_devices(devices)}, {next(iter(entries.values())).source}"
    if device.name not in entries:
        source = f"not measured for {device.name}: {source}"
    return KernelFigures(capability=device.capability, by_class=by_class, devices=devices, source=source)


def _at_rate(
    by_dtype: Mapping[str, Any], fractions: Mapping[str, str], device: Device, measured: Sequence[str]
) -> Mapping[str, Any]:
    """Return larger fractions of the peak for matrix units that do less per clock cycle than the measured ones.

    The matrix units of an RTX 4090 do half as much as an L40S's, and are fed as fast.
    """
    found = {}
    for dtype, figures in by_dtype.items():
        given = [_per_cycle(find_device(name), dtype) for name in measured]
        share = _per_cycle(device, dtype) / geometric_mean(given) if all(given) else 1.0
        if not 0 < share < _SLOWER:
            found[dtype] = figures
            continue
        before, after = {"": 1.0}, {"": 1.0}
        for name, base in fractions.items():
            before[name] = before[base] * getattr(figures, name)
            after[name] = min(before[name] / share, max(before[name], _BUSY))
        found[dtype] = replace(figures, **{name: after[name] / after[base] for name, base in fractions.items()})
    return found


def _with_ecc(by_dtype: Mapping[str, Any], device: Device, measured: Sequence[str]) -> Mapping[str, Any]:
    """Return fractions of the bandwidth for a GPU whose ECC takes more or less of it than the measured ones' does."""
    own, *others = (1 - 1 / (item.ecc or math.inf) for item in (device, *map(find_device, measured)))
    ratio = own / geometric_mean(others)
    return {
        dtype: replace(item, bandwidth=ratio * item.bandwidth) if hasattr(item, "bandwidth") else item
        for dtype, item in by_dtype.items()
    }


def _per_cycle(device: Device, dtype: str) -> float:
    """Return how much more the matrix units do than the vector units in fp32; 0.0 where the datasheet lacks one."""
    return device.matrix.get(dtype, 0.0) / device.vector.get("fp32", float("inf"))


def _name_devices(devices: Mapping[str, str]) -> str:
    kinds: dict[str, list[str]] = {}
    for kind, name in _STEPS.items():
        kinds.setdefault(devices[kind], []).append(name)
    parts = (f"{name} ({', '.join(classes)})" for name, classes in kinds.items())
    return " and ".join(kinds if len(kinds) == 1 else parts)


def _find_nearest(device: Device, entries: Mapping[str, KernelFigures], is_of_chip: bool) -> list[str]:
    """Return the GPU if measured, else all of the nearest generation, [] if it is too different for the class."""
    if device.name in entries or device.capability is None:
        return [device.name] if device.name in entries else []
    major, minor = device.capability
    distances = {
        name: (abs(item.capability[0] - major), abs(item.capability[1] - minor))
        for name, item in entries.items()
        if item.capability is not None and _has_hbm(*item.capability) == _has_hbm(major, minor)
    }
    nearest = min(distances.values(), default=(0, 0))
    return [name for name, distance in distances.items() if distance == nearest and (is_of_chip or not distance[0])]


def _generation(chip: Device | KernelFigures) -> int | None:
    return chip.capability[0] if chip.capability else None


def _has_hbm(major: int, minor: int) -> bool:
    """Return whether chips of a compute capability have HBM, as for data centers; 8.6, 8.9 and 12.0 have GDDR."""
    return major in (9, 10) or (minor == 0 and major < 9)


def _average(figures: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return dtype → the geometric means of the figures that have the dtype; of `_CHOICES`, the most frequent value."""
    if len(figures) == 1:
        return figures[0]
    means = {}
    for dtype in dict.fromkeys(dtype for by_dtype in figures for dtype in by_dtype):
        given = [by_dtype[dtype] for by_dtype in figures if dtype in by_dtype]
        values = {item.name: [getattr(each, item.name) for each in given] for item in fields(given[0])}
        mean = {name: (mode if name in _CHOICES else geometric_mean)(each) for name, each in values.items()}
        means[dtype] = type(given[0])(**mean)
    return means


@lru_cache(maxsize=2)
def load_figures(file: str = FIGURES) -> Mapping[str, KernelFigures]:
    """Return device → its figures; a mistake in the file raises TableError with the file and the line."""
    return read_entries(file, "figures", _read)


def _read(node: Node, name: str) -> KernelFigures:
    found = node.fields(f"the figures of {name}", (_CAPABILITY, "source", *CLASSES))
    major, _, minor = found[_CAPABILITY].text(f"{_CAPABILITY} of {name}").partition(".")
    by_class = {
        kind: {dtype: _read_class(item, kind, name) for dtype, item in found[kind].fields(f"{kind} of {name}").items()}
        for kind in CLASSES
        if kind in found
    }
    return KernelFigures(
        capability=(int(major), int(minor)),
        by_class=by_class,
        devices=dict.fromkeys(by_class, name),
        source=found["source"].text(f"source of {name}"),
    )


def _read_class(node: Node, kind: str, name: str) -> Any:
    numbers = node.fields(f"{kind} of {name}", [field.name for field in fields(CLASSES[kind])])
    try:
        return CLASSES[kind](**{key: value.number(f"{key} of {name}") for key, value in numbers.items()})
    except TypeError as error:
        raise node.error(f"{kind} of {name}: {error}") from None
