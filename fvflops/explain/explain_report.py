"""Report of explained traces: the steps, their time by class and cause, the longest work, collectives, idle time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from fvflops.explain.explained_trace import ExplainedTrace
from fvflops.explain.findings.find_losses import encode_losses, find_losses, report_parts
from fvflops.explain.findings.finding import describe_work
from fvflops.explain.findings.planned_step import ComparedRow, PlannedStep, compare_modules, compare_step
from fvflops.explain.launch_contexts import KINDS, shorten_kernel
from fvflops.explain.step_records import CAUSES, StepTimeline, WorkRow, sum_rows
from fvflops.reports.document import (
    Column,
    Document,
    Items,
    Part,
    Table,
    Value,
    data_only,
    difference_column,
    number_column,
    text_column,
)
from fvflops.text import record_data
from fvflops.units import format_bytes, format_seconds, format_share, format_short

_TIMES = (
    *("total_ns", "busy_ns", "compute_ns", "exposed_communication_ns", "exposed_memcpy_ns", "idle_ns"),
    *("communication_ns", "memcpy_ns", "host_ns"),
)
_ROWS = 20  # of tables besides the main one


def explain_report(trace: ExplainedTrace, planned: PlannedStep | None = None) -> Document:
    """Return the report of explained traces, compared with a plan if there is one."""
    steps = max(len(trace.steps()), 1)
    found, compared = find_losses(trace, planned), [] if planned is None else compare_step(trace, planned)
    about = [*trace.about(), *_list_missing_phases(compared)]
    parts: list[Part] = [Items("", about[1:])] if about[1:] else []
    modules = None if planned is None else compare_modules(trace, planned)
    parts += report_parts(found, compared, modules, trace.total_ns() / 1e9 / steps)
    parts += [_tabulate_time(trace, steps), _tabulate_steps(trace), _tabulate_work(trace, steps)]
    parts += [_tabulate_collectives(trace, steps), _tabulate_waits(trace), _tabulate_idle(trace, steps)]
    name = os.path.basename(trace.timelines[0].path)
    device = "" if trace.device is None else f" on {trace.device.name}"
    return Document(
        "explain",
        f"{name}{device}: {about[0]}",
        parts,
        main="time",
        data={**encode_losses(found, compared, modules), **_encode(trace)},
        about={"device": None if trace.device is None else trace.device.name, "steps": steps, "about": about},
    )


def _list_missing_phases(compared: Sequence[ComparedRow]) -> Iterator[str]:
    measured = {row.phase for row in compared if row.measured}
    missing = dict.fromkeys(row.phase for row in compared if row.phase and row.phase not in measured)
    if missing:
        yield f"the trace has no work of the phases {', '.join(missing)}: the plan is for a whole training step"


def _seconds(key: str, heading: str) -> Column:
    return number_column(key, heading, form=format_seconds)


# Columns of work and idle time; narrow terminals omit those with a `hide_order`, the largest first.
_COLUMNS = (
    text_column("part", shorten_last=True),
    _seconds("seconds", "time"),
    number_column("share", form=format_share),
    number_column("calls"),
    replace(number_column("kernels"), hide_order=3),
    replace(_seconds("hidden_seconds", "hidden"), hide_order=2),
    replace(number_column("flops", "FLOPs"), hide_order=4),
    replace(number_column("bytes", form=format_bytes), hide_order=5),
    number_column("flops_per_second", "FLOP/s"),
    _seconds("expected_seconds", "expected"),
    difference_column("lost_seconds", "lost", form=format_seconds),
)


def _tabulate_time(trace: ExplainedTrace, steps: int) -> Table:
    """Return the time of a step by class of work and by cause of idle time; rows add up to it."""
    on_gpu = any(timeline.on_gpu for timeline in trace.timelines)
    columns = data_only(_COLUMNS, [] if on_gpu else ["kernels"])
    total = trace.total_ns()
    idle = [(f"idle: {CAUSES[row.cause]}", row.ns) for row in trace.idle()]
    records = [{"part": KINDS[row.kind], **_figures(row, steps, total)} for row in trace.work()]
    records += [
        {"part": name, "seconds": ns / 1e9 / steps, "share": ns / total if total else None}
        for name, ns in (*idle, ("step", total))
    ]
    *rows, last = _list_values(columns, records)
    return Table("time", columns, rows, "Time of a step, mean of all", total=last, noun="row")


def _list_values(columns: Sequence[Column], records: Sequence[Mapping[str, Value]]) -> list[list[Value]]:
    return [[record.get(column.key) for column in columns] for record in records]


def _figures(row: WorkRow, steps: int, total: int) -> dict[str, Value]:
    return {
        "seconds": row.ns / 1e9 / steps,
        "share": row.ns / total if total else None,
        "calls": row.calls / steps or None,
        "kernels": row.kernels / steps,
        "hidden_seconds": row.hidden_ns / 1e9 / steps or None,
        "flops": None if row.flops is None else row.flops / steps or None,
        "bytes": None if row.nbytes is None else row.nbytes / steps or None,
        "flops_per_second": row.flops_per_second,
        "expected_seconds": None if row.expected_ns is None else row.expected_ns / 1e9 / steps,
        "lost_seconds": None if row.lost_ns is None else row.lost_ns / 1e9 / steps,
    }


def _tabulate_steps(trace: ExplainedTrace) -> Table:
    columns = (
        text_column("rank"),
        text_column("step"),
        _seconds("total_ns", "time"),
        _seconds("compute_ns", "compute"),
        _seconds("exposed_communication_ns", "exposed comm."),
        _seconds("exposed_memcpy_ns", "exposed copies"),
        _seconds("idle_ns", "idle"),
        _seconds("host_ns", "host"),
    )
    rows = []
    for timeline in trace.timelines:
        rank = "" if timeline.rank is None else str(timeline.rank)
        for step in timeline.steps:
            times = [getattr(step, column.key) for column in columns[2:]]
            rows.append([rank, step.name, *(None if ns is None else ns / 1e9 for ns in times)])
    return Table("steps", columns, rows, "Steps", noun="step").ranked(top=_ROWS)


def _tabulate_work(trace: ExplainedTrace, steps: int) -> Table:
    what, seconds, _, calls, *_, rate, expected, lost = _COLUMNS
    columns = (what, seconds, text_column("class"), text_column("phase"), calls, rate, expected, lost)
    records = [
        {"part": describe_work(row), "class": row.kind, "phase": row.phase, **_figures(row, steps, 0)}
        for row in trace.work(lambda row: (row.kind, row.phase, row.op or row.kernel, str(row.inputs)))
        if row.kind != "communication"
    ]
    rows = _list_values(columns, records)
    return Table("work", columns, rows, "Longest work, mean of a step", noun="row", summed="seconds").ranked(top=_ROWS)


def _tabulate_collectives(trace: ExplainedTrace, steps: int) -> Table:
    columns = (
        text_column("collective", shorten_last=True),
        number_column("group", "ranks"),
        number_column("kernels"),
        _seconds("seconds", "exposed"),
        _seconds("hidden_seconds", "hidden"),
        number_column("bytes", form=format_bytes),
        number_column("bytes_per_second", "rate", form=lambda rate: f"{format_short(rate)}B/s"),
    )
    rows: list[list[Value]] = []
    for row in trace.work(lambda row: (row.kind, describe_collective(row), dict(row.details).get("Group size"))):
        if row.kind == "communication":
            seconds, hidden = row.ns / 1e9 / steps, row.hidden_ns / 1e9 / steps
            name, ranks = describe_collective(row), dict(row.details).get("Group size")
            nbytes = None if row.nbytes is None else row.nbytes / steps
            rows.append([name, ranks, row.kernels / steps, seconds, hidden, nbytes, row.bytes_per_second])
    return Table("communication", columns, rows, "Communication, mean of a step", noun="collective").ranked(top=_ROWS)


def describe_collective(row: WorkRow) -> str:
    """Return the name of a collective, as recorded or by its op or kernel, with its dtype."""
    details = dict(row.details)
    name = str(details.get("Collective name") or row.op or shorten_kernel(row.kernel))
    return f"{name.strip('_')} {str(details.get('dtype', '')).lower()}".strip()


def _tabulate_waits(trace: ExplainedTrace) -> Table:
    columns = (
        number_column("rank", form=str),
        number_column("collectives"),
        _seconds("kernel_seconds", "time"),
        _seconds("waiting_seconds", "waiting"),
    )
    rows = [[wait.rank, wait.collectives, wait.kernel_ns / 1e9, wait.waiting_ns / 1e9] for wait in trace.waits()]
    title = "Collectives that wait for other ranks, whole trace"
    return Table("waits", columns, rows, title, noun="rank").ranked(top=_ROWS)


def _tabulate_idle(trace: ExplainedTrace, steps: int) -> Table:
    columns = (
        text_column("cause"),
        text_column("name", "where the host was", shorten_last=True),
        number_column("intervals"),
        _seconds("seconds", "time"),
    )
    rows: list[list[Value]] = [
        [CAUSES[row.cause], row.name, row.intervals / steps, row.ns / 1e9 / steps]
        for row in trace.idle(lambda row: (row.cause, row.name))
    ]
    return Table("idle", columns, rows, "Idle time, mean of a step", noun="row", summed="seconds").ranked(top=_ROWS)


def _encode(trace: ExplainedTrace) -> Mapping[str, Any]:
    """Return all rows for JSON, in nanoseconds; modules are summed up."""
    names = ("path", "rank", "device=device_name", "on_gpu")
    ranks = [
        {**record_data(timeline, *names), "steps": [_encode_step(step) for step in timeline.steps]}
        for timeline in trace.timelines
    ]
    return {"ranks": ranks, "waits": [asdict(wait) for wait in trace.waits()]}


def _encode_step(step: StepTimeline) -> dict[str, Any]:
    rows = sum_rows(step.work, lambda row: (row.kind, row.op, row.kernel, row.phase, str(row.inputs), row.details))
    names = ("kind", "group", "op", "kernel", "phase", "is_graph", "calls", "kernels", "ns", "kernel_ns")
    costs = ("macs", "flops", "nbytes", "expected_ns", "modelled_ns", "lost_ns")
    work = [
        {
            **record_data(row, *names, *costs),
            "shapes": list(row.inputs[0] or ()) if row.inputs else [],
            "details": dict(row.details),
        }
        for row in rows
    ]
    return {**record_data(step, "name", *_TIMES), "work": work, "idle": [asdict(row) for row in step.idle]}
