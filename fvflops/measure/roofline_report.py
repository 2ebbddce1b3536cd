"""Report of a roofline: least time, bound, FLOPs and bytes by module, operator or op, and the peaks of the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

from fvflops.measure.op_roofline import Load, Roofline
from fvflops.reports.document import Document, Part, Table, Value, module_column, number_column, text_column
from fvflops.reports.escaping import list_ops, plain_name
from fvflops.trace.module_tree import innermost
from fvflops.units import format_percent, format_quantity, format_ratio, format_seconds, format_short, format_thousands
from fvflops.views.summary_rows import check_view, depth_of

VIEWS = ("module", "operator", "op")
DEPTH = 3  # levels of modules below the root
SHOWN = 20  # ops, those with the longest time


_percent = partial(format_percent, whole=1)
_LOAD = (
    number_column("seconds", "least time", form=format_seconds),
    number_column("share", form=_percent),
    text_column("bound"),
    replace(number_column("flops", "FLOPs"), hide_order=1),
    replace(number_column("bytes"), hide_order=1),
    replace(number_column("intensity", "FLOP/byte", form=format_ratio), hide_order=1),
)
_CALLS = number_column("calls", form=format_thousands)
_OP = (
    text_column("op", form=lambda op: op.removeprefix("aten::")),
    text_column("module", form=lambda name: name or "model"),
    text_column("dtype"),
    replace(_CALLS, hide_order=2),
)
_PEAKS = (
    text_column("dtype"),
    number_column("peak", "FLOP/s"),
    number_column("bandwidth", "bytes/s"),
    number_column("ridge", "ridge FLOP/byte", form=format_ratio),
)


def roofline_report(roofline: Roofline, *, by: str = "module", depth: int | None = None, subject: str = "") -> Document:
    """Return the least time of each module, operator or op on a device, with the device's peaks.

    `by` is "module" (down to `depth` levels, 3 if None), "operator", or "op" for the calls of one signature in one
    module and phase, those with the longest time first. `subject` names the model. An unknown view raises ValueError.
    """
    check_view(by, VIEWS, "the roofline")
    total = roofline.total()
    table = _tabulate(roofline, total, by, DEPTH if depth is None else depth)
    parts: list[Part] = [
        table,
        _describe_convention(roofline, total),
        "\n".join([_describe_total(total), *_list_gaps(roofline)]),
    ]
    if roofline.peaks:
        ranked = sorted(roofline.peaks.items(), key=lambda item: -item[1])
        rows = [(dtype, peak, roofline.bandwidth, roofline.ridge(dtype)) for dtype, peak in ranked]
        parts.append(Table("peaks", _PEAKS, rows, title=f"Peaks of {roofline.device}", noun="dtype"))
    title = (
        f"{subject or 'Roofline'} on {roofline.device}: at least {format_seconds(total.seconds)}, {total.bound}-bound"
    )
    return Document("roofline", title, parts, main=table.name)


def _describe_convention(roofline: Roofline, total: Load) -> str:
    factor = format_quantity(roofline.multiply_add, "FLOP")
    text = f"Convention: {plain_name(roofline.table)} ({factor} per multiply-add)."
    if roofline.multiply_add == 2 or roofline.convention_flops == total.flops:
        return text
    counted, shown = format_short(roofline.convention_flops), format_short(total.flops)
    return f"{text[:-1]}: {counted} FLOPs. A roofline has 2 per multiply-add, as peaks do: {shown} FLOPs."


def _tabulate(roofline: Roofline, total: Load, by: str, depth: int) -> Table:
    rows: list[tuple[Value, ...]]
    if by == "module":
        loads = roofline.by_module().items()
        rows = [(name, *_list_values(load, total)) for name, load in loads if depth_of(name) <= depth and load.seconds]
        return Table("modules", (module_column(), *_LOAD), rows, noun="module")
    if by == "operator":
        rows = [
            (name, load.calls, *_list_values(load, total))
            for name, load in roofline.by_operator().items()
            if load.seconds
        ]
        total_row = ("total", total.calls, *_list_values(total, total))
        return Table("operators", (text_column("operator"), _CALLS, *_LOAD), rows, total=total_row, noun="operator")
    rows = [
        (entry.op, innermost(entry.scope), entry.dtype, entry.load.calls, *_list_values(entry.load, total))
        for entry in sorted(roofline.entries, key=lambda entry: -entry.load.seconds)
    ]
    return Table("ops", (*_OP, *_LOAD), rows, noun="op")


def _list_values(load: Load, total: Load) -> tuple[Value, ...]:
    share = load.seconds / total.seconds if total.seconds else None
    return (load.seconds, share, load.bound, load.flops, load.bytes, load.intensity)


def _describe_total(total: Load) -> str:
    share = format_percent(total.compute_bound, total.seconds) or "0.0%"
    return (
        f"Least time: {format_seconds(total.seconds)}, {share} of it compute-bound. Each op takes the longer of "
        "FLOPs/peak and bytes/bandwidth, and ops run one after the other. Assumes no cache reuse or fusion; kernel "
        "launch overhead excluded."
    )


def _list_gaps(roofline: Roofline) -> Iterator[str]:
    """Yield a sentence for each kind of work that is missing from the totals."""
    if roofline.unsupported:
        yield f"Unsupported by {roofline.table}, so not in FLOPs: {list_ops(_rank(roofline.unsupported))}."
    if roofline.unknown_traffic:
        yield f"Unknown memory traffic, so not in bytes: {list_ops(_rank(roofline.unknown_traffic))}."
    if roofline.without_peak:
        ranked = _rank(roofline.without_peak).items()
        dtypes = ", ".join(f"{plain_name(dtype)} ({format_short(flops)} FLOPs)" for dtype, flops in ranked)
        yield f"Without a peak on {roofline.device}, so not in the least time: {dtypes}."


def _rank(counts: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
