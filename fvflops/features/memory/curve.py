"""The predicted memory of a run as the curve of a page."""

from __future__ import annotations

from fvflops.features.memory.compute import KINDS, MemoryTimeline, read_memory
from fvflops.trace import Trace
from fvflops.trace.module_tree import innermost
from fvflops.views.run_views import MemoryCurve


def memory_curve(source: Trace | MemoryTimeline) -> MemoryCurve | None:
    """Return the bytes of each kind of memory after each op of a run; None where its Trace has no order of events.

    >>> import torch
    >>> from fvflops import record_call
    >>> curve = memory_curve(record_call(torch.nn.Linear(3, 2), (torch.ones(4, 3),)))
    >>> curve.ops, curve.peak()
    (['aten::t', 'aten::addmm'], 112)
    """
    if isinstance(source, Trace) and source.events is None:
        return None
    timeline = read_memory(source) if isinstance(source, Trace) else source
    trace = timeline.trace
    events = trace.events or ()
    ops = [index for index, event in enumerate(events) if event.kind == "op" and (event.reads or event.writes)]
    curves = {kind: timeline.curve(kind) for kind in KINDS}
    scopes = trace.scopes()
    return MemoryCurve(
        # The first value of a curve is from before the run.
        {kind: [curve[index + 1] for index in ops] for kind, curve in curves.items() if any(curve)},
        [trace.signatures[events[index].item].op for index in ops],
        [innermost(scopes[events[index].stack]) for index in ops],
        [events[index].phase for index in ops],
    )
