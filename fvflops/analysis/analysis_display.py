"""Text of an analysis: one line for `repr`, and a table for `print`."""

from __future__ import annotations

from fvflops.counting.metrics import METRICS
from fvflops.reports.display import WIDTH
from fvflops.reports.terminal import count_table
from fvflops.reports.terminal.collapse import collapse
from fvflops.trace import Counts, Status, Summary, Trace
from fvflops.units import format_quantity, format_short

_MAX_LINES = 50
_DEPTHS = (3, 2, 1)  # levels below the root, of which the first is shown that has few enough lines


def list_facts(trace: Trace | None, counts: Counts | None) -> list[str]:
    """Return what is known of a run, without computing more: its total, and the op calls that have no formula."""
    if counts is not None:
        title = METRICS[counts.metric].short if counts.metric in METRICS else counts.metric
        unsupported = sum(entry.calls for entry in counts.entries if entry.status is Status.UNSUPPORTED)
        missing = f"{format_quantity(unsupported, 'op call')} unsupported" if unsupported else ""
        return [f"{format_short(counts.total())} {title}", missing]
    return ["not run yet" if trace is None else f"{format_quantity(sum(trace.calls.values()), 'op call')} recorded"]


def write_table(summary: Summary) -> str:
    """Return the table of a summary at 80 columns, equal layers collapsed, down to the depth that fits a screen."""
    collapsed = collapse(summary)
    text = ""
    for depth in _DEPTHS:
        text = count_table.render(collapsed, depth=depth, width=WIDTH)
        if text.count("\n") < _MAX_LINES:
            break
    return text
