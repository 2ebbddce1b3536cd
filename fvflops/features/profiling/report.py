"""The measured table: what modules or operators took, beside what they come to, and where the two do not match."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from fvflops.features.profiling.model import EXCESS, FACTOR, Profile, ProfileRow, outlier, time_flop_ratio
from fvflops.reports import names
from fvflops.reports.text.display_width import wrap_notes
from fvflops.reports.text.text_table import text_table
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
BETWEEN = "(between ops)"  # what Python and PyTorch do from one op to the next


class Sort(NamedTuple):
    """An order of lines, largest first: by what, and which of the measured columns it needs ("" for none)."""

    key: Callable[[ProfileRow, ProfileRow], float]
    needs: str = ""


SORTS: Mapping[str, Sort] = {
    "time": Sort(lambda line, _: line.total_ns, "time"),
    "self": Sort(lambda line, _: line.own_ns, "time"),
    "calls": Sort(lambda line, _: line.calls),
    "flops": Sort(lambda line, _: line.flops),
    "rate": Sort(lambda line, _: line.flops_per_second, "time"),
    "bytes": Sort(lambda line, _: line.bytes),
    "intensity": Sort(lambda line, _: line.intensity),
    "roofline": Sort(lambda line, _: line.roofline_share, "peaks"),
    "memory": Sort(lambda line, _: line.kept or 0, "memory"),
    "peak": Sort(lambda line, _: line.peak or 0, "memory"),
    "mismatch": Sort(lambda line, whole: time_flop_ratio(line, whole) or 0, "time"),
    "name": Sort(lambda line, _: 0),
}
_NEEDED = {
    "time": "time was not measured: measure={'time'}",
    "memory": "memory was not measured: measure={'memory'}",
    "peaks": "no device was named whose peaks to take",
}


def render(
    measured: Profile,
    *,
    by: str = "module",
    phase: str | None = None,
    depth: int | None = None,
    sort: str | None = None,
    top: int | None = None,
) -> str:
    """Return a measured run as text: what was measured, a table, and what its columns say.

    `by` is "module" or "operator"; `phase` one phase, all if None. Modules stand in the order of the model down to
    `depth` levels below the root, 2 if None, and below that where their time does not match their FLOPs. With `sort`,
    one of SORTS, or `top` they stand in one list, those with most first, and `top` of them are shown. An unknown view,
    phase or order raises ValueError, one for which nothing was recorded TraceError or ValueError.
    """
    check_view(by, VIEWS, "the measured table")
    whole = measured.whole(phase)
    lines = measured.module_lines(phase) if by == "module" else measured.operator_lines(phase)
    if by == "module" and depth is not None and (sort or top):
        lines = {name: line for name, line in lines.items() if depth_of(name) <= depth}
    in_order = by == "module" and sort is None and top is None
    limit = DEPTH if depth is None else depth
    shown = _cut(lines, whole, limit) if in_order else _rank(lines, whole, measured, sort, top)
    columns = _choose_columns(measured, by, phase)
    rows = [
        (_name(name, by, in_order), *(column.write(name, line, whole) for column in columns))
        for name, line in shown.items()
    ]
    if by == "operator":
        rows += _add_up_operators(lines, whole, columns)
    table = text_table([by, *(column.head for column in columns)], rows)
    head = [_describe_run(measured, whole, phase), *_describe_counting(measured)]
    hidden = f"{format_quantity(len(lines) - len(shown), by)} more{f' below depth {limit}' if in_order else ''}."
    foot = [*([hidden] if len(lines) > len(shown) else []), *_explain(measured, by, phase), *missing_figures(measured)]
    return "\n\n".join([wrap_notes(head), table, wrap_notes(foot)])


def missing_figures(measured: Profile) -> Iterator[str]:
    """Yield what is missing from the figures, a sentence each."""
    table = measured.about.get("table", "?")
    if measured.unknown:
        yield f"UNKNOWN to the table {table}, so missing where a + follows: {_list(measured.unknown)}."
    if measured.unmoved:
        yield f"Of UNKNOWN bytes: {_list(measured.unmoved)}."
    if measured.without_peak:
        named = ", ".join(f"{dtype} ({format_short(flops)} FLOPs)" for dtype, flops in measured.without_peak.items())
        yield f"Not in the roofline's times, as {measured.peaks} has no peak for it: {named}."
    for key in ("differed", "broken off"):
        if key in measured.about:
            yield _sentence(measured.about[key])


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _list(calls: Mapping[str, int]) -> str:
    ranked = sorted(calls.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{names.printable_short(name)} ({format_quantity(count, 'call')})" for name, count in ranked)


def _name(name: str, by: str, in_order: bool) -> str:
    if by == "operator":
        return names.printable_short(name)
    return " " * (depth_of(name) if in_order else 0) + (names.printable_short(name) or "model")


class _Column(NamedTuple):
    """A column: its head, and what it says of a line, given its name and the line of the whole."""

    head: str
    write: Callable[[str, ProfileRow, ProfileRow], str]
    adds_up: bool = True


def _choose_columns(measured: Profile, by: str, phase: str | None) -> list[_Column]:
    columns = [_Column("calls", lambda _, line, __: format_thousands(line.calls) if line.calls else "")]
    timed, several = "time" in measured.columns, phase is None and len(measured.phases) > 1
    if timed:
        if by == "module":
            columns.append(_Column("self", lambda _, line, __: _time(line.own_ns)))
        columns += [
            _Column("time", lambda _, line, __: _time(line.total_ns)),
            _Column("% time", lambda _, line, whole: format_percent(line.total_ns, whole.total_ns)),
        ]
        columns += [_phase_column(measured, by, name) for name in (measured.phases if several else ())]
    columns += [
        _Column("FLOPs", lambda _, line, __: format_short(line.flops) + "+" * bool(line.unknown)),
        _Column("% FLOPs", lambda _, line, whole: format_percent(line.flops, whole.flops)),
    ]
    if timed:
        columns.append(_Column("time:FLOPs", lambda _, line, whole: _compare(line, whole), adds_up=False))
        columns.append(_Column("FLOP/s", lambda _, line, __: format_short(line.flops_per_second)))
    columns += [
        _Column("read", lambda _, line, __: format_short(line.read) + "+" * bool(line.unmoved)),
        _Column("written", lambda _, line, __: format_short(line.written) + "+" * bool(line.unmoved)),
        _Column("FLOP/byte", lambda _, line, __: format_ratio(line.intensity) if line.bytes else ""),
    ]
    if timed and measured.peaks:
        columns.append(_Column("roofline", lambda _, line, __: _share(line.roofline_share)))
    if "memory" in measured.columns:
        columns += [
            _Column("kept", lambda _, line, __: "" if line.kept is None else format_short(line.kept)),
            _Column("peak", lambda _, line, __: "" if line.peak is None else format_short(line.peak)),
        ]
    return columns


def _phase_column(measured: Profile, by: str, phase: str) -> _Column:
    lines = (measured.by_module if by == "module" else measured.by_operator).get(phase, {})
    whole = measured.whole(phase)

    def write(name: str, line: ProfileRow, _: ProfileRow) -> str:
        found = lines.get(name) if by == "module" or name else whole
        return _time(found.total_ns) if found is not None else ""

    return _Column(phase, write)


def _time(nanoseconds: int) -> str:
    return format_seconds(nanoseconds / 1e9) if nanoseconds else "0"


def _share(share: float) -> str:
    return format_percent(round(share * 10**9), 10**9) if share else ""


def _compare(line: ProfileRow, whole: ProfileRow) -> str:
    """Return how a line's share of the time compares with that of the FLOPs; of no FLOPs only where that is much."""
    ratio, mark = time_flop_ratio(line, whole), outlier(line, whole)
    text = "" if ratio is None or not (line.flops or mark) else format_ratio(ratio)
    return f"{text} {mark:<4}"


def _rank(
    lines: Mapping[str, ProfileRow], whole: ProfileRow, measured: Profile, sort: str | None, top: int | None
) -> dict[str, ProfileRow]:
    check_top(top)
    sort = sort or ("time" if "time" in measured.columns else "flops")
    chosen = SORTS[check_sort(sort, SORTS)]
    if chosen.needs and not (chosen.needs in measured.columns or (chosen.needs == "peaks" and measured.peaks)):
        raise ValueError(f"nothing can be sorted by {sort!r}: {_NEEDED[chosen.needs]}")
    ranked = sorted(lines.items(), key=lambda item: (-chosen.key(item[1], whole), item[0]))
    return dict(ranked[:top])


def _cut(lines: Mapping[str, ProfileRow], whole: ProfileRow, depth: int) -> dict[str, ProfileRow]:
    """Return the lines down to a depth, and below that those that stand out."""
    return {name: line for name, line in lines.items() if depth_of(name) <= depth or outlier(line, whole)}


def _add_up_operators(
    lines: Mapping[str, ProfileRow], whole: ProfileRow, columns: Sequence[_Column]
) -> Iterator[tuple[str, ...]]:
    """Yield a row for the time in which no op ran, where there is any, and that of the whole."""
    between = whole.total_ns - sum(line.total_ns for line in lines.values())
    if between > 0:
        cells = {"time": _time(between), "% time": format_percent(between, whole.total_ns)}
        yield (BETWEEN, *(cells.get(column.head, "") for column in columns))
    yield ("total", *(column.write("", whole, whole) if column.adds_up else "" for column in columns))


def _describe_run(measured: Profile, whole: ProfileRow, phase: str | None) -> str:
    about = measured.about
    subject = names.printable_short(about.get("model", "")) or "A program"
    subject += f" on {names.printable_short(about['inputs'])}" if about.get("inputs") else ""
    subject += f", on {names.printable_short(about['device'])}" if about.get("device") else ""
    how = about.get("averaged", "one run")
    if int(about.get("warmup", 0)):
        how += f" after {format_thousands(int(about['warmup']))} to warm up"
    if "steps" in about:
        how += f", active among {format_thousands(int(about['steps']))} steps"
    text = f"{subject}: {how}"
    if "time" in measured.columns:
        text += f", {format_seconds(whole.total_ns / 1e9)}{f' in the phase {phase}' if phase else ''}"
    return f"{text}."


def _describe_counting(measured: Profile) -> Iterator[str]:
    about = measured.about
    factor = {"1": "one", "2": "two"}.get(about.get("multiply_add", ""), about.get("multiply_add", "?"))
    yield f"FLOPs by the table {names.printable(about.get('table', '?'))}, in which a multiply-add is {factor}."
    if "overhead_ns" in about:
        lost, per_op = (int(about[key]) / 1e9 for key in ("overhead_ns", "overhead_ns_per_op"))
        # Where other modes were on all the time the way was not sampled.
        way = f", and the way from Python to an op and back {format_seconds(per_op)}" if per_op else ""
        yield f"Watching took {format_seconds(lost)} more{way}: that is subtracted from the times."
    if about.get("clocked"):
        yield f"What modules take forward is of {about['clocked']} more, in which no op was watched."
    if "compiled" in about:
        yield _sentence(about["compiled"])


def _explain(measured: Profile, by: str, phase: str | None) -> Iterator[str]:
    phases = measured.phases if phase is None else (phase,)
    if "time" in measured.columns:
        yield (
            f"time:FLOPs is a line's share of the time by its share of the FLOPs. Lines with {FACTOR} times as much or "
            f"more are marked slow, with half as much or less fast, if {EXCESS:.0%} of the whole or more lies between. "
            "Slow lines often wait for memory (few FLOP/byte), are many small calls, or run in Python (time in self)."
        )
        if by == "module":
            yield from _explain_modules(measured, phases)
    if measured.peaks:
        yield (
            f"roofline is the least time that {names.printable(measured.peaks)} needs for the FLOPs and bytes, by the "
            "time taken. Above 100% caches have saved bytes, or it is another device."
        )
    if "memory" in measured.columns:
        cpu = not measured.about.get("device", "cpu").startswith("cuda")
        what = "storages that the run made" if cpu else "CUDA's allocator"
        yield f"kept and peak are bytes of {what}: what was left behind, and the most that was held meanwhile."


def _explain_modules(measured: Profile, phases: Sequence[str]) -> Iterator[str]:
    text = "self is a module's time without the modules inside it."
    others = [name for name in phases if name in ("backward", "optimizer")]
    if others:
        text += f" In {' and '.join(others)}, where no module is called, times are those of the ops that belong to it."
    if measured.outside_ns and "forward" in phases:
        text += (
            f" Ops outside of all modules, such as the loss, took {format_seconds(measured.outside_ns / 1e9)}: "
            "they are in model."
        )
    yield text
