"""Report of a profile: time and memory of modules or operators, their FLOPs and bytes, and mismatches of both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Annotated, Any, NamedTuple, TypedDict

from fvflops.measure.profile_rows import EXCESS, FACTOR, Profile, ProfileRow, outlier, time_flop_ratio
from fvflops.reports.document import Column, Document, Part, Table, Value, module_column, number_column, text_column
from fvflops.reports.escaping import list_ops, plain_name
from fvflops.text import Unpack, explaining_arguments
from fvflops.trace import PHASES
from fvflops.units import format_percent, format_quantity, format_ratio, format_seconds, format_short, format_thousands
from fvflops.views.ranking import check_sort, check_top
from fvflops.views.summary_rows import check_view, depth_of

VIEWS = ("module", "operator")
DEPTH = 2  # levels of modules below the root

# Sort key → the requirement of its column: a measured column, a device's peaks, or "" for nothing.
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
    "peaks": "name a device, for its peaks",
}


class RowOptions(TypedDict, total=False):
    """Options of a profile's rows, as `ProfileAnalysis.table` describes them."""

    by: Annotated[str, "module"]
    phase: Annotated[str | None, None]
    depth: Annotated[int | None, None]
    sort: Annotated[str | None, None]
    top: Annotated[int | None, None]


@explaining_arguments
def profile_report(measured: Profile, **options: Unpack[RowOptions]) -> Document:
    """Return the report of a measured run, with times in ns."""
    by, phase, depth, sort, top = options["by"], options["phase"], options["depth"], options["sort"], options["top"]
    check_view(by, VIEWS, "the profile")
    check_top(top)
    total = measured.total(phase)
    rows = measured.module_rows(phase) if by == "module" else measured.operator_rows(phase)
    in_order = by == "module" and sort is None and top is None
    sort = None if in_order else _choose_sort(measured, by, sort)
    shown, notes = rows, [] if by == "module" else _note_between(rows, total)
    if by == "module" and (in_order or depth is not None):
        limit = DEPTH if depth is None else depth
        shown = {
            name: row for name, row in rows.items() if depth_of(name) <= limit or (in_order and outlier(row, total))
        }
        if in_order and len(shown) < len(rows):
            notes.append(f"{format_quantity(len(rows) - len(shown), f'more {by}')} below depth {limit}.")
    columns = _choose_columns(measured, by, phase)
    in_all = _RowContext("", total, total)
    table = Table(
        f"{by}s",
        [module_column() if by == "module" else _OPERATOR, *(column for column, _ in columns)],
        [(name, *(value(_RowContext(name, row, total)) for _, value in columns)) for name, row in shown.items()],
        total=None if by == "module" else ["total", *(value(in_all) for _, value in columns)],
        notes=notes,
        noun=by,
    )
    parts: list[Part] = ["\n".join(_describe_run(measured)), table.ranked(sort=sort, top=top)]
    parts += ["\n".join([_describe_convention(measured, total), *_explain(measured, by, phase), *_list_gaps(measured)])]
    title = describe_subject(measured.about)
    if "time" in measured.columns:
        title += f": {format_seconds(total.total_ns / 1e9)}{f' in the {phase} phase' if phase else ''}"
    return Document("profile", title, parts, main=table.name)


def check_profile_sort(sort: str) -> None:
    check_sort(sort, [*SORTS, *(phase for phase in PHASES if phase not in SORTS)])


class _RowContext(NamedTuple):
    """A row of a profile with its name, and the sum of all rows."""

    name: str
    row: ProfileRow
    total: ProfileRow


# A column, and the function that returns its value in a row.
_ReportColumn = tuple[Column, Callable[[_RowContext], Value]]


def _choose_columns(measured: Profile, by: str, phase: str | None) -> list[_ReportColumn]:
    """Return the columns, the most important first."""
    timed, memory = "time" in measured.columns, "memory" in measured.columns
    phases = measured.phases if timed and phase is None and len(measured.phases) > 1 else ()
    known: list[tuple[object, Column, Callable[[_RowContext], Value]]] = [
        (True, number_column("calls", form=_calls), attrgetter("row.calls")),
        (timed, number_column("time", form=_time), attrgetter("row.total_ns")),
        (timed, _TIME_SHARE, lambda item: _share(item.row.total_ns, item.total.total_ns)),
        (timed and measured.peaks, _ROOFLINE, lambda item: item.row.roofline_share or None),
        (timed and by == "module", number_column("self", form=_time), attrgetter("row.self_ns")),
        *((True, *_phase_column(measured, by, name)) for name in phases),
        (True, number_column("flops", "FLOPs"), attrgetter("row.flops")),
        (measured.unsupported, _UNSUPPORTED, attrgetter("row.unsupported")),
        (timed, number_column("rate", "FLOP/s"), attrgetter("row.flops_per_second")),
        (timed, _MISMATCH, _compare),
        (timed, text_column("mark"), lambda item: outlier(item.row, item.total)),
        (True, number_column("bytes"), attrgetter("row.bytes")),
        (measured.unknown_traffic, _UNKNOWN_BYTES, attrgetter("row.unknown_traffic")),
        (True, _INTENSITY, lambda item: item.row.intensity if item.row.bytes else None),
        (memory, number_column("memory", "retained"), attrgetter("row.retained")),
        (memory, number_column("peak"), attrgetter("row.peak")),
        (True, _FLOP_SHARE, lambda item: _share(item.row.flops, item.total.flops)),
        (True, number_column("read"), attrgetter("row.read")),
        (True, number_column("written"), attrgetter("row.written")),
    ]
    columns = [(column, value) for applies, column, value in known if applies]
    columns += [_in_seconds(column, value) for column, value in columns if column.form is _time]
    return [(replace(column, hide_order=int(column.key in _OPTIONAL)), value) for column, value in columns]


def _in_seconds(column: Column, value_of: Callable[[_RowContext], Any]) -> _ReportColumn:
    """Return a column of nanoseconds in seconds, the unit that other reports' keys name, for CSV and JSON."""

    def value(item: _RowContext) -> float | None:
        nanoseconds = value_of(item)
        return None if nanoseconds is None else nanoseconds / 1e9

    key = "seconds" if column.key == "time" else f"{column.key}_seconds"
    return number_column(key, only_for="data"), value


def _phase_column(measured: Profile, by: str, phase: str) -> _ReportColumn:
    rows = (measured.by_module if by == "module" else measured.by_operator).get(phase, {})
    total = measured.total(phase)

    def value(item: _RowContext) -> int | None:
        row = total if item.row is item.total else rows.get(item.name)
        return None if row is None else row.total_ns

    return number_column(phase, form=_time), value


def _calls(count: int) -> str:
    return format_thousands(count) if count else ""


def _time(nanoseconds: int) -> str:
    return format_seconds(nanoseconds / 1e9) if nanoseconds else "0"


_OPERATOR = text_column("operator", form=lambda op: op.removeprefix("aten::"))
_TIME_SHARE = number_column("share", "% time", form=format_percent)
_FLOP_SHARE = number_column("flops_share", "% FLOPs", form=format_percent)
_ROOFLINE = number_column("roofline", form=format_percent)
_MISMATCH = number_column("mismatch", "time:FLOPs", form=format_ratio)
_INTENSITY = number_column("intensity", "FLOP/byte", form=format_ratio)
_UNSUPPORTED = number_column("unsupported", form=_calls)
_UNKNOWN_BYTES = number_column("unknown_bytes", "unknown bytes", form=_calls)


def _share(part: int, total: int) -> float | None:
    return part / total if total else None


def _compare(item: _RowContext) -> float | None:
    """Return the share of the time divided by the share of the FLOPs; without FLOPs only for a slow row."""
    row, total = item.row, item.total
    return time_flop_ratio(row, total) if row is not total and (row.flops or outlier(row, total)) else None


def _choose_sort(measured: Profile, by: str, sort: str | None) -> str:
    if sort is None:
        return "time" if "time" in measured.columns else "flops"
    check_profile_sort(sort)
    needs = SORTS.get(sort, "time")
    if needs and not (needs in measured.columns or (needs == "peaks" and measured.peaks)):
        raise ValueError(f"cannot sort by {sort!r}: {_NEEDED[needs]}")
    return "time" if sort == "self" and by == "operator" else sort  # an operator has no nested rows


def _note_between(rows: Mapping[str, ProfileRow], total: ProfileRow) -> list[str]:
    between = total.total_ns - sum(row.total_ns for row in rows.values())
    if between <= 0:
        return []
    share = format_percent(between, total.total_ns)
    return [f"Between ops, in Python and PyTorch's dispatch: {_time(between)} ({share} of the time)."]


def describe_subject(about: Mapping[str, str]) -> str:
    """Return the model, its inputs, the passes and the device of a profile."""
    subject = plain_name(about.get("model", "")) or "A program"
    subject += f" on {plain_name(about['inputs'])}" if about.get("inputs") else ""
    subject += f", {about['passes']}" if about.get("passes") else ""
    return subject + (f", on {plain_name(about['device'])}" if about.get("device") else "")


def _describe_convention(measured: Profile, total: ProfileRow) -> str:
    factor = measured.about.get("multiply_add", "?")
    name = plain_name(measured.about.get("table", "?"))
    text = f"Convention: {name} ({factor} FLOP{'' if factor == '1' else 's'} per multiply-add)."
    if factor == "2" or total.hardware_flops == total.flops:
        return text
    shown = f"{format_short(total.hardware_flops)} FLOPs in all"
    return f"{text} FLOP/s, FLOP/byte and roofline have 2 per multiply-add, as peaks do: {shown}."


def _describe_run(measured: Profile) -> Iterator[str]:
    about = measured.about
    runs = about.get("averaged", "one run")
    if int(about.get("warmup", 0)):
        runs += f" after {format_quantity(int(about['warmup']), 'warm-up run')}"
    if "steps" in about:
        runs += f", the active steps among {format_thousands(int(about['steps']))}"
    yield _sentence(runs)
    if "overhead_ns" in about:
        overhead, per_op = (int(about[key]) / 1e9 for key in ("overhead_ns", "overhead_ns_per_op"))
        # With other dispatch modes active during the run, the overhead per op was not sampled.
        each = f", {format_seconds(per_op)} per op" if per_op else ""
        yield f"Profiling overhead ({format_seconds(overhead)}{each}) is subtracted."
    if about.get("clocked"):
        yield f"Modules' forward times are from {about['clocked']} more, without per-op instrumentation."
    if "compiled" in about:
        yield _sentence(about["compiled"])


def _explain(measured: Profile, by: str, phase: str | None) -> Iterator[str]:
    phases = measured.phases if phase is None else (phase,)
    if "time" in measured.columns:
        yield (
            f"time:FLOPs is a row's share of the time divided by its share of the FLOPs: slow is {FACTOR} or more, "
            f"fast 1/{FACTOR} or less, where the shares differ by {EXCESS:.0%} of the total or more. Slow rows are "
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
        cuda = measured.about.get("device", "cpu").startswith("cuda")
        what = "CUDA's allocator" if cuda else "the storages that the run allocated"
        yield f"retained and peak are bytes of {what}: still allocated after the calls, and the most during them."


def _explain_modules(measured: Profile, phases: Sequence[str]) -> Iterator[str]:
    text = "self is a module's time without its submodules."
    if "backward" in phases:
        text += " In backward, where no module is called, times add up the module's ops."
    if "optimizer" in phases:
        text += " The optimizer step is included in model only."
    if measured.outside_ns and "forward" in phases:
        outside = format_seconds(measured.outside_ns / 1e9)
        text += f" Ops outside all modules, such as the loss, took {outside}, included in model."
    yield text


def _list_gaps(measured: Profile) -> Iterator[str]:
    """Yield a sentence for each kind of work that is missing from the totals."""
    if measured.unsupported:
        table = plain_name(measured.about.get("table", "?"))
        yield f"Unsupported by {table}, so not counted in FLOPs: {_list(measured.unsupported)}."
    if measured.unknown_traffic:
        yield f"Unknown memory traffic, so not in bytes: {_list(measured.unknown_traffic)}."
    if measured.without_peak:
        listed = ", ".join(f"{dtype} ({format_short(flops)} FLOPs)" for dtype, flops in measured.without_peak.items())
        yield f"Without a peak on {measured.peaks}, so not in roofline: {listed}."
    for key in ("differed", "broken off"):
        if key in measured.about:
            yield _sentence(measured.about[key])


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _list(calls: Mapping[str, int]) -> str:
    return list_ops(dict(sorted(calls.items(), key=lambda item: (-item[1], item[0]))))
