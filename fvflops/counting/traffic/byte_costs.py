"""Cost model of memory traffic, from signatures and from the storages in a trace's events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from fvflops.counting.count_trace import CostModel, SignatureCache
from fvflops.counting.traffic.traffic import StorageInfo, Traffic, op_traffic
from fvflops.formulas import OpCost
from fvflops.formulas.rows import default_label
from fvflops.trace import Event, Signature, Status, StopsAt, Trace, tensors_in

PARTS = ("moved", "read", "written")
_NO_STOPS = StopsAt()
# Whether the results are in new storages, None if unknown → StorageInfo.
_STORAGE_INFOS = {moved: StorageInfo(moved) for moved in (None, False, True)}


@dataclass(slots=True)
class _KnownTraffic:
    """Bytes of a signature's inputs by shape, None where unknown, and the traffic of its calls by their storages."""

    by_shape: int | None
    traffic: dict[StorageInfo, Traffic | None] = field(default_factory=dict)


_KNOWN: SignatureCache[_KnownTraffic] = SignatureCache()


class TrafficCostModel(CostModel):
    """Bytes of calls; `part` is "moved" (read and written), "read" or "written". Regions are counted by their ops.

    `storage_infos` maps the id of a signature to the signature and the StorageInfo of its calls. Composite ops in
    `stops_at` count as one kernel where the trace has not decomposed them.
    """

    def __init__(
        self,
        part: str = "moved",
        storage_infos: Mapping[int, tuple[Signature, StorageInfo]] | None = None,
        *,
        stops_at: StopsAt = _NO_STOPS,
    ) -> None:
        if part not in PARTS:
            raise ValueError(f"part must be one of {', '.join(PARTS)}; got {part!r}")
        self._part = part
        self._storage_infos_by_id = storage_infos or {}
        self.stops_at = stops_at

    def op_traffic(self, signature: Signature) -> Traffic | None:
        """Return the traffic of one call, None where unknown."""
        info = self._storage_infos_by_id.get(id(signature), (signature, StorageInfo()))[1]
        traffic = _known_traffic(signature).traffic
        if info not in traffic:
            traffic[info] = op_traffic(signature, info)
        return traffic[info]

    def op_cost(self, signature: Signature) -> tuple[OpCost, ...]:
        """Return the bytes of one call, ZERO_FLOP where nothing moves, UNSUPPORTED where they cannot be determined."""
        traffic = self.op_traffic(signature)
        label = default_label(signature.op)
        if traffic is None:
            return (OpCost(label, Status.UNSUPPORTED),)
        read, written = traffic
        value = {"moved": read + written, "read": read, "written": written}[self._part]
        return (OpCost(label, Status.COUNTED if read + written else Status.ZERO_FLOP, value),)


def split_by_aliasing(
    trace: Trace, part: str = "moved", *, keep_events: bool = False
) -> tuple[Trace, TrafficCostModel]:
    """Return a trace with separate signatures for calls that differ in aliasing, and the cost model for it.

    Calls of one signature may differ: one `reshape` is a view, the next a copy. The trace is aggregated unless
    `keep_events`. A trace without events is returned unchanged.
    """
    if trace.events is None:
        return trace, TrafficCostModel(part)
    sizes = [storage.nbytes for storage in trace.storages]
    by_shape = [_known_traffic(signature).by_shape for signature in trace.signatures]
    numbers: dict[tuple[int, StorageInfo], int] = {}
    signatures: list[Signature] = []
    storage_infos: dict[int, tuple[Signature, StorageInfo]] = {}
    calls: Counter[tuple[int, int, str]] = Counter()
    seen: set[int] = set()
    events: list[Event] = []
    for event in trace.events:
        if event.kind != "op":
            if keep_events:
                events.append(event)
            continue
        item = event.item
        storage_info = _make_storage_info(event.reads, event.writes, sizes, by_shape[item])
        number = numbers.get((item, storage_info))
        if number is None:
            number = numbers[item, storage_info] = len(signatures)
            signature = trace.signatures[item]
            signature = replace(signature) if item in seen else signature  # `storage_infos` is keyed by id
            seen.add(item)
            signatures.append(signature)
            storage_infos[id(signature)] = signature, storage_info
        calls[number, event.stack, event.phase] += 1
        if keep_events:
            events.append(event._replace(item=number))
    base = replace(trace, events=tuple(events)) if keep_events else trace.aggregate()
    split_trace = replace(base, signatures=tuple(signatures), calls=dict(calls))
    return split_trace, TrafficCostModel(part, storage_infos)


def _make_storage_info(
    reads: tuple[int, ...], writes: tuple[int, ...], sizes: list[int], by_shape: int | None
) -> StorageInfo:
    if by_shape is None:
        return _STORAGE_INFOS[None]
    storage_bytes = 0
    for index in reads:
        size = sizes[index]
        if not size:  # it was recorded as empty, and has been resized since
            storage_bytes = by_shape
            break
        storage_bytes += size
    moved = any(index not in reads for index in writes) if writes else None
    is_smaller = bool(reads) and storage_bytes < by_shape
    return StorageInfo(moved, storage_bytes) if is_smaller else _STORAGE_INFOS[moved]


def _known_traffic(signature: Signature) -> _KnownTraffic:
    known = _KNOWN.get(signature)
    if known is None:
        specs, by_shape = list(tensors_in(signature.inputs)), None
        if all(spec.layout == "strided" for spec in specs):  # others have no storage in the trace
            with suppress(KeyError):  # a dtype of unknown size
                by_shape = sum(spec.nbytes for spec in specs)
        known = _KNOWN.put(signature, _KnownTraffic(by_shape))
    return known
