"""Efficiencies of devices and networks of nodes, read from YAML files, and the network that is assumed by default."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from fvflops import paths
from fvflops.devices.devices import Device
from fvflops.formulas.yaml_document import Node, read_document
from fvflops.plan.step_time.efficiency import Efficiency
from fvflops.plan.step_time.network import Link, Network
from fvflops.text import suggest, truncate

EFFICIENCIES = paths.SCHEME + "efficiencies.yaml"
NETWORKS = paths.SCHEME + "networks.yaml"
_NUMBERS = tuple(field.name for field in dataclasses.fields(Efficiency) if field.name not in ("tile", "source"))
# A device without an efficiency of its own is given that of this one.
_DEFAULT = "A100 SXM 80GB"


def find_efficiency(device: str, *, file: str = EFFICIENCIES) -> Efficiency:
    """Return the efficiency of a device by its name in devices.yaml.

    One that the file does not have gets that of the A100, and says so in `source`. A mistake in the file raises
    TableError with the file and the line.

    >>> find_efficiency("A100 SXM 80GB").tile
    (128, 128)
    """
    found = load_efficiencies(file)
    if device in found:
        return found[device]
    other = found.get(_DEFAULT) or next(iter(found.values()))
    return dataclasses.replace(other, source=f"not measured for {device}: that of {_DEFAULT} ({other.source})")


def find_network(name: str, *, file: str = NETWORKS) -> Network:
    """Return the network of a name; an unknown one raises ValueError with the nearest.

    >>> find_network("HGX H100 3200G").gpus_per_node
    8
    """
    networks = load_networks(file)
    if name not in networks:
        raise ValueError(f"no network {name!r}{suggest(name, networks)}")
    return networks[name]


@lru_cache(maxsize=8)
def load_efficiencies(file: str = EFFICIENCIES) -> Mapping[str, Efficiency]:
    """Return device → efficiency of a YAML file."""
    return {name: _read_efficiency(node, name) for name, node in _entries(file, "efficiencies").items()}


@lru_cache(maxsize=8)
def load_networks(file: str = NETWORKS) -> Mapping[str, Network]:
    """Return name → network of a YAML file."""
    return {name: _read_network(node, name) for name, node in _entries(file, "networks").items()}


def _entries(file: str, key: str) -> dict[str, Node]:
    document = read_document(file)
    fields = document.fields(f"a file of {key}", ("description", key))
    if key not in fields:
        raise document.error(f"there are no {key}: add {key}, and under it a name")
    return fields[key].fields(key)


def _read_efficiency(node: Node, name: str) -> Efficiency:
    fields = node.fields(f"the efficiency of {name}", (*_NUMBERS, "tile", "source"))
    values: dict[str, float] = {key: _number(fields[key], f"{key} of {name}") for key in _NUMBERS if key in fields}
    items = fields["tile"].items("tile", "[128, 128]") if "tile" in fields else ()
    tile = tuple(_integer(item, f"tile of {name}") for item in items) or (1, 1)
    if len(tile) != 2:
        raise fields["tile"].error(f"tile of {name} must be rows and columns, such as [128, 128]")
    try:
        return Efficiency(tile=(tile[0], tile[1]), source=_source(node, fields, name), **values)
    except ValueError as error:
        raise node.error(f"{name}: {error}") from None


def _read_network(node: Node, name: str) -> Network:
    fields = node.fields(f"the network {name}", ("gpus_per_node", "inside", "between", "source"))
    for key in ("gpus_per_node", "inside", "between"):
        if key not in fields:
            raise node.error(f"{name} has no {key}")
    return Network(
        name=name,
        gpus_per_node=_integer(fields["gpus_per_node"], f"gpus_per_node of {name}"),
        inside=_read_link(fields["inside"], f"inside of {name}"),
        between=_read_link(fields["between"], f"between of {name}"),
        source=_source(node, fields, name),
    )


def _read_link(node: Node, what: str) -> Link:
    fields = node.fields(what, ("bandwidth", "latency"))
    for key in ("bandwidth", "latency"):
        if key not in fields:
            raise node.error(f"{what} has no {key}")
    try:
        return Link(_number(fields["bandwidth"], f"bandwidth, {what}"), _number(fields["latency"], f"latency, {what}"))
    except ValueError as error:
        raise node.error(str(error)) from None


def _source(node: Node, fields: Mapping[str, Node], name: str) -> str:
    if "source" not in fields:
        raise node.error(f"{name} has no source: say where its figures are from")
    return fields["source"].text(f"source of {name}")


def _number(node: Node, what: str) -> float:
    text = node.text(what)
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not math.isfinite(number):
        raise node.error(f"{what} is {truncate(text)!r}: write a number such as 2.5e-6")
    return number


def _integer(node: Node, what: str) -> int:
    number = _number(node, what)
    if not number.is_integer() or number < 1:
        raise node.error(f"{what} is {number:g}: write an integer of at least 1")
    return int(number)


# Beginning of a device's name → network.
_NETWORKS: Mapping[str, str] = {
    "A100 SXM": "HGX A100 1600G",
    "H100 SXM": "HGX H100 3200G",
    "H200": "HGX H100 3200G",
}


def assume_network(device: Device) -> Network | None:
    """Return the network of a device's family, which says in `source` that it is assumed; None for other devices.

    >>> from fvflops import find_device
    >>> network = assume_network(find_device("H100"))
    >>> network.name, network.source.partition(":")[0], assume_network(find_device("MI300X"))
    ('HGX H100 3200G', 'assumed for H100 SXM, since none is given', None)
    """
    name = next((network for prefix, network in _NETWORKS.items() if device.name.startswith(prefix)), None)
    if name is None:
        return None
    network = find_network(name)
    return replace(network, source=f"assumed for {device.name}, since none is given: {network.source}")
