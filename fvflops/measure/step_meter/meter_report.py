"""Report of a metered loop: utilisation over its steps, the mean step, and where the FLOPs went."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Protocol

from fvflops.measure.step_meter.step_figures import MeterSummary, StepFigures, WorkParts, mean_figures
from fvflops.reports.document import (
    Chart,
    Column,
    Document,
    Part,
    Table,
    Value,
    module_column,
    number_column,
    text_column,
)
from fvflops.trace.module_tree import modules_above
from fvflops.units import (
    format_percent,
    format_quantity,
    format_ratio,
    format_seconds,
    format_share,
    format_short,
    format_thousands,
)

_POINTS = 400  # of the chart, each the mean of as many steps
_DEPTH = 3  # levels of modules below the root
_SCALE = 10**6  # a chart has integers: shares in millionths, FLOP/s in 10^6


class Reported(Protocol):
    """An object with a report, such as a ProfileAnalysis."""

    def report(self) -> Document:
        """Return the report."""


def meter_report(
    summary: MeterSummary, steps: Sequence[StepFigures], parts: WorkParts, counted: int, profile: Document | None = None
) -> Document:
    """Return the report of a loop.

    `parts` are the FLOPs of `counted` of the `steps`, without optimizers; `profile` is a report with the time.
    """
    document: list[Part] = [str(summary), *_draw(steps), _tabulate_figures(summary)]
    if counted:
        total = parts.total()
        by_module, by_operator, by_phase = sums = Counter[str](), Counter[str](), Counter[str]()
        for part, flops in parts.items():
            for counter, name in zip(sums, part, strict=True):
                counter[name] += flops
        share = f"FLOPs of {format_quantity(counted, 'step')} of {format_thousands(len(steps))}, optimizers excluded"
        inclusive = _sum_modules(by_module)
        document += [
            _tabulate("phases", text_column("phase"), by_phase.most_common(), total, f"Phases: {share}"),
            _tabulate("modules", module_column(), inclusive, total, "Modules with their submodules"),
            _tabulate("operators", text_column("operator"), by_operator.most_common(), total, "Operators"),
        ]
    if profile is not None:
        document += [f"Profile: {profile.title}", *profile.parts]
    return Document("step_meter", f"Utilisation of {format_quantity(summary.steps, 'step')}", document)


def _draw(steps: Sequence[StepFigures]) -> Iterator[Chart]:
    """Yield the chart of the utilisation, or where it is unknown of the FLOP/s."""
    points = min(_POINTS, len(steps))
    bounds = [len(steps) * index // points for index in range(points + 1)]
    known = [[step for step in steps[start:end] if not math.isnan(step.model_flops)] for start, end in pairwise(bounds)]
    means = [mean for group in known if (mean := mean_figures(group))]
    span = f"steps {format_thousands(steps[0].step)} to {format_thousands(steps[-1].step)}"
    hidden = sum(math.isnan(step.model_flops) for step in steps)
    notes = [f"{format_quantity(hidden, 'step')} of unknown cost excluded."] * bool(hidden)
    if means and not any(math.isnan(mean.mfu + mean.hfu) for mean in means):
        layers = {
            "MFU: forward, backward": [round(mean.mfu * _SCALE) for mean in means],
            "HFU: other work too": [round((mean.hfu - mean.mfu) * _SCALE) for mean in means],
        }
        yield Chart(
            "utilisation", layers, [(span, len(means))], "Utilisation", lambda x: f"{x * 100 / _SCALE:.3g} %", notes
        )
    elif means:
        layers = {"model FLOP/s": [round(mean.tflops_per_device * _SCALE) for mean in means]}
        rate = Chart("flops_per_second", layers, [(span, len(means))], "FLOP/s of a device", notes=notes)
        yield replace(rate, form=lambda millions: format_short(millions * 1e12 / _SCALE))


def _tabulate_figures(summary: MeterSummary) -> Table:
    total = summary.total
    rates: list[tuple[str, float, Callable[[Any], str]]] = [
        ("time", total.seconds, format_seconds),
        ("tokens/s", total.tokens_per_second, lambda rate: format_thousands(round(rate))),
        ("samples/s", total.samples_per_second, format_ratio),
        ("MACs (forward and backward)", total.macs, format_short),
        ("model FLOPs (2 per MAC)", total.model_flops, format_short),
        ("hardware FLOPs (2 per MAC)", total.hardware_flops, format_short),
        ("TFLOP/s of a device", total.tflops_per_device, format_ratio),
        ("MFU", total.mfu, format_percent),
        ("HFU", total.hfu, format_percent),
        ("peak memory, measured (B)", total.memory_peak, format_short),
        ("peak memory, predicted (B)", summary.memory_predicted, format_short),
    ]
    if not math.isnan(total.unexplained):
        planned = ("time, planned", total.expected_seconds, format_seconds)
        rates[1:1] = [planned, ("time, not explained by the plan", total.unexplained, format_share)]
    rows = [(name, "unknown" if math.isnan(value) else form(value)) for name, value, form in rates]
    return Table("figures", (text_column("figure"), text_column("mean")), rows, title="Mean step", noun="figure")


def _sum_modules(by_module: Counter[str]) -> list[tuple[str, int]]:
    """Return the modules down to a depth with the FLOPs of their submodules, parents before their children."""
    inclusive: Counter[str] = Counter()
    for name, flops in by_module.items():
        for module in {"", *modules_above(name), name}:
            inclusive[module] += flops
    rows = [(module, flops) for module, flops in inclusive.items() if module.count(".") < _DEPTH]
    # The largest come first, below their parents.
    above = {module: [name for name in (*modules_above(module), module) if name] for module, _ in rows}
    return sorted(rows, key=lambda row: [(-inclusive[name], name) for name in above[row[0]]])


def _tabulate(name: str, column: Column, rows: Sequence[tuple[str, int]], total: int, title: str) -> Table:
    values: list[tuple[Value, ...]] = [(key, flops, flops / total) for key, flops in rows]
    columns = column, number_column("flops", "FLOPs"), number_column("share", form=format_percent)
    return Table(name, columns, values, title=title, noun=name.removesuffix("s"))
