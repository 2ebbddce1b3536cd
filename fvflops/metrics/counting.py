"""The counting: each distinct signature is priced once, and multiplied by how often it ran."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from fvflops.trace import (
    Counts,
    Entry,
    ModuleInfo,
    Region,
    RegionSignature,
    Signature,
    Status,
    StopsAt,
    Trace,
    Value,
    tensors_in,
)


@dataclass(frozen=True, slots=True)
class Amount:
    """What one call comes to under one label, in the metric's unit; `macs` and `flops` are a flop count's parts."""

    label: str
    status: Status
    value: int = 0
    macs: int = 0
    flops: int = 0


class Pricer(Protocol):
    """Whatever can say what a call comes to: a table, or a table with handles before it."""

    @property
    def stops_at(self) -> StopsAt:
        """The composite ops that it has something to say about."""

    def price_op(self, signature: Signature) -> tuple[Amount, ...]:
        """Return what one call of an op comes to; an op of several labels gives several amounts."""

    def price_region(
        self, region: Region, module: ModuleInfo | None, signature: RegionSignature
    ) -> tuple[Amount, ...] | None:
        """Return what one call of a region comes to, all that ran in it included; None: look inside."""


def count(trace: Trace, pricer: Pricer, metric: str) -> Counts:
    """Return the counts of one metric over a trace.

    A region that the pricer prices covers all that ran inside it; the outermost such region wins.
    """
    covering = _priced_regions(trace, pricer)
    covered = [any(region in covering for region in stack) for stack in trace.stacks]
    entries: list[Entry] = []
    amounts_of: dict[int, tuple[Amount, ...]] = {}
    for (index, stack, phase), calls in trace.calls.items():
        if covered[stack]:
            continue
        signature = trace.signatures[index]
        if index not in amounts_of:
            amounts_of[index] = pricer.price_op(signature)
        entries.extend(
            _entries(amounts_of[index], trace.scope_of(stack), phase, signature.packet, calls, signature.outputs)
        )
    for (index, stack, phase), calls in trace.region_calls.items():
        region_signature = trace.region_signatures[index]
        if covered[stack] or region_signature.region not in covering:
            continue
        region = trace.regions[region_signature.region]
        scope = trace.scope_of(stack) + ((region.name,) if region.kind == "module" else ())
        amounts = pricer.price_region(region, _module_of(trace, region), region_signature)
        name = f"prim::PythonOp.{region.name}" if region.kind == "function" else _module_class(trace, region)
        entries.extend(_entries(amounts or (), scope, phase, name, calls, region_signature.outputs))
    return Counts(metric, trace.modules, tuple(entries))


def _priced_regions(trace: Trace, pricer: Pricer) -> set[int]:
    return {
        signature.region
        for signature in trace.region_signatures
        if pricer.price_region(
            trace.regions[signature.region], _module_of(trace, trace.regions[signature.region]), signature
        )
        is not None
    }


def _module_of(trace: Trace, region: Region) -> ModuleInfo | None:
    return trace.modules.places[region.name] if region.kind == "module" else None


def _module_class(trace: Trace, region: Region) -> str:
    place = trace.modules.places[region.name]
    return place.classes[0] if place.classes else place.class_name


def _entries(
    amounts: Iterable[Amount],
    scope: tuple[str, ...],
    phase: str,
    op: str,
    calls: int,
    outputs: tuple[Value, ...],
) -> Iterable[Entry]:
    elements = sum(spec.numel for spec in tensors_in(outputs))
    for position, amount in enumerate(amounts):
        first = position == 0
        yield Entry(
            scope=scope,
            phase=phase,
            op=op,
            label=amount.label,
            status=amount.status,
            calls=calls if first else 0,
            value=amount.value * calls,
            macs=amount.macs * calls,
            flops=amount.flops * calls,
            elements=elements * calls if first else 0,
        )
