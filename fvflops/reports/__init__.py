"""The reports: each turns a summary, or a timeline, into text, and sees neither a model nor a tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from fvflops.reports import (
    chrome_trace,
    csv,
    dot,
    flame_graph,
    html,
    icicle,
    json,
    latex,
    markdown,
    model_explorer,
    paper,
    speedscope,
    table,
    tree,
)
from fvflops.trace import ModuleTree, Summary
from fvflops.trace.breakdown import Breakdown
from fvflops.trace.calls import OpCall
from fvflops.trace.timeline import Timeline


class Report(Protocol):
    """What turns a summary into text.

    `by` is "module", "operator" or "both"; a view that a report does not offer raises ValueError. `depth` is how many
    levels below the root are shown; None is the report's own choice: 3 for the table, the model alone for paper and
    LaTeX, all for the others.
    """

    def __call__(self, summary: Summary, *, by: str = "module", depth: int | None = None) -> str: ...


REPORTS: Mapping[str, Report] = {
    "table": table.render,
    "fvcore": table.render,
    "tree": tree.render,
    "json": json.render,
    "csv": csv.render,
    "markdown": markdown.render,
    "paper": paper.render,
    "latex": latex.render,
}


class Export(Protocol):
    """What turns a timeline into the pieces of a file that other programs read: `file.writelines(export(timeline))`.

    `weight` is what the width of a thing stands for, one of `fvflops.trace.timeline.WEIGHTS`; None is time where a
    clock ran, else flops. One that is not known raises TraceError, before any piece is made.
    """

    def __call__(self, timeline: Timeline, *, weight: str | None = None) -> Iterator[str]: ...


EXPORTS: Mapping[str, Export] = {
    "chrome-trace": chrome_trace.render,
    "speedscope": speedscope.render,
    "flame-graph": flame_graph.render,
}


class Page(Protocol):
    """What turns a breakdown into the pieces of a file that people open: `file.writelines(page(breakdown))`."""

    def __call__(self, breakdown: Breakdown) -> Iterator[str]: ...


PAGES: Mapping[str, Page] = {"html": html.render}


class Picture(Protocol):
    """What turns a breakdown into a Figure, which `fvflops.reports.picture.encode` makes the bytes of a file."""

    def __call__(self, breakdown: Breakdown, *, measure: str = "flops", depth: int | None = None) -> Any: ...


PICTURES: Mapping[str, Picture] = {"svg": icicle.draw, "png": icicle.draw}


class Graph(Protocol):
    """What turns op calls into the text of a file that graph viewers read; see `dot.render` for `depth`."""

    def __call__(self, calls: Sequence[OpCall], modules: ModuleTree, *, depth: int | None = None) -> str: ...


GRAPHS: Mapping[str, Graph] = {"dot": dot.render, "model-explorer": model_explorer.render}

__all__ = ["EXPORTS", "GRAPHS", "PAGES", "PICTURES", "REPORTS", "Export", "Graph", "Page", "Picture", "Report"]
