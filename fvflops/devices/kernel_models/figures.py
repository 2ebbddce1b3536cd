"""Figures of kernels by GPU, read from a YAML file; a GPU that it lacks gets those of its generation, or the mean."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from statistics import geometric_mean
from typing import Any

from fvflops import paths
from fvflops.devices.devices import Device
from fvflops.devices.kernel_models.collectives import CollectiveFigures, PeerFigures
from fvflops.devices.kernel_models.decoding import DecodeFigures
from fvflops.devices.kernel_models.fused_attention import AttentionFigures
from fvflops.devices.kernel_models.memory_bound import MemoryFigures
from fvflops.devices.kernel_models.mixtures import MixtureFigures
from fvflops.devices.kernel_models.products import ProductFigures
from fvflops.devices.kernel_models.recurrent import RecurrentFigures
from fvflops.formulas.yaml_document import Node, read_document

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
    "short convolution": MemoryFigures,
    "mixture": MixtureFigures,
    "memory": MemoryFigures,
    "collective": CollectiveFigures,
    "peers": PeerFigures,
}
_CAPABILITY = "capability"
# Classes of most kernels of a training step.
_STEPS = ("product", "attention", "memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFigures:
    """What the times of a GPU's kernels depend on besides its datasheet.

    `by_class` is class → dtype → figures, a dtype by its short name; `devices` is class → the GPU whose kernels were
    measured. `capability` is CUDA's compute capability, and `source` says who measured.
    """

    capability: tuple[int, int] | None
    by_class: Mapping[str, Mapping[str, Any]]
    devices: Mapping[str, str]
    source: str

    def of(self, kind: str, dtype: str) -> Any:
        """Return the figures of a class of kernels in a dtype, else in the first one of the class."""
        by_dtype = self.by_class[kind]
        return by_dtype.get(dtype) or next(iter(by_dtype.values()))


def find_figures(device: Device, *, without: Collection[str] = ()) -> KernelFigures | None:
    """Return the figures of a GPU, else of its generation, else the geometric mean over all measured GPUs, by class.

    None where the datasheet lacks what they need. `without` are GPUs whose figures are not taken.

    >>> from fvflops import find_device
    >>> find_figures(find_device("H100 PCIe")).devices["product"], find_figures(find_device("TPU v4"))
    ('H100 SXM', None)
    """
    if not device.multiprocessors or not device.bandwidth:
        return None
    entries = {name: item for name, item in load_figures().items() if name not in without}
    by_class: dict[str, Mapping[str, Any]] = {}
    devices: dict[str, str] = {}
    for kind in CLASSES:
        measured = {name: item for name, item in entries.items() if kind in item.by_class}
        name = _find_nearest(device, measured)
        devices[kind] = name or f"{len(measured)} GPUs in the mean"
        by_class[kind] = (
            measured[name].by_class[kind] if name else _average([i.by_class[kind] for i in measured.values()])
        )
    measured_on = dict.fromkeys(devices[kind] for kind in _STEPS)
    source = f"of {' and '.join(measured_on)}, {next(iter(entries.values())).source}"
    if device.name not in entries:
        source = f"not measured for {device.name}: {source}"
    return KernelFigures(capability=device.capability, by_class=by_class, devices=devices, source=source)


def _find_nearest(device: Device, entries: Mapping[str, KernelFigures]) -> str:
    """Return the GPU itself, else the nearest one of its generation, "" without any."""
    if device.name in entries or device.capability is None:
        return device.name if device.name in entries else ""
    major, minor = device.capability
    distances = {
        name: abs(item.capability[1] - minor)
        for name, item in entries.items()
        if item.capability is not None and item.capability[0] == major
    }
    # 8.0 is the A100, whose chip has little in common with those of 8.6 and 8.9.
    near = [name for name, distance in distances.items() if distance <= _SAME_GENERATION]
    return min(near, key=lambda name: distances[name], default="")


_SAME_GENERATION = 3


def _average(figures: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return dtype → the geometric means of figures, over those that have the dtype."""
    means = {}
    for dtype in dict.fromkeys(dtype for by_dtype in figures for dtype in by_dtype):
        given = [by_dtype[dtype] for by_dtype in figures if dtype in by_dtype]
        names = [item.name for item in fields(given[0])]
        values = {name: geometric_mean([getattr(item, name) for item in given]) for name in names}
        means[dtype] = type(given[0])(**values)
    return means


@lru_cache(maxsize=2)
def load_figures(file: str = FIGURES) -> Mapping[str, KernelFigures]:
    """Return device → its figures; a mistake in the file raises TableError with the file and the line."""
    document = read_document(file).fields("a file of figures", ("description", "figures"))
    return {name: _read(node, name) for name, node in document["figures"].fields("figures").items()}


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
        return CLASSES[kind](**{key: float(value.text(f"{key} of {name}")) for key, value in numbers.items()})
    except (TypeError, ValueError) as error:
        raise node.error(f"{kind} of {name}: {error}") from None
