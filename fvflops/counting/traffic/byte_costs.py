"""Cost model in bytes: by signatures, and by what a trace's events tell of the storages of each call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from fvflops.counting.count import RegionCost
from fvflops.counting.traffic.traffic import StorageInfo, Traffic, op_traffic
from fvflops.formulas import OpCost
from fvflops.formulas.rows import default_label
from fvflops.trace import Event, ModuleInfo, Region, RegionSignature, Signature, Status, StopsAt, Trace, tensors_in

PARTS = ("moved", "read", "written")
_NO_STOPS = StopsAt()


class TrafficCostModel:
    """Prices calls in bytes; `part` is "moved" (read and written), "read" or "written". Regions are looked into.

    `sights` says what is known of the storages of a signature's calls, by the identity of the signature. Composite ops
    in `stops_at` are to be recorded whole, as one kernel; any other trace can be counted too.
    """

    def __init__(
        self,
        part: str = "moved",
        sights: Mapping[int, tuple[Signature, StorageInfo]] | None = None,
        *,
        stops_at: StopsAt = _NO_STOPS,
    ) -> None:
        if part not in PARTS:
            raise ValueError(f"bytes are {', '.join(PARTS)}, not {part!r}")
        self._part = part
        self._sights = sights or {}
        self._stops_at = stops_at

    @property
    def stops_at(self) -> StopsAt:
        """The composite ops that are taken for one kernel."""
        return self._stops_at

    @property
    def counts_modules(self) -> bool:
        """False: a module is looked into."""
        return False

    def op_traffic(self, signature: Signature) -> Traffic | None:
        """Return what one call reads and writes, None where that is not known."""
        return op_traffic(signature, self._sights.get(id(signature), (signature, StorageInfo()))[1])

    def op_cost(self, signature: Signature) -> tuple[OpCost, ...]:
        """Return the bytes of one call: FREE where nothing moves, UNKNOWN where that is not known."""
        traffic = self.op_traffic(signature)
        label = default_label(signature.op)
        if traffic is None:
            return (OpCost(label, Status.UNKNOWN),)
        read, written = traffic
        value = {"moved": read + written, "read": read, "written": written}[self._part]
        return (OpCost(label, Status.COUNTED if read + written else Status.FREE, value),)

    def region_cost(self, region: Region, module: ModuleInfo | None, signature: RegionSignature) -> RegionCost | None:
        """Return None: look inside."""
        return None


def split_by_aliasing(
    trace: Trace, part: str = "moved", *, keep_events: bool = False
) -> tuple[Trace, TrafficCostModel]:
    """Return a trace that tells calls apart by what their storages say of them, and the cost model that knows it.

    Calls of one signature may differ in it: one `reshape` is a view, the next a copy. They get a signature each. The
    trace is aggregated unless `keep_events`. A trace without events is returned as it is.
    """
    if trace.events is None:
        return trace, TrafficCostModel(part)
    sizes = [storage.nbytes for storage in trace.storages]
    shapes: dict[int, int | None] = {}
    numbers: dict[tuple[int, StorageInfo], int] = {}
    signatures: list[Signature] = []
    sights: dict[int, tuple[Signature, StorageInfo]] = {}
    calls: Counter[tuple[int, int, str]] = Counter()
    first: set[int] = set()
    events: list[Event] = []
    for event in trace.events:
        if event.kind != "op":
            if keep_events:
                events.append(event)
            continue
        item = event.item
        if item not in shapes:
            shapes[item] = _bytes_by_shape(trace.signatures[item])
        sight = _storage_infos(event.reads, event.writes, sizes, shapes[item])
        number = numbers.get((item, sight))
        if number is None:
            number = numbers[item, sight] = len(signatures)
            signature = trace.signatures[item]
            signature = replace(signature) if item in first else signature  # the sights are kept by identity
            first.add(item)
            signatures.append(signature)
            sights[id(signature)] = signature, sight
        calls[number, event.stack, event.phase] += 1
        if keep_events:
            events.append(event._replace(item=number))
    base = replace(trace, events=tuple(events)) if keep_events else trace.aggregate()
    sorted_trace = replace(base, signatures=tuple(signatures), calls=dict(calls))
    return sorted_trace, TrafficCostModel(part, sights)


def _storage_infos(
    reads: Iterable[int], writes: tuple[int, ...], sizes: list[int], by_shape: int | None
) -> StorageInfo:
    if by_shape is None:
        return StorageInfo()
    storages = [sizes[index] for index in reads]
    held = sum(storages)
    # A storage that was empty when it was first seen has grown since.
    bounds = bool(storages) and all(storages) and held < by_shape
    return StorageInfo(not set(writes).issubset(reads) if writes else None, held if bounds else None)


def _bytes_by_shape(signature: Signature) -> int | None:
    """Return the bytes of all that goes in, None where it is not all in storages that a trace knows."""
    specs = list(tensors_in(signature.inputs))
    if any(spec.layout != "strided" for spec in specs):
        return None
    try:
        return sum(spec.nbytes for spec in specs)
    except KeyError:
        return None
