"""The reports: each turns a summary, or a timeline, into text, and sees neither a model nor a tensor."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from fvflops.trace import ModuleTree, Summary
    from fvflops.trace.calls import OpCall
    from fvflops.trace.timeline import Timeline
    from fvflops.views.breakdown import Breakdown


def _later(module: str, function: str = "render") -> Any:
    """Return a report's function; its module is imported when it is first called, for a count needs none."""

    def call(*args: Any, **options: Any) -> Any:
        return getattr(importlib.import_module(module), function)(*args, **options)

    return call


class Report(Protocol):
    """What turns a summary into text.

    `by` is "module", "operator" or "both"; a view that a report does not offer raises ValueError. `depth` is how many
    levels below the root are shown; None is the report's own choice: 3 for the table, the model alone for paper and
    LaTeX, all for the others.
    """

    def __call__(self, summary: Summary, *, by: str = "module", depth: int | None = None) -> str: ...


REPORTS: Mapping[str, Report] = {
    "table": _later("fvflops.reports.fvcore.table"),
    "fvcore": _later("fvflops.reports.fvcore.table"),
    "tree": _later("fvflops.reports.fvcore.tree"),
    "json": _later("fvflops.reports.json"),
    "csv": _later("fvflops.reports.csv"),
    "markdown": _later("fvflops.reports.markdown"),
    "paper": _later("fvflops.reports.paper.paper"),
    "latex": _later("fvflops.reports.paper.latex"),
}


class Export(Protocol):
    """What turns a timeline into the pieces of a file that other programs read: `file.writelines(export(timeline))`.

    `weight` is what the width of a thing stands for, one of `fvflops.trace.timeline.WEIGHTS`; None is time where a
    clock ran, else flops. One that is not known raises TraceError, before any piece is made.
    """

    def __call__(self, timeline: Timeline, *, weight: str | None = None) -> Iterator[str]: ...


EXPORTS: Mapping[str, Export] = {
    "chrome-trace": _later("fvflops.reports.files.chrome_trace"),
    "speedscope": _later("fvflops.reports.files.speedscope"),
    "flame-graph": _later("fvflops.reports.files.flame_graph"),
}


class Page(Protocol):
    """What turns a breakdown into the pieces of a file that people open: `file.writelines(page(breakdown))`."""

    def __call__(self, breakdown: Breakdown) -> Iterator[str]: ...


PAGES: Mapping[str, Page] = {"html": _later("fvflops.reports.html")}


class Picture(Protocol):
    """What turns a breakdown into a Figure; `fvflops.reports.pictures.picture.encode` makes the bytes of a file."""

    def __call__(self, breakdown: Breakdown, *, measure: str = "flops", depth: int | None = None) -> Any: ...


PICTURES: Mapping[str, Picture] = {
    "svg": _later("fvflops.reports.pictures.icicle", "draw_icicle"),
    "png": _later("fvflops.reports.pictures.icicle", "draw_icicle"),
}


class Graph(Protocol):
    """What turns op calls into the text of a file that graph viewers read; see `dot.render` for `depth`."""

    def __call__(self, calls: Sequence[OpCall], modules: ModuleTree, *, depth: int | None = None) -> str: ...


GRAPHS: Mapping[str, Graph] = {
    "dot": _later("fvflops.reports.files.dot"),
    "model-explorer": _later("fvflops.reports.files.model_explorer"),
}

__all__ = ["EXPORTS", "GRAPHS", "PAGES", "PICTURES", "REPORTS", "Export", "Graph", "Page", "Picture", "Report"]
