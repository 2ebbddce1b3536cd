"""Markdown table of parameters: trainable, frozen, active and unused."""

from __future__ import annotations

from collections.abc import Mapping

from fvflops.comparison.parameters.parameter_records import ParameterCount
from fvflops.reports.escaping import printable_short
from fvflops.reports.fvcore_table import pipe_table
from fvflops.units import format_bytes, format_size
from fvflops.views.summary_rows import depth_of

_HEADINGS = ("total", "trainable", "frozen", "active", "unused", "buffers")


def render(counts: Mapping[str, ParameterCount], *, depth: int = 3, digits: int = 3) -> str:
    """Return a row for each module or parameter with any elements, `depth` levels of names below the root.

    Fields that need a run have no column without one. Sentences below say how many active elements are in embedding
    tables, and how many bits the elements of each dtype take, if there are several.

    >>> print(render({"": ParameterCount(6, 2, active=6, unused=0, looked_up=4), "fc": ParameterCount(6, 2, 6, 4, 0)}))
    | name   |   total |   trainable |   frozen |   active |   unused |   buffers |
    |:-------|--------:|------------:|---------:|---------:|---------:|----------:|
    | model  |       6 |           2 |        4 |        6 |        0 |         0 |
    |  fc    |       6 |           2 |        4 |        6 |        0 |         0 |
    <BLANKLINE>
    4 of the active are in embedding tables.
    """
    root = counts[""]
    headings = [heading for heading in _HEADINGS if getattr(root, heading) is not None]
    rows = [
        [_indent(name), *(format_size(getattr(count, heading), digits=digits) for heading in headings)]
        for name, count in counts.items()
        if depth_of(name) <= depth and (not name or count.total or count.buffers)
    ]
    notes = []
    if root.looked_up:
        notes.append(f"{format_size(root.looked_up, digits=digits)} of the active are in embedding tables.")
    if len(root.by_dtype) > 1:
        dtypes = [
            f"{format_size(stored.elements, digits=digits)} {dtype} ({stored.bits:.3g} bits)"
            for dtype, stored in root.by_dtype.items()
        ]
        notes.append(f"{format_bytes(root.nbytes)} of parameters: {', '.join(dtypes)}.")
    return "\n\n".join([pipe_table(["name", *headings], rows), *notes])


def _indent(name: str) -> str:
    return " " * depth_of(name) + printable_short(name.rpartition(".")[2]) if name else "model"
