"""Report of a profile: time and memory of modules or operators beside their FLOPs and bytes, and where they differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from fvflops.features.profiling.model import EXCESS, FACTOR, Profile, ProfileRow, outlier, time_flop_ratio
from fvflops.reports.document import Column, Document, Part, Table, Value, module_column, number_column, text_column
from fvflops.reports.names import plain_name
from fvflops.trace import PHASES
from fvflops.units import (
    format_percent,
    format_quantity,
    format_ratio,
    format_seconds,
    format_short,
    format_thousands,
)
from fvflops.views.ranking import check_sort, check_top
from fvflops.views.summary_rows import check_view, depth_of

VIEWS = ("module", "operator")
DEPTH = 2  # levels of modules below the root

# Key of an order, which is that of a column → what must have been measured or named for it, "" for nothing.
SORTS: Mapping[str, str] = {
    "time": "time",
    "self": "time",
    "calls": "",
    "flops": "",
    "rate": "time",
    "bytes": "",
    "intensity": "",
    "roofline": "peaks",
    "memory": "memory",
    "peak": "memory",
    "mismatch": "time",
    "name": "",
}
# Columns that a narrow terminal drops before it shortens the names of modules and operators.
_OPTIONAL = (
    *("self", "rate", "mismatch", "bytes", "unknown_bytes", "intensity", "memory", "peak"),
    *("flops_share", "read", "written"),
)
_NEEDED = {
    "time": "time was not measured: measure={'time'}",
    "memory": "memory was not measured: measure={'memory'}",
    "peaks": "no device was named whose peaks to take",
}


def profile_report(
    measured: Profile,
    *,
    by: str = "module",
    phase: str | None = None,
    depth: int | None = None,
    sort: str | None = None,
    top: int | None = None,
) -> Document:
    """Return the time and memory of modules or operators beside their FLOPs and bytes; times are in nanoseconds.

    `by` is "module" or "operator"; `phase` one phase, all if None. Modules come in the order of the model down to
    `depth` levels below the root, 2 if None, and below that where their time does not match their FLOPs. With `sort`,
    one of SORTS or a phase, or `top` they are one ranked list, of which `top` are shown; without `sort` by time. An
    unknown view, phase or order raises ValueError, one for which nothing was recorded TraceError or ValueError.
    """
    check_view(by, VIEWS, "the profile")
    check_top(top)
    whole = measured.whole(phase)
    lines = measured.module_lines(phase) if by == "module" else measured.operator_lines(phase)
    in_order = by == "module" and sort is None and top is None
    sort = None if in_order else _choose_sort(measured, by, sort)
    shown, notes = lines, [] if by == "module" else _note_between(lines, whole)
    if by == "module" and (in_order or depth is not None):
        limit = DEPTH if depth is None else depth
        shown = {
            name: line for name, line in lines.items() if depth_of(name) <= limit or (in_order and outlier(line, whole))
        }
        if in_order and len(shown) < len(lines):
            notes.append(f"{format_quantity(len(lines) - len(shown), f'more {by}')} below depth {limit}.")
    figures = _choose_figures(measured, by, phase)
    table = Table(
        f"{by}s",
        [module_column() if by == "module" else _OPERATOR, *(figure.column for figure in figures)],
        [(name, *(figure.value(_Row(name, line, whole)) for figure in figures)) for name, line in shown.items()],
        total=None if by == "module" else _add_up(whole, figures),
        notes=notes,
        noun=by,
    )
    parts: list[Part] = ["\n".join(_describe_run(measured, whole, phase)), table.ranked(sort=sort, top=top)]
    parts += ["\n".join([*_explain(measured, by, phase), *_list_gaps(measured)])]
    return Document("profile", describe_subject(measured.about), parts, main=table.name)


def check_profile_sort(sort: str) -> None:
    """Raise ValueError where no profile can be sorted by a key."""
    check_sort(sort, [*SORTS, *(phase for phase in PHASES if phase not in SORTS)])


class _Row(NamedTuple):
    """The data of a row; `whole` is the sum of all rows."""

    name: str
    line: ProfileRow
    whole: ProfileRow


class _Figure(NamedTuple):
    """A column, its value in a row, and whether the total has it."""

    column: Column
    value: Callable[[_Row], Value]
    in_total: bool = True


def _choose_figures(measured: Profile, by: str, phase: str | None) -> list[_Figure]:
    """Return the columns, first those that a narrow terminal is to show."""
    timed = "time" in measured.columns
    figures = [_Figure(number_column("calls", form=_calls), lambda row: row.line.calls)]
    if timed:
        figures.append(_Figure(number_column("time", form=_time), lambda row: row.line.total_ns))
        figures.append(_Figure(_TIME_SHARE, lambda row: _share(row.line.total_ns, row.whole.total_ns)))
        if measured.peaks:
            figures.append(
                _Figure(number_column("roofline", form=_percent), lambda row: row.line.roofline_share or None)
            )
        if by == "module":
            figures.append(_Figure(number_column("self", form=_time), lambda row: row.line.own_ns))
        if phase is None and len(measured.phases) > 1:
            figures += [_phase_figure(measured, by, name) for name in measured.phases]
    figures.append(_Figure(number_column("flops", "FLOPs"), lambda row: row.line.flops))
    if measured.unknown:
        figures.append(_Figure(number_column("unsupported", form=_calls), lambda row: row.line.unknown))
    if timed:
        figures.append(_Figure(number_column("rate", "FLOP/s"), lambda row: row.line.flops_per_second))
        figures.append(_Figure(_MISMATCH, lambda row: _compare(row.line, row.whole), in_total=False))
        figures.append(_Figure(text_column("mark"), lambda row: outlier(row.line, row.whole), in_total=False))
    figures.append(_Figure(number_column("bytes"), lambda row: row.line.bytes))
    if measured.unmoved:
        figures.append(_Figure(_UNKNOWN_BYTES, lambda row: row.line.unmoved))
    figures.append(_Figure(_INTENSITY, lambda row: row.line.intensity if row.line.bytes else None))
    if "memory" in measured.columns:
        figures.append(_Figure(number_column("memory", "kept"), lambda row: row.line.kept))
        figures.append(_Figure(number_column("peak"), lambda row: row.line.peak))
    figures.append(_Figure(_FLOP_SHARE, lambda row: _share(row.line.flops, row.whole.flops)))
    figures.append(_Figure(number_column("read"), lambda row: row.line.read))
    figures.append(_Figure(number_column("written"), lambda row: row.line.written))
    return [_make_optional(figure) for figure in figures]


def _make_optional(figure: _Figure) -> _Figure:
    column = figure.column
    return figure._replace(column=replace(column, optional=int(column.key in _OPTIONAL)))


def _phase_figure(measured: Profile, by: str, phase: str) -> _Figure:
    lines = (measured.by_module if by == "module" else measured.by_operator).get(phase, {})
    whole = measured.whole(phase)

    def value(row: _Row) -> int | None:
        found = whole if row.line is row.whole else lines.get(row.name)
        return None if found is None else found.total_ns

    return _Figure(number_column(phase, form=_time), value)


def _calls(count: int) -> str:
    return format_thousands(count) if count else ""


def _time(nanoseconds: int) -> str:
    return format_seconds(nanoseconds / 1e9) if nanoseconds else "0"


def _percent(share: float) -> str:
    return format_percent(share, 1)


_OPERATOR = text_column("operator", form=lambda op: op.removeprefix("aten::"))
_TIME_SHARE = number_column("share", "% time", form=_percent)
_FLOP_SHARE = number_column("flops_share", "% FLOPs", form=_percent)
_MISMATCH = number_column("mismatch", "time:FLOPs", form=format_ratio)
_INTENSITY = number_column("intensity", "FLOP/byte", form=format_ratio)
_UNKNOWN_BYTES = number_column("unknown_bytes", "unknown bytes", form=_calls)


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _compare(line: ProfileRow, whole: ProfileRow) -> float | None:
    """Return a row's share of the time divided by that of the FLOPs; of no FLOPs only where the time is much."""
    return time_flop_ratio(line, whole) if line.flops or outlier(line, whole) else None


def _add_up(whole: ProfileRow, figures: Sequence[_Figure]) -> list[Value]:
    row = _Row("", whole, whole)
    return ["total", *(figure.value(row) if figure.in_total else None for figure in figures)]


def _choose_sort(measured: Profile, by: str, sort: str | None) -> str:
    if sort is None:
        return "time" if "time" in measured.columns else "flops"
    check_profile_sort(sort)
    needs = SORTS.get(sort, "time")
    if needs and not (needs in measured.columns or (needs == "peaks" and measured.peaks)):
        raise ValueError(f"nothing can be sorted by {sort!r}: {_NEEDED[needs]}")
    return "time" if sort == "self" and by == "operator" else sort  # an operator has no nested rows


def _note_between(lines: Mapping[str, ProfileRow], whole: ProfileRow) -> list[str]:
    between = whole.total_ns - sum(line.total_ns for line in lines.values())
    if between <= 0:
        return []
    share = format_percent(between, whole.total_ns)
    return [f"Between ops, in Python and PyTorch's dispatch: {_time(between)} ({share} of the time)."]


def describe_subject(about: Mapping[str, str]) -> str:
    """Return the model, its inputs and the device of a profile."""
    subject = plain_name(about.get("model", "")) or "A program"
    subject += f" on {plain_name(about['inputs'])}" if about.get("inputs") else ""
    return subject + (f", on {plain_name(about['device'])}" if about.get("device") else "")


def _describe_run(measured: Profile, whole: ProfileRow, phase: str | None) -> Iterator[str]:
    about = measured.about
    how = about.get("averaged", "one run")
    if int(about.get("warmup", 0)):
        how += f" after {format_quantity(int(about['warmup']), 'warm-up run')}"
    if "steps" in about:
        how += f", active among {format_thousands(int(about['steps']))} steps"
    if "time" in measured.columns:
        how += f", {format_seconds(whole.total_ns / 1e9)}{f' in the {phase} phase' if phase else ''}"
    factor = about.get("multiply_add", "?")
    counted = f"Counted by {plain_name(about.get('table', '?'))}: a MAC is {factor} FLOP{'' if factor == '1' else 's'}."
    yield f"{_sentence(how)} {counted}"
    if "overhead_ns" in about:
        lost, per_op = (int(about[key]) / 1e9 for key in ("overhead_ns", "overhead_ns_per_op"))
        # Where other modes were on all the time the overhead per op was not sampled.
        each = f", {format_seconds(per_op)} per op" if per_op else ""
        yield f"Profiling overhead ({format_seconds(lost)}{each}) is subtracted."
    if about.get("clocked"):
        yield f"Modules' forward times are from {about['clocked']} more, without per-op instrumentation."
    if "compiled" in about:
        yield _sentence(about["compiled"])


def _explain(measured: Profile, by: str, phase: str | None) -> Iterator[str]:
    phases = measured.phases if phase is None else (phase,)
    if "time" in measured.columns:
        yield (
            f"time:FLOPs is a row's share of the time divided by its share of the FLOPs: slow is {FACTOR} or more, "
            f"fast 1/{FACTOR} or less, where the shares differ by {EXCESS:.0%} of the whole or more. Slow rows are "
            f"often memory-bound (low FLOP/byte), many small calls, or Python{' (high self)' * (by == 'module')}."
        )
        if by == "module":
            yield from _explain_modules(measured, phases)
    if measured.peaks:
        yield (
            f"roofline is the least time of {plain_name(measured.peaks)} for the FLOPs and bytes, divided by the time "
            "measured. Above 100%, caches saved memory traffic, or the run was on another device."
        )
    if "memory" in measured.columns:
        cpu = not measured.about.get("device", "cpu").startswith("cuda")
        what = "the storages that the run allocated" if cpu else "CUDA's allocator"
        yield f"kept and peak are bytes of {what}: still allocated after the calls, and the most during them."


def _explain_modules(measured: Profile, phases: Sequence[str]) -> Iterator[str]:
    text = "self is a module's time without its submodules."
    others = [name for name in phases if name in ("backward", "optimizer")]
    if others:
        text += f" In {' and '.join(others)}, where no module is called, times are those of the module's ops."
    if measured.outside_ns and "forward" in phases:
        outside = format_seconds(measured.outside_ns / 1e9)
        text += f" Ops outside all modules, such as the loss, took {outside}, included in model."
    yield text


def _list_gaps(measured: Profile) -> Iterator[str]:
    """Yield a sentence for each kind of work that is missing from the totals."""
    if measured.unknown:
        table = plain_name(measured.about.get("table", "?"))
        yield f"Unsupported by {table}, so not counted in FLOPs: {_list(measured.unknown)}."
    if measured.unmoved:
        yield f"Unknown memory traffic, so not in bytes: {_list(measured.unmoved)}."
    if measured.without_peak:
        listed = ", ".join(f"{dtype} ({format_short(flops)} FLOPs)" for dtype, flops in measured.without_peak.items())
        yield f"Without a peak on {measured.peaks}, so not in roofline: {listed}."
    for key in ("differed", "broken off"):
        if key in measured.about:
            yield _sentence(measured.about[key])


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _list(calls: Mapping[str, int]) -> str:
    ranked = sorted(calls.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{plain_name(name)} ({format_quantity(count, 'call')})" for name, count in ranked)
