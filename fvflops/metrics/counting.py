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
    region_amounts = [_price_region(trace, pricer, signature) for signature in trace.region_signatures]
    covering = {
        signature.region
        for signature, amounts in zip(trace.region_signatures, region_amounts, strict=True)
        if amounts is not None
    }
    covered = [any(region in covering for region in stack) for stack in trace.stacks]
    entries: list[Entry] = []
    amounts_of: dict[int, tuple[Amount, ...]] = {}
    for (index, stack, phase), calls in trace.calls.items():
        if covered[stack]:
            continue
        op = trace.signatures[index]
        if index not in amounts_of:
            amounts_of[index] = pricer.price_op(op)
        entries.extend(_entries(amounts_of[index], trace.scope_of(stack), phase, op.packet, calls, op.outputs))
    for (index, stack, phase), calls in trace.region_calls.items():
        signature = trace.region_signatures[index]
        amounts = region_amounts[index]
        if covered[stack] or amounts is None:
            continue
        region = trace.regions[signature.region]
        scope = trace.scope_of(stack) + ((region.name,) if region.kind == "module" else ())
        entries.extend(_entries(amounts, scope, phase, _region_op(trace, region), calls, signature.outputs))
    return Counts(metric, trace.modules, tuple(entries))


def _price_region(trace: Trace, pricer: Pricer, signature: RegionSignature) -> tuple[Amount, ...] | None:
    region = trace.regions[signature.region]
    module = trace.modules.places[region.name] if region.kind == "module" else None
    return pricer.price_region(region, module, signature)


def _region_op(trace: Trace, region: Region) -> str:
    """Return the name under which a region stands in the ledger: its function's key, or its module's class."""
    if region.kind == "function":
        return f"prim::PythonOp.{region.name}"
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
