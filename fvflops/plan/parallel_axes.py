"""The axes of a mesh of ranks, and how the ranks along each differ."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple


class Axis(NamedTuple):
    """A kind of parallelism; ranks along it have their own `samples`, or their own `tokens`, or the same as the others.

    Ranks with their own tokens average their gradients. Axes that regroup the ranks of the others (`regroups`) add
    none. `options` of the command line have no effect without the axis.
    """

    title: str
    samples: bool = False
    tokens: bool = False
    regroups: bool = False
    options: tuple[str, ...] = ()


AXES: Mapping[str, Axis] = {
    "pp": Axis("pipeline parallel", options=("schedule", "stages_per_rank", "stage_layers")),
    # With fsdp, hybrid sharding.
    "dp": Axis("DDP", samples=True, tokens=True),
    "fsdp": Axis("FSDP", samples=True, tokens=True, options=("reshard_after_forward", "reduce_each_microbatch")),
    "cp": Axis("context parallel", tokens=True),
    "tp": Axis("tensor parallel", options=("shard", "sequence_parallel")),
    "ep": Axis("expert parallel", regroups=True),
    "etp": Axis("tensor parallel experts", regroups=True),
}


def dense_axes(mesh: Mapping[str, int]) -> dict[str, int]:
    """Return the axes that multiply to the number of ranks, without the experts' axes.

    >>> dense_axes({"fsdp": 8, "tp": 2, "ep": 4})
    {'fsdp': 8, 'tp': 2}
    """
    return {axis: size for axis, size in mesh.items() if axis not in AXES or not AXES[axis].regroups}


def count_ranks(mesh: Mapping[str, int]) -> int:
    return math.prod(dense_axes(mesh).values())


def count_shares(mesh: Mapping[str, int], of: str) -> int:
    """Return the number of ranks whose `samples` or `tokens` differ.

    >>> mesh = {"dp": 4, "cp": 2, "tp": 8}
    >>> count_shares(mesh, "samples"), count_shares(mesh, "tokens")
    (4, 8)
    """
    return math.prod(size for axis, size in mesh.items() if axis in AXES and getattr(AXES[axis], of))
