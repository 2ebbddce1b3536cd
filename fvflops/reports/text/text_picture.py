"""Pictures of plain text."""

from __future__ import annotations

from fvflops.reports.document import Chart, Gantt, Scatter
from fvflops.reports.text.text_chart import text_chart
from fvflops.reports.text.text_gantt import text_gantt
from fvflops.reports.text.text_scatter import text_scatter


def text_picture(picture: Chart | Gantt | Scatter, *, width: int | None = None) -> str:
    """Return a picture in lines of at most `width` cells, 80 if None."""
    if isinstance(picture, Chart):
        return text_chart(picture, width=width)
    return text_gantt(picture, width=width) if isinstance(picture, Gantt) else text_scatter(picture, width=width)
