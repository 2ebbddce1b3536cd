"""Figures of kernels by GPU, read from a YAML file; a GPU that it lacks gets those of the nearest generation."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

from fvflops import paths
from fvflops.devices.devices import Device
from fvflops.devices.kernel_models.attention import AttentionFigures, DecodeFigures
from fvflops.devices.kernel_models.memory_bound import MemoryFigures
from fvflops.devices.kernel_models.products import ProductFigures
from fvflops.formulas.yaml_document import Node, read_document

FIGURES = paths.SCHEME + "kernel_figures.yaml"
CLASSES: Mapping[str, type] = {
    "product": ProductFigures,
    "attention": AttentionFigures,
    "decode": DecodeFigures,
    "memory": MemoryFigures,
}
_CAPABILITY = "capability"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFigures:
    """What the times of a GPU's kernels depend on besides its datasheet.

    `by_class` is class → dtype → figures, a dtype by its short name; `devices` is class → the GPU whose kernels were
    measured. `capability` is CUDA's compute capability, and `source` says who measured.
    """

    capability: tuple[int, int]
    by_class: Mapping[str, Mapping[str, Any]]
    devices: Mapping[str, str]
    source: str

    def of(self, kind: str, dtype: str) -> Any:
        """Return the figures of a class of kernels in a dtype, else in the first one of the class."""
        by_dtype = self.by_class[kind]
        return by_dtype.get(dtype) or next(iter(by_dtype.values()))


def find_figures(device: Device, *, without: Collection[str] = ()) -> KernelFigures | None:
    """Return the figures of a GPU, of each class that it lacks those of the nearest generation.

    None where the datasheet lacks what they need. `without` are GPUs whose figures are not taken.

    >>> from fvflops import find_device
    >>> find_figures(find_device("H100 PCIe")).devices["product"], find_figures(find_device("TPU v4"))
    ('H100 SXM', None)
    """
    if not device.multiprocessors or not device.bandwidth:
        return None
    # GPUs of other vendors have no compute capability: the generation of which most is known stands in for theirs.
    wanted = device.capability or (9, 0)
    entries = [item for name, item in load_figures().items() if name not in without]
    entries.sort(key=lambda item: _distance(item, device.name, wanted))
    by_class: dict[str, Mapping[str, Any]] = {}
    devices: dict[str, str] = {}
    for item in entries:
        for kind, figures in item.by_class.items():
            if kind not in by_class:
                by_class[kind], devices[kind] = figures, item.devices[kind]
    measured = " and ".join(sorted(set(devices.values())))
    source = f"of {measured}, {entries[0].source}"
    if device.name not in devices.values():
        source = f"not measured for {device.name}: {source}"
    return KernelFigures(capability=wanted, by_class=by_class, devices=devices, source=source)


def _distance(entry: KernelFigures, name: str, wanted: tuple[int, int]) -> tuple[bool, int, int]:
    major, minor = entry.capability
    return name not in entry.devices.values(), abs(major - wanted[0]), abs(minor - wanted[1])


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
