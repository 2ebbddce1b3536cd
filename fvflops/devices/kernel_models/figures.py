"""Figures of kernels by GPU, read from a YAML file; a GPU that it lacks gets those of its generation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

from fvflops import paths
from fvflops.devices.devices import Device
from fvflops.devices.kernel_models.attention import AttentionFigures
from fvflops.devices.kernel_models.memory_bound import MemoryFigures
from fvflops.devices.kernel_models.products import ProductFigures
from fvflops.formulas.yaml_document import Node, read_document

FIGURES = paths.SCHEME + "kernel_figures.yaml"
_CLASSES: Mapping[str, type] = {"product": ProductFigures, "attention": AttentionFigures, "memory": MemoryFigures}


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFigures:
    """What the times of a GPU's kernels depend on besides its peaks; `source` says what they were fitted to."""

    product: ProductFigures
    attention: AttentionFigures
    memory: MemoryFigures
    source: str


def find_figures(device: Device) -> KernelFigures | None:
    """Return the figures of a GPU, or those of the nearest one of its vendor in generation; None without any.

    >>> from fvflops import find_device
    >>> find_figures(find_device("H100 PCIe")).source
    'not measured for H100 PCIe: those of H100 SXM (fitted to kernels of NVIDIA's AIConfigurator 0.12)'
    """
    entries = load_figures()
    if device.name in entries:
        return entries[device.name][1]
    if device.vendor != "NVIDIA" or device.capability is None or not device.multiprocessors or not device.bandwidth:
        return None
    target = device.capability
    name = min(entries, key=lambda name: _distance(entries[name][0], target))
    found = entries[name][1]
    values = {field.name: getattr(found, field.name) for field in fields(KernelFigures)}
    return KernelFigures(**{**values, "source": f"not measured for {device.name}: those of {name} ({found.source})"})


def _distance(capability: tuple[int, int], target: tuple[int, int]) -> tuple[int, int]:
    return abs(capability[0] - target[0]), abs(capability[1] - target[1])


@lru_cache(maxsize=2)
def load_figures(file: str = FIGURES) -> Mapping[str, tuple[tuple[int, int], KernelFigures]]:
    """Return device → its compute capability and figures."""
    document = read_document(file).fields("a file of figures", ("description", "figures"))
    return {name: _read(node, name) for name, node in document["figures"].fields("figures").items()}


def _read(node: Node, name: str) -> tuple[tuple[int, int], KernelFigures]:
    found = node.fields(f"the figures of {name}", ("capability", "source", *_CLASSES))
    parts: dict[str, Any] = {kind: _read_class(found[kind], kind, name) for kind in _CLASSES}
    major, _, minor = found["capability"].text(f"capability of {name}").partition(".")
    return (int(major), int(minor)), KernelFigures(source=found["source"].text(f"source of {name}"), **parts)


def _read_class(node: Node, kind: str, name: str) -> Any:
    numbers = node.fields(f"{kind} of {name}", [field.name for field in fields(_CLASSES[kind])])
    try:
        return _CLASSES[kind](**{key: float(value.text(f"{key} of {name}")) for key, value in numbers.items()})
    except (TypeError, ValueError) as error:
        raise node.error(f"{kind} of {name}: {error}") from None
