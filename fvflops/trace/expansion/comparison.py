"""Compare the events of two runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fvflops.trace.trace import Trace


def are_equal_runs(first: Trace, second: Trace) -> bool:
    """Return whether two traces with ordered events have equal events and storages, however their tables are ordered.

    >>> from fvflops import record_call
    >>> import torch
    >>> trace = record_call(torch.relu, (torch.ones(2),))
    >>> are_equal_runs(trace, trace), are_equal_runs(trace, record_call(torch.relu, (torch.ones(3),)))
    (True, False)
    """
    if first.events is None or second.events is None or list(first.storages) != list(second.storages):
        return False
    read_first, read_second = _readers(first), _readers(second)
    known: set[tuple[str, int, int]] = set()
    if len(first.events) != len(second.events):
        return False
    for one, other in zip(first.events, second.events, strict=True):
        if one[0] != other[0] or one[3:] != other[3:]:
            return False
        kind = one.kind
        for table, index, other_index in (("stack", one.stack, other.stack), (kind, one.item, other.item)):
            key = table, index, other_index
            if key not in known:
                if read_first[table](index) != read_second[table](other_index):
                    return False
                known.add(key)
    return True


def _readers(trace: Trace) -> dict[str, Callable[[int], Any]]:
    """Return by table, and by kind of event, how to read what an index refers to."""
    regions, stacks, signatures = trace.regions, trace.stacks, trace.signatures

    def read_exit(index: int) -> Any:
        signature = trace.region_signatures[index]
        return regions[signature.region], signature.inputs, signature.outputs

    return {
        "stack": lambda index: [regions[region] for region in stacks[index]],
        "op": lambda index: signatures[index],
        "enter": lambda index: regions[index],
        "exit": read_exit,
        "free": lambda index: index,
    }
