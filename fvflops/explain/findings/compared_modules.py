"""A planned step beside the measured one by module, where the trace names modules."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from fvflops.explain.explained_trace import ExplainedTrace
from fvflops.explain.findings.planned_step import ComparedRow, PlannedStep
from fvflops.explain.launch_contexts import MODULE
from fvflops.explain.trace_columns import TraceColumns

OUTSIDE = "model, outside of its modules"
_LAYER = re.compile(r"(?<![^.])\d+(?![^.])")  # a number between dots
_NUMBERED = re.compile(r"(?:FSDP)?(\w+)_(\d+)")  # FSDP2 changes the names of classes


@dataclass(frozen=True, slots=True)
class ComparedModules:
    """Rows of modules, equal ones of all layers together, the largest loss first; `matched` of the trace's `traced`."""

    rows: tuple[ComparedRow, ...]
    matched: int
    traced: int


def compare_modules(trace: ExplainedTrace, planned: PlannedStep) -> ComparedModules:
    """Return the time of kernels by module and phase, expected and measured, without optimizers and collectives.

    A module's time is without its submodules. Modules of a class that the trace and the plan have in different numbers
    are not matched: each side has rows of its own.
    """
    steps = max(len(trace.steps()), 1)
    measured: dict[tuple[str, str], float] = defaultdict(float)
    expected: dict[tuple[str, str], float] = defaultdict(float)
    names = {timeline.path: match_modules(timeline.columns, planned.classes) for timeline in trace.timelines}
    for timeline, step in trace.steps():
        for row in step.work:
            if row.kind != "communication" and row.phase != "optimizer":
                name = names[timeline.path].get(row.module, row.module)
                name = f"{row.module.rpartition('_')[0]} (not matched)" if name is None else name
                measured[_label(name), row.phase] += row.ns / 1e9 / steps
    for (module, phase), seconds in planned.modules.items():
        if phase != "optimizer":
            expected[_label(module), phase] += seconds
    rows = [ComparedRow(*key, expected[key], measured[key]) for key in {**measured, **expected}]
    known = [name for own in names.values() for name in own.values()]
    rows.sort(key=lambda row: -row.lost)
    return ComparedModules(tuple(rows), sum(name is not None for name in known), len(known))


def _label(module: str) -> str:
    return _LAYER.sub("*", module) or OUTSIDE


def match_modules(columns: TraceColumns, classes: Mapping[str, tuple[str, ...]]) -> dict[str, str | None]:
    """Return a trace's names of modules → names of the plan's, None where unmatched.

    With stacks, torch.profiler numbers the modules of each class by their first call, as `classes` lists them.
    """
    traced: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for name in columns.names.values:
        module = str(name).removeprefix(MODULE)
        if module != name and (match := _NUMBERED.fullmatch(module)):
            traced[match[1]].append((int(match[2]), module))
    found: dict[str, str | None] = {}
    for kind, modules in traced.items():
        planned = classes.get(kind, ())
        same: list[str | None] = [*planned] if len(planned) == len(modules) else [None] * len(modules)
        found.update(zip((name for _, name in sorted(modules)), same, strict=True))
    return found
