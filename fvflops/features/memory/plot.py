"""The memory of a run over its ops, as a chart."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from fvflops.features.memory.compute import KINDS, MemoryTimeline
from fvflops.reports.document import Chart
from fvflops.reports.pictures.svg_chart import svg_chart
from fvflops.units import format_bytes, format_short

# Recompute happens inside the backward pass.
_SECTIONS = {"recompute": "backward"}


def memory_chart(timeline: MemoryTimeline) -> Chart:
    """Return the bytes of each kind of memory at each op, and the phases."""
    events = timeline.trace.events or ()
    ops = [index for index, event in enumerate(events) if event.kind == "op" and (event.reads or event.writes)]
    curves = {kind: timeline.curve(kind) for kind in KINDS}
    # The first value of a curve is from before the run.
    layers = {kind: [curve[index + 1] for index in ops] for kind, curve in curves.items()}
    return Chart(
        "memory",
        layers,
        _find_sections([events[index].phase for index in ops]),
        title="Memory over the ops of the run, in bytes by kind",
        form=format_short,
    )


def _find_sections(phases: Sequence[str]) -> list[tuple[str, int]]:
    named = (_SECTIONS.get(phase, phase) for phase in phases)
    return [(name, len(list(group))) for name, group in groupby(named)]


def draw_memory(timeline: MemoryTimeline, title: str) -> str:
    """Return the chart as an SVG picture."""
    chart = memory_chart(timeline)
    return svg_chart(Chart(chart.name, chart.layers, chart.sections, title, format_bytes))
