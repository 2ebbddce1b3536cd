"""How long collectives take on a network of nodes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fvflops.text import record_repr
from fvflops.trace.process_group import ProcessGroupSpec


@dataclass(frozen=True, slots=True)
class Link:
    """One GPU's link in one direction: bytes/s that a collective reaches, and seconds for each step of it."""

    bandwidth: float
    latency: float

    def __post_init__(self) -> None:
        if not 0 < self.bandwidth < math.inf or not 0 <= self.latency < math.inf:
            raise ValueError(f"a link needs a bandwidth above 0 and a latency of at least 0; got {self}")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Network:
    """Nodes of `gpus_per_node` GPUs, linked by `inside` within a node and by `between` among nodes.

    `between` is the share of one GPU: the bandwidth of all of a node's adapters divided by its GPUs. A group with few
    ranks in a node has only their shares, since the ranks of other groups use the rest at the same time.
    """

    name: str
    gpus_per_node: int
    inside: Link
    between: Link
    source: str = ""

    def __repr__(self) -> str:
        return record_repr(self)

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
        bandwidth = self.bandwidth(nodes, members)
        if collective in ("send", "receive"):
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
        nodes = last // self.gpus_per_node - group.first // self.gpus_per_node + 1
        nodes = min(nodes, group.size)
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
