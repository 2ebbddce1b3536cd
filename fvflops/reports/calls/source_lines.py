"""The source lines: the lines of a model's code, those that cost most first."""

from __future__ import annotations

from collections.abc import Sequence

from fvflops.reports import names
from fvflops.reports.text.text_table import text_table
from fvflops.trace.calls import LineCount
from fvflops.units import format_percent, format_short, format_thousands

_UNKNOWN = "(no line of the model's)"


def render(lines: Sequence[LineCount]) -> str:
    """Return the lines of source as text, most FLOPs first, with what the op calls come to that they make.

    FLOPs end with "+" where ops of unknown cost ran.

    >>> print(render([LineCount("net.py:12", 2, 48, 24, 12, 160, 0), LineCount("net.py:9", 1, 16, 8, 4, 80, 0)]))
    line       op calls  FLOPs  share  acts  bytes
    ---------  --------  -----  -----  ----  -----
    net.py:12         2     48  75.0%    12    160
    net.py:9          1     16  25.0%     4     80
    """
    whole = sum(line.flops for line in lines)
    rows = [
        [
            names.printable_short(line.line) or _UNKNOWN,
            format_thousands(line.calls),
            format_thousands(line.flops) + "+" * bool(line.unknown),
            format_percent(line.flops, whole),
            "" if line.activations is None else format_thousands(line.activations),
            format_short(line.nbytes),
        ]
        for line in lines
    ]
    return text_table(["line", "op calls", "FLOPs", "share", "acts", "bytes"], rows)
