"""Locate unsupported op calls: module and source line."""

from __future__ import annotations

from collections import Counter

from fvflops.counting.count_trace import name_region
from fvflops.trace import Counts, Status, Trace
from fvflops.trace.module_tree import innermost


def find_unsupported_locations(trace: Trace, counts: Counts) -> dict[str, Counter[str]]:
    """Return op → location → calls for the unsupported ops; a location is such as "'encoder.scan' at net.py:42".

    The line is known for calls that bypass the dispatcher. The root module is named by its class.
    """
    unsupported = counts.ledger()[Status.UNSUPPORTED]
    if not unsupported:
        return {}
    scopes = trace.scopes()
    locations: dict[str, Counter[str]] = {}
    for (index, stack, _), calls in trace.calls.items():
        signature = trace.signatures[index]
        if signature.packet in unsupported:
            location = trace.modules.locate(innermost(scopes[stack]), signature.source)
            locations.setdefault(signature.packet, Counter())[location] += calls
    for (index, stack, _), calls in trace.region_calls.items():
        name = name_region(trace, trace.regions[trace.region_signatures[index].region])
        if name in unsupported and name not in locations:
            locations.setdefault(name, Counter())[trace.modules.locate(innermost(scopes[stack]))] += calls
    return locations
