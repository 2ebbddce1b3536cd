"""The counting: each distinct signature is priced once, and multiplied by how often it ran."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from fvflops.trace import (
    Counts,
    Entry,
    ModuleInfo,
    Region,
    RegionSignature,
    Signature,
    Status,
    StopsAt,
    TensorSpec,
    Trace,
    Value,
    tensors_in,
)


class Amount(NamedTuple):
    """What one call comes to under one label, in the metric's unit; `macs` and `flops` are a flop count's parts."""

    label: str
    status: Status
    value: int = 0
    macs: int = 0
    flops: int = 0


class RegionAmounts(NamedTuple):
    """What one call of a region comes to; `covers` says that what ran inside it is not counted beside it."""

    amounts: tuple[Amount, ...]
    covers: bool = True


class Pricer(Protocol):
    """Whatever can say what a call comes to: a table, or a table with handles before it."""

    @property
    def stops_at(self) -> StopsAt:
        """The composite ops that it has something to say about."""

    @property
    def prices_modules(self) -> bool:
        """Whether it has something to say about any module."""

    def price_op(self, signature: Signature) -> tuple[Amount, ...]:
        """Return what one call of an op comes to; an op of several labels gives several amounts."""

    def price_region(
        self, region: Region, module: ModuleInfo | None, signature: RegionSignature
    ) -> RegionAmounts | None:
        """Return what one call of a region comes to, or None where nothing is said of it: look inside."""


def count(trace: Trace, pricer: Pricer, metric: str) -> Counts:
    """Return the counts of one metric over a trace.

    A region that the pricer prices covers all that ran inside it, unless it says otherwise; the outermost such region
    wins.
    """
    priced = {
        index: amounts
        for index, signature in enumerate(trace.region_signatures if _looks_at_regions(trace, pricer) else ())
        if (amounts := _price_region(trace, pricer, signature)) is not None
    }
    covering = {trace.region_signatures[index].region for index, amounts in priced.items() if amounts.covers}
    covered = {
        index for index, stack in enumerate(trace.stacks) if covering and any(region in covering for region in stack)
    }
    scopes = trace.scopes()
    prices: dict[int, tuple[tuple[Amount, ...], str, int]] = {}
    entries: list[Entry] = []
    for (index, stack, phase), calls in trace.calls.items():
        if stack in covered:
            continue
        price = prices.get(index)
        if price is None:
            op = trace.signatures[index]
            price = prices[index] = pricer.price_op(op), op.packet, _elements(op.outputs)
        _add(entries, price, scopes[stack], phase, calls)
    for (index, stack, phase), calls in trace.region_calls.items():
        if index not in priced or stack in covered:
            continue
        signature = trace.region_signatures[index]
        region = trace.regions[signature.region]
        scope = scopes[stack] + ((region.name,) if region.kind == "module" else ())
        price = priced[index].amounts, _region_op(trace, region), _elements(signature.outputs)
        _add(entries, price, scope, phase, calls)
    return Counts(metric, trace.modules, tuple(entries))


def _looks_at_regions(trace: Trace, pricer: Pricer) -> bool:
    return pricer.prices_modules or any(region.kind == "function" for region in trace.regions)


def _price_region(trace: Trace, pricer: Pricer, signature: RegionSignature) -> RegionAmounts | None:
    region = trace.regions[signature.region]
    module = trace.modules.places[region.name] if region.kind == "module" else None
    return pricer.price_region(region, module, signature)


def _region_op(trace: Trace, region: Region) -> str:
    """Return the name under which a region stands in the ledger: its function's key, or its module's class."""
    if region.kind == "function":
        return f"prim::PythonOp.{region.name}"
    place = trace.modules.places[region.name]
    return place.classes[0] if place.classes else place.class_name


def _elements(outputs: tuple[Value, ...]) -> int:
    if len(outputs) == 1 and isinstance(outputs[0], TensorSpec):
        return outputs[0].numel
    return sum(spec.numel for spec in tensors_in(outputs))


def _add(
    entries: list[Entry],
    price: tuple[tuple[Amount, ...], str, int],
    scope: tuple[str, ...],
    phase: str,
    calls: int,
) -> None:
    """Append the entries of a signature's calls; of several amounts the first stands for the calls themselves."""
    amounts, op, elements = price
    seen = calls
    for label, status, value, macs, flops in amounts:
        row = (scope, phase, op, label, status, seen, value * calls, macs * calls, flops * calls, elements * seen)
        entries.append(tuple.__new__(Entry, row))
        seen = 0
