"""Efficiencies of devices and networks of nodes, read from YAML files, and the network that is assumed by default."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any, NamedTuple

from fvflops import paths
from fvflops.devices.devices import Device, resolve_device, short_dtype
from fvflops.devices.kernel_models.collectives import Fabric, NodeLink
from fvflops.devices.kernel_models.figures import KernelFigures, find_figures, load_figures
from fvflops.devices.kernel_models.fused_attention import (
    Attention,
    attention_backward_seconds,
    attention_seconds,
    decode_seconds,
)
from fvflops.devices.kernel_models.memory_bound import memory_seconds
from fvflops.devices.kernel_models.products import Processor, Product, product_seconds
from fvflops.devices.utilisation import check_float32_matmul, product_dtype
from fvflops.formulas.yaml_document import Node, read_entries
from fvflops.plan.step_time.kernel_times import CUDNN, Kernel
from fvflops.text import explaining_arguments, record_repr, suggest, truncate
from fvflops.trace.process_group import ProcessGroupSpec


@explaining_arguments
@dataclass(frozen=True, slots=True)
class Link:
    """One GPU's link in one direction: bytes/s that a collective reaches, and seconds for each step of it."""

    bandwidth: float
    latency: float

    def __post_init__(self) -> None:
        if not 0 < self.bandwidth < math.inf or not 0 <= self.latency < math.inf:
            raise ValueError(f"a link needs a bandwidth above 0 and a latency of at least 0; got {self}")


@explaining_arguments
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Network:
    """Nodes of `gpus_per_node` GPUs, linked by `inside` within a node and by `between` among nodes.

    `between` is the share of one GPU: the bandwidth of all of a node's adapters divided by its GPUs. A group with few
    ranks in a node has only their shares, since the ranks of other groups use the rest at the same time. It is assumed
    for the devices in `gpus`.
    """

    name: str
    gpus_per_node: int
    inside: Link | NodeLink
    between: Link
    source: str = ""
    gpus: tuple[str, ...] = ()

    __repr__ = record_repr

    def seconds(self, collective: str, nbytes: int, group: ProcessGroupSpec) -> float:
        """Return the time of a collective with a payload of `nbytes`, as nccl-tests define it.

        Ring algorithms; an all-reduce uses two trees, each for half of the payload, where they are faster. Source:
        NVIDIA nccl-tests, PERFORMANCE.md; Thakur et al., "Optimization of collective communication operations in
        MPICH" (2005); Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan"
        (2009), as in NCCL.

        >>> fast = Network(name="", gpus_per_node=8, inside=Link(200e9, 0), between=Link(20e9, 0))
        >>> ranks = ProcessGroupSpec("", 8, "tp", 0, 1)
        >>> fast.seconds("all_reduce", 10**9, ranks), fast.seconds("all_gather", 10**9, ranks)
        (0.00875, 0.004375)
        """
        size = group.size
        if size < 2 or collective == "barrier":
            return 0.0
        nodes, members = self.span(group)
        is_pair = collective in ("send", "receive")
        if isinstance(self.inside, NodeLink):
            if nodes == 1 and not is_pair:
                return self.inside.seconds(collective, size, nbytes)
            return replace(self, inside=Link(*self.inside.ring(members))).seconds(collective, nbytes, group)
        bandwidth = self.bandwidth(nodes, members)
        if is_pair:
            link = self.inside if nodes == 1 else self.between
            return link.latency + nbytes / link.bandwidth
        if collective == "all_to_all":
            outside = nbytes * (size - members) / size
            inside = nbytes * (members - 1) / size
            sending = max(outside / self.between.bandwidth, inside / self.inside.bandwidth)
            return self._ring(size - 1, nodes, size) + sending
        moved = nbytes * (size - 1) / size
        if collective == "all_reduce":
            ring = self._ring(2 * (size - 1), nodes, size) + 2 * moved / bandwidth
            return min(ring, self._two_trees(nbytes, nodes, members))
        return self._ring(size - 1, nodes, size) + moved / bandwidth

    def span(self, group: ProcessGroupSpec) -> tuple[int, int]:
        """Return how many nodes a group's ranks are in, and how many of them are in one node.

        Ranks that are not evenly spaced count as one in each node.
        """
        if group.step is None:
            return group.size, 1
        last = group.first + group.step * (group.size - 1)
        nodes = min(last // self.gpus_per_node - group.first // self.gpus_per_node + 1, group.size)
        return nodes, math.ceil(group.size / nodes)

    def bandwidth(self, nodes: int, members: int) -> float:
        """Return the bytes/s of a ring over `nodes` nodes with `members` ranks in each, which share its adapters."""
        if nodes == 1:
            return self.inside.bandwidth
        return min(self.inside.bandwidth, members * self.between.bandwidth)

    def _ring(self, steps: int, nodes: int, size: int) -> float:
        """Return the latency of a ring's steps, with one hop between nodes for each node."""
        if nodes == 1:
            return steps * self.inside.latency
        return steps / size * (nodes * self.between.latency + (size - nodes) * self.inside.latency)

    def _two_trees(self, nbytes: int, nodes: int, members: int) -> float:
        """Return the time of an all-reduce by a double binary tree over nodes, with chains inside a node.

        A node sends the payload twice in all, up and down, but of two nodes once: each is the root of one tree, to
        which it sends nothing up, and a leaf of the other, in which it sends nothing down.
        """
        latency = 2 * (members - 1) * self.inside.latency + 2 * math.ceil(math.log2(nodes)) * self.between.latency
        inside = 2 * nbytes / self.inside.bandwidth
        if nodes == 1:
            return latency + inside
        return latency + max(inside, (1 if nodes == 2 else 2) * nbytes / (members * self.between.bandwidth))


@explaining_arguments
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Efficiency:
    """How fast kernels are in a training step, and the cost of launching them.

    `kernels` are figures of the device's kernels, each measured alone; None stands for the bound: the longer of their
    FLOPs at the device's peak and their bytes at its bandwidth. `matmul`, `attention`, `attention_backward` and
    `bandwidth` (memory-bound kernels) are the fractions of that speed that kernels have in a step. `kernel` is the
    shortest time of a kernel on the device, in seconds. `launch`, `launch_backward` and `launch_collective` are the
    time that the host needs to launch an op in the forward and the backward pass, and a collective; a device whose
    kernels are shorter waits for the host. `step` is the time between steps, such as for the data loader and logging.
    `software` is the name of the shipped entry, "" for others, and `source` says where they are from.
    `float32_matmul` is how float32 products run, as in `mfu`.
    """

    kernels: KernelFigures | None = None
    matmul: float = 1.0
    attention: float = 1.0
    attention_backward: float = 1.0
    bandwidth: float = 1.0
    kernel: float = 0.0
    launch: float = 0.0
    launch_backward: float = 0.0
    launch_collective: float = 0.0
    step: float = 0.0
    software: str = ""
    float32_matmul: str | None = None
    source: str = "peaks of the device, without launch overhead: a bound"

    __repr__ = record_repr

    def __post_init__(self) -> None:
        check_float32_matmul(self.float32_matmul)
        for name in FRACTIONS.values():
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} is a fraction, above 0 and at most 1; got {getattr(self, name)}")
        for name in ("kernel", "launch", "launch_backward", "launch_collective", "step"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a number of at least 0; got {getattr(self, name)}")


# Kind of kernel → its fraction in an Efficiency.
FRACTIONS: Mapping[str, str] = {
    "matmul": "matmul",
    "attention": "attention",
    "attention backward": "attention_backward",
    "memory": "bandwidth",
}
# A bound: no device is faster.
PEAK = Efficiency()


@dataclass(frozen=True, slots=True)
class KernelTimer:
    """Times of kernels on a device with an efficiency, in seconds."""

    device: Device
    efficiency: Efficiency
    _processors: dict[str, Processor] = field(default_factory=dict, init=False, repr=False, compare=False)
    _known: dict[Kernel, float] = field(default_factory=dict, init=False, repr=False, compare=False)

    def seconds(self, kernel: Kernel) -> float:
        """Return the time of a kernel in a step, at least the shortest one's."""
        known = self._known.get(kernel)
        if known is None:
            fraction: float = getattr(self.efficiency, FRACTIONS[kernel.kind])
            known = self._known[kernel] = self.efficiency.kernel + self.alone(kernel) / fraction
        return known

    def bound(self, kernel: Kernel) -> float:
        """Return the longer of a kernel's FLOPs at the device's peak and its bytes at its bandwidth."""
        moving = kernel.nbytes / self._bandwidth()
        if kernel.kind == "memory" or not kernel.macs:
            return moving
        return max(moving, 2 * kernel.macs / self._processor(kernel.dtype).peak)

    def alone(self, kernel: Kernel) -> float:
        """Return the time of a kernel that runs alone, by the figures of the device, without them its bound."""
        if self.efficiency.kernels is None or not (kernel.nbytes or kernel.macs):
            return self.bound(kernel)
        shape = kernel.shape
        _, figures = self.figures_of(kernel)
        if isinstance(shape, Product):
            return max(self.bound(kernel), product_seconds(shape, self._processor(kernel.dtype), figures))
        if isinstance(shape, Attention):
            gpu = self._processor(kernel.dtype)
            if kernel.kind == "attention backward":
                return attention_backward_seconds(shape, gpu, figures)
            return (decode_seconds if shape.is_decoding else attention_seconds)(shape, gpu, figures)
        return max(self.bound(kernel), memory_seconds(kernel.nbytes, self._bandwidth(), figures))

    def figures_of(self, kernel: Kernel) -> tuple[str, Any]:
        """Return the class of a kernel, and the device's figures of it."""
        assert self.efficiency.kernels is not None
        kind, of = kernel.figures_class, self.efficiency.kernels.of
        dtype = short_dtype(kernel.dtype) if kernel.shape else ""
        if kind == "mixture":  # it starts as several kernels do
            return kind, replace(of(kind, dtype), start=of("product", dtype).start)
        return kind, of(kind, dtype)

    def _processor(self, dtype: str) -> Processor:
        known = self._processors.get(dtype)
        if known is None:
            op, short = ("aten::convolution", "fp32") if dtype == CUDNN else ("", short_dtype(dtype))
            peak = self.device.peak(product_dtype(op, short, self.device, self.efficiency.float32_matmul))
            known = self._processors[dtype] = Processor(self.device.multiprocessors or 1, peak, self._bandwidth())
        return known

    def _bandwidth(self) -> float:
        if self.device.bandwidth is None:
            raise ValueError(f"{self.device.name} has no bandwidth, which a time needs: add one in bytes/s")
        return self.device.bandwidth


EFFICIENCIES = paths.SCHEME + "efficiencies.yaml"
NETWORKS = paths.SCHEME + "networks.yaml"
_NUMBERS = tuple(item.name for item in fields(Efficiency) if item.type == "float")


@explaining_arguments
def find_efficiency(
    device: str | Device, *, software: str | None = None, file: str | os.PathLike[str] = EFFICIENCIES
) -> Efficiency:
    """Return the efficiency of a device, by default by the newest software stack in efficiencies.yaml, its first entry.

    `software` is the name of another entry. In a `file` of yours an entry may have the name of a device. Where the
    datasheet does not give the times of kernels, fractions of the device's peaks stand in for them. `source` says which
    were taken. An unknown device or software raises ValueError with the nearest; a mistake in the file raises
    TableError with the file and the line.

    >>> find_efficiency("A100", software="MPT 2023").kernels.devices["product"]
    'A100 SXM 80GB'
    """
    found = load_efficiencies(os.fspath(file))
    if software is not None and software not in found:
        hint = suggest(software, found) or f": {file} has {', '.join(found)}"
        raise ValueError(f"no software {software!r}{hint}")
    if isinstance(device, str) and software is None and device in found and not found[device][1]:
        return found[device][0]
    try:
        device = resolve_device(device)
    except ValueError as error:
        raise ValueError(str(error) if file == EFFICIENCIES else f"{file}: {error}") from None
    name = software or (device.name if device.name in found else next(iter(found)))
    efficiency, is_of_kernels = found[name]
    if not is_of_kernels:
        given = name in (software, device.name)
        return efficiency if given else replace(efficiency, source=f"{name}: {efficiency.source}")
    kernels = find_figures(device)
    if kernels is None:
        peaks, _ = load_efficiencies()["fractions of peaks"]
        return replace(peaks, source=f"not measured for {device.name}: {peaks.source}")
    source = f"{name}: {efficiency.source}; kernels: {kernels.source}"
    return replace(efficiency, kernels=kernels, software=name * (file == EFFICIENCIES), source=source)


@explaining_arguments
def find_network(name: str, *, file: str | os.PathLike[str] = NETWORKS) -> Network:
    """Return the network of a name; an unknown one raises ValueError with the nearest, or all.

    >>> find_network("HGX H100 3200G").gpus_per_node
    8
    """
    networks = load_networks(os.fspath(file))
    if name not in networks:
        hint = suggest(name, networks) or f": the networks are {', '.join(networks)}"
        raise ValueError(f"no network {name!r}{hint}")
    return networks[name]


@lru_cache(maxsize=8)
def load_efficiencies(file: str = EFFICIENCIES) -> Mapping[str, tuple[Efficiency, bool]]:
    """Return name → efficiency, and whether its fractions are relative to the speed of measured kernels."""
    return read_entries(file, "efficiencies", _read_efficiency)


@lru_cache(maxsize=8)
def load_networks(file: str = NETWORKS) -> Mapping[str, Network]:
    return read_entries(file, "networks", _read_network)


def _read_efficiency(node: Node, name: str) -> tuple[Efficiency, bool]:
    found = node.fields(f"the efficiency of {name}", (*_NUMBERS, "of", "source"), ("source",))
    numbers: dict[str, Any] = {key: found[key].number(f"{key} of {name}") for key in _NUMBERS if key in found}
    of = found["of"].text(f"of of {name}") if "of" in found else "peaks"
    if of not in ("peaks", "kernels"):
        raise found["of"].error(f"of of {name} must be peaks or kernels; got {truncate(of)!r}")
    source = found["source"].text(f"source of {name}")
    return node.make(lambda: Efficiency(source=source, **numbers), name), of == "kernels"


def _read_network(node: Node, name: str) -> Network:
    keys = ("gpus_per_node", "inside", "between", "source")
    found = node.fields(f"the network {name}", (*keys, "gpus"), keys)
    gpus = found["gpus"].items(f"gpus of {name}", "[B100, B200]") if "gpus" in found else ()
    return Network(
        name=name,
        gpus_per_node=_integer(found["gpus_per_node"], f"gpus_per_node of {name}"),
        inside=_read_inside(found["inside"], f"inside of {name}"),
        between=_read_link(found["between"], f"between of {name}"),
        source=found["source"].text(f"source of {name}"),
        gpus=tuple(item.text(f"a GPU of {name}") for item in gpus),
    )


def _read_inside(node: Node, what: str) -> Link | NodeLink:
    """Return a link inside a node: its speed in collectives, or its nominal speed with figures of its collectives."""
    if "collectives" not in node.fields(what):
        return _read_link(node, what)
    keys = ("bandwidth", "adds", "collectives")
    found = node.fields(what, (*keys, "links"), keys)
    adds, name = (found[key].text(f"{key}, {what}") for key in keys[1:])
    if adds not in ("true", "false"):
        raise found["adds"].error(f"adds, {what}, is {truncate(adds)!r}: write true or false")
    measured = {gpu: item for gpu, item in load_figures().items() if "collective" in item.by_class}
    if name not in measured:
        hint = suggest(name, measured) or f": measured were {', '.join(measured)}"
        raise found["collectives"].error(f"collectives of {truncate(name)!r} are not known{hint}")
    links = _integer(found["links"], f"links, {what}") if "links" in found else 1
    fabric = Fabric(found["bandwidth"].number(f"bandwidth, {what}"), adds == "true", links)
    return NodeLink(fabric, measured[name].of("collective", ""))


def _read_link(node: Node, what: str) -> Link:
    keys = ("bandwidth", "latency")
    found = node.fields(what, keys, keys)
    bandwidth, latency = (found[key].number(f"{key}, {what}") for key in keys)
    return node.make(lambda: Link(bandwidth, latency))


def _integer(node: Node, what: str) -> int:
    number = node.number(what)
    if not number.is_integer() or number < 1:
        raise node.error(f"{what} is {number:g}: write an integer of at least 1")
    return int(number)


def assume_network(device: Device) -> Network | None:
    """Return the network of a device's systems, which says in `source` that it is assumed; None for other devices.

    >>> from fvflops import find_device
    >>> network = assume_network(find_device("H100"))
    >>> network.name, network.source.partition(":")[0], assume_network(find_device("TPU v4"))
    ('HGX H100 3200G', 'assumed for H100 SXM, since none is given', None)
    """
    network = next((network for network in load_networks().values() if device.name in network.gpus), None)
    if network is None:
        return None
    return replace(network, source=f"assumed for {device.name}, since none is given: {network.source}")


class Timing(NamedTuple):
    """How a step is timed: the arguments of `estimate_step`, resolved."""

    device: Device
    network: Network | None
    efficiency: Efficiency
    fused: Collection[str] = ()
    host_waits: bool = False
    bucket_cap_mb: float | None = None

    def timer(self, efficiency: Efficiency | None = None) -> KernelTimer:
        """Return the times of kernels on the device, with its efficiency or another one."""
        chosen = replace(efficiency or self.efficiency, float32_matmul=self.efficiency.float32_matmul)
        return KernelTimer(self.device, chosen)


def resolve_timing(
    device: str | Device, network: str | Network | None, efficiency: Efficiency | None, ranks: int, **options: Any
) -> Timing:
    """Return the timing on the device, the network of some ranks and the efficiency, each found by name or assumed."""
    device = resolve_device(device)
    network = find_network(network) if isinstance(network, str) else network
    if network is None and ranks > 1:
        network = assume_network(device)
    return Timing(device, network, find_efficiency(device) if efficiency is None else efficiency, **options)
