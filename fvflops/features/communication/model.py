"""Communication of one rank, by collective, group, module and phase."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from fvflops.reports.display import Displayed
from fvflops.text import record_repr, short_repr
from fvflops.trace.module_tree import innermost, modules_above
from fvflops.trace.process_group import ProcessGroupSpec
from fvflops.units import format_bytes, format_quantity

Key = TypeVar("Key")


class Volume(NamedTuple):
    """Calls, their payload in bytes, and the bytes on the wire.

    `wire` is what one rank sends, and receives, with ring algorithms; None if the group's size is unknown.
    """

    calls: int = 0
    payload: int = 0
    wire: int | None = 0

    def plus(self, other: Volume) -> Volume:
        """Return the sum of two volumes; None stays None.

        >>> Volume(1, 8, 4).plus(Volume(2, 8, None))
        Volume(calls=3, payload=16, wire=None)
        """
        wire = None if self.wire is None or other.wire is None else self.wire + other.wire
        return Volume(self.calls + other.calls, self.payload + other.payload, wire)


class Transfer(NamedTuple):
    """All calls of one collective with one size of payload, in one scope and phase.

    `collective` is "all_reduce", "all_gather" and so on, `op` the op that ran; `dtype` is that of the payload, "" for a
    barrier.
    """

    collective: str
    op: str
    group: ProcessGroupSpec | None
    dtype: str
    scope: tuple[str, ...]
    phase: str
    volume: Volume

    def __repr__(self) -> str:
        return record_repr(self)


class CollectiveKey(NamedTuple):
    """What a report's row sums up: a collective on groups of one mesh axis (or name) and size, with one dtype."""

    collective: str
    axis: str
    size: int | None
    dtype: str


@dataclass(frozen=True, slots=True, repr=False)
class Communication(Displayed):
    """The transfers of one rank, and their sums; `unsupported` maps each unsupported communication op to its calls.

    >>> op, group = "c10d::allreduce_", ProcessGroupSpec("0", 2)
    >>> transfer = Transfer("all_reduce", op, group, "float32", ("", "fc"), "backward", Volume(1, 8, 8))
    >>> Communication((transfer, transfer)).by_collective_and_group()
    {CollectiveKey(collective='all_reduce', axis='0', size=2, dtype='float32'): Volume(calls=2, payload=16, wire=16)}
    """

    _report = "fvflops.features.communication.report:communication_report"

    transfers: tuple[Transfer, ...]
    unsupported: Mapping[str, int] = field(default_factory=Counter)

    def __repr__(self) -> str:
        total = self.total()
        wire = "" if total.wire is None else f"{format_bytes(total.wire)} on the wire"
        return short_repr(
            self, "", format_quantity(total.calls, "call"), f"payload {format_bytes(total.payload)}", wire
        )

    def total(self) -> Volume:
        """Return the sum over all transfers."""
        return _sum(transfer.volume for transfer in self.transfers)

    def by_collective_and_group(self) -> dict[CollectiveKey, Volume]:
        """Return (collective, axis, size of the group, dtype) → volume."""
        return self._by(lambda transfer: [_key_of(transfer)])

    def by_collective(self) -> dict[str, Volume]:
        """Return collective → volume."""
        return self._by(lambda transfer: [transfer.collective])

    def by_axis(self) -> dict[str, Volume]:
        """Return mesh axis, or name of a process group that is not a mesh axis → volume."""
        return self._by(lambda transfer: [_key_of(transfer).axis])

    def by_phase(self) -> dict[str, Volume]:
        """Return phase → volume."""
        return self._by(lambda transfer: [transfer.phase])

    def by_module(self) -> dict[str, Volume]:
        """Return module name → volume, submodules included."""
        return self._by(lambda transfer: _with_parents(transfer.scope))

    def _by(self, keys_of: Callable[[Transfer], Iterable[Key]]) -> dict[Key, Volume]:
        sums: dict[Key, Volume] = {}
        for transfer in self.transfers:
            for key in keys_of(transfer):
                sums[key] = sums.get(key, Volume()).plus(transfer.volume)
        return sums


def _sum(volumes: Iterable[Volume]) -> Volume:
    total = Volume()
    for volume in volumes:
        total = total.plus(volume)
    return total


def _key_of(transfer: Transfer) -> CollectiveKey:
    group = transfer.group
    if group is None:
        return CollectiveKey(transfer.collective, "", None, transfer.dtype)
    return CollectiveKey(transfer.collective, group.axis or group.name, group.size, transfer.dtype)


def _with_parents(scope: tuple[str, ...]) -> list[str]:
    owner = innermost(scope)
    return [*modules_above(owner), owner]
