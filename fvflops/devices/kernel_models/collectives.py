"""Time of a collective of the GPUs of one node: NCCL's protocols, and engines' own all-reduces."""

from __future__ import annotations

from dataclasses import dataclass
from math import log2
from typing import NamedTuple

from fvflops.text import record_repr

# Bytes of a payload that NCCL's protocol LL moves in the time in which LL128 moves one: 4 of 8 for 120 of 128.
_LL = 8 / 15
# Fraction of the speed with fences that GPUs reach whose switch adds; H100 and B200 have the same.
_SWITCHED = 0.75


class Collective(NamedTuple):
    """A collective of `ranks` GPUs with a payload of `nbytes`, as nccl-tests define it: the largest buffer of a GPU.

    `kind` is all_to_all or one of a ring: all_reduce, all_gather, reduce_scatter, and others of one pass.
    `floats` says whether the dtype is one that a switch can add.
    """

    kind: str
    ranks: int
    nbytes: float
    floats: bool = True


class Fabric(NamedTuple):
    """The links inside a node: bytes/s of a GPU's in one direction, and whether their switch can add (NVLink SHARP).

    Without a switch a GPU has `links`, one to each of as many others, which share the bandwidth.
    """

    bandwidth: float
    adds: bool = False
    links: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveFigures:
    """Parameters of a collective's time besides the bandwidth of a GPU's link; times are in seconds.

    `start` is the time until all GPUs have launched it, `step` the time of one step. NCCL's protocols reach a
    fraction of the link's bandwidth each: `flagged` with flags between the data (LL128), and, after `fence` more
    seconds, `fenced` with memory fences (Simple).
    `local` is the part of a step that copying a GPU's own share takes, `scattered` the factor of the bandwidth where
    each GPU sends to each. `sharing` is the exponent of the ranks by which a link gets slower: 0 with a switch for all,
    above 0 where links of PCIe have a root in common. One group communicates, as measured: other groups of the
    node that communicate at the same time slow it further, which is not included.
    """

    start: float
    step: float
    flagged: float
    fence: float
    fenced: float
    local: float
    scattered: float
    sharing: float


def collective_seconds(collective: Collective, fabric: Fabric, figures: CollectiveFigures) -> float:
    """Return the seconds of a collective of NCCL by its fastest protocol.

    An all-to-all sends to all others at once, with LL instead of LL128. A switch that adds gets the payload of each GPU
    once, and sends each the sums, of which each GPU has one share more to pass on.

    >>> hopper = CollectiveFigures(
    ...     start=4.5e-6, step=0.85e-6, flagged=0.5, fence=20e-6, fenced=0.8, local=0.4, scattered=1, sharing=0
    ... )
    >>> ranks = [Collective("all_reduce", 8, size) for size in (1e3, 1e6, 1e9)]
    >>> [round(collective_seconds(each, Fabric(450e9, adds=True), hopper) * 1e6, 1) for each in ranks]
    [16.4, 24.4, 4203.1]
    """
    kind, ranks, nbytes, floats = collective
    if ranks < 2:
        return 0.0
    steps = float((2 if kind == "all_reduce" else 1) * (ranks - 1))  # passes of a ring over the payload
    speed = _speed(fabric, ranks, figures.sharing)
    moving = nbytes * (steps + figures.local) / ranks / speed
    flagged = figures.flagged
    if kind == "all_to_all":
        steps = log2(ranks)
        moving /= figures.scattered
        flagged *= _LL
    best = moving / flagged
    if kind == "all_reduce" and fabric.adds and floats:
        moving = min(moving, nbytes * (1 + 1 / ranks) / speed / _SWITCHED)
    return figures.start + steps * figures.step + min(best, figures.fence + moving / figures.fenced)


@dataclass(frozen=True, slots=True, repr=False)
class NodeLink:
    """A GPU's link inside a node whose collectives were measured."""

    fabric: Fabric
    figures: CollectiveFigures

    __repr__ = record_repr

    @property
    def bandwidth(self) -> float:
        """The bytes/s that a ring of two GPUs reaches in one direction."""
        return self.ring(2)[0]

    @property
    def latency(self) -> float:
        """The seconds of one step of a ring."""
        return self.figures.step

    def ring(self, ranks: int) -> tuple[float, float]:
        """Return the bytes/s of a ring's link among a number of GPUs of the node, and the seconds of its steps."""
        return _speed(self.fabric, ranks, self.figures.sharing) * self.figures.fenced, self.figures.step

    def seconds(self, kind: str, ranks: int, nbytes: float) -> float:
        """Return the seconds of a collective of NCCL of GPUs of the node."""
        return collective_seconds(Collective(kind, ranks, nbytes), self.fabric, self.figures)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerFigures:
    """Parameters of an engine's own all-reduce, whose GPUs read each other's buffers; times are in seconds.

    `start` is the shortest time, `barrier` the time of one more wait for all GPUs, `peers` the fraction of the link's
    bandwidth.
    """

    start: float
    barrier: float
    peers: float


def peer_seconds(collective: Collective, fabric: Fabric, figures: PeerFigures) -> float:
    """Return the seconds of an engine's all-reduce: each GPU reads all, or its share and then the others' sums.

    Engines have it for small payloads, such as up to 8 MiB, where a switch links the GPUs, and call NCCL for others.
    """
    ranks, nbytes = collective.ranks, collective.nbytes
    if ranks < 2:
        return 0.0
    reading = nbytes * (ranks - 1) / (_speed(fabric, ranks, 0.0) * figures.peers)
    return figures.start + min(reading, 2 * reading / ranks + figures.barrier)


def _speed(fabric: Fabric, ranks: int, sharing: float) -> float:
    """Return the bytes/s of a GPU's link when `ranks` GPUs use theirs."""
    used = min(max(2, ranks) - 1, fabric.links) / fabric.links
    return fabric.bandwidth * used * float((2 / max(2, ranks)) ** sharing)
