"""Divide the work of ops over the kernels that they launched."""

from __future__ import annotations

from collections import defaultdict

from fvflops.measure.kernels.matching import KernelMatch
from fvflops.measure.kernels.recorded_calls import Work


def divide_work(match: KernelMatch) -> dict[int, Work]:
    """Return kernel → its part, by time, of the work of the op that launched it; copies have none.

    The op is the innermost around the launch that has work of its own. The parts add up to it.
    """
    events = match.run.events
    kernels: dict[int, list[int]] = defaultdict(list)
    for event_index, event in enumerate(events):
        if event.kind == "device" and not event.name.startswith(("Memcpy", "Memset")):
            owner = event.parent
            while owner >= 0 and not (events[owner].kind == "op" and match.self_work[owner] is not None):
                owner = events[owner].parent
            if owner >= 0:
                kernels[owner].append(event_index)
    works: dict[int, Work] = {}
    for owner, launched in kernels.items():
        work, total = match.self_work[owner], sum(events[index].duration_ns for index in launched)
        assert work is not None
        done = Work()
        time = 0
        for event_index in launched:  # cumulative, so that the rounded parts add up
            time += events[event_index].duration_ns
            share = Work(*(value * time // total if total else 0 for value in work))
            works[event_index] = Work(share.macs - done.macs, share.flops - done.flops)
            done = share
    return works
