"""The roofline report: FLOPs, bytes, what bounds them on a device, and the least time, by module, operator or op."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from textwrap import wrap

from fvflops.features.roofline.model import Load, Roofline
from fvflops.reports import names
from fvflops.reports.text.pipe_table import pipe_table
from fvflops.trace.module_tree import innermost
from fvflops.units import format_percent, format_quantity, format_ratio, format_seconds, format_size
from fvflops.views.summary_rows import check_view, depth_of

VIEWS = ("module", "operator", "op")
DEPTH = 3  # levels of modules below the root
SHOWN = 20  # ops, those with the longest time
_WIDTH = 100
_HEADS = ("FLOPs", "bytes", "FLOP/byte", "bound", "least time", "share")


def render(roofline: Roofline, *, by: str = "module", depth: int | None = None, shown: int = SHOWN) -> str:
    """Return the roofline as text: what the device can do, a table, and what the times leave out.

    `by` is "module" (down to `depth` levels, 3 if None), "operator", or "op": the `shown` calls of one signature in one
    module that take longest. An unknown view, and less than one to show, raise ValueError.
    """
    check_view(by, VIEWS, "the roofline")
    if shown < 1:
        raise ValueError(f"{shown} ops cannot be shown: take 1 or more")
    total = roofline.total()
    if by == "module":
        table = _draw_modules(roofline, total, DEPTH if depth is None else depth)
    else:
        table = _draw_operators(roofline, total) if by == "operator" else _draw_ops(roofline, total, shown)
    sentences = [_tell_device(roofline), _tell_total(total), *_tell_gaps(roofline)]
    head, *rest = ("\n".join(wrap(names.printable(sentence), _WIDTH)) for sentence in sentences)
    return "\n\n".join([head, table, "\n".join(rest)])


def _draw_modules(roofline: Roofline, total: Load, depth: int) -> str:
    rows = [
        (" " * depth_of(name) + (names.printable_short(name) or "model"), *_cells(load, total))
        for name, load in roofline.by_module().items()
        if depth_of(name) <= depth and load.seconds
    ]
    return pipe_table(("module", *_HEADS), rows)


def _draw_operators(roofline: Roofline, total: Load) -> str:
    loads = {name: load for name, load in roofline.by_operator().items() if load.seconds}
    rows = [(names.printable_short(name), str(load.calls), *_cells(load, total)) for name, load in loads.items()]
    return pipe_table(("operator", "calls", *_HEADS), [*rows, ("total", str(total.calls), *_cells(total, total))])


def _draw_ops(roofline: Roofline, total: Load, shown: int) -> str:
    entries = sorted(roofline.entries, key=lambda entry: -entry.load.seconds)[:shown]
    rows = [
        (
            names.printable_short(entry.op),
            names.printable_short(innermost(entry.scope)) or "model",
            entry.dtype,
            str(entry.load.calls),
            *_cells(entry.load, total),
        )
        for entry in entries
    ]
    return pipe_table(("op", "module", "dtype", "calls", *_HEADS), rows)


def _cells(load: Load, total: Load) -> tuple[str, ...]:
    return (
        format_size(load.flops),
        format_size(load.bytes),
        format_ratio(load.intensity),
        load.bound,
        format_seconds(load.seconds),
        format_percent(load.seconds, total.seconds),  # type: ignore[arg-type]
    )


def _tell_device(roofline: Roofline) -> str:
    peaks = [
        f"{dtype} {format_size(peak)} FLOP/s, ridge at {format_ratio(roofline.ridge(dtype))} FLOP/byte"
        for dtype, peak in sorted(roofline.peaks.items(), key=lambda item: -item[1])
    ]
    return "; ".join([f"{roofline.device}: {format_size(roofline.bandwidth)} bytes/s", *peaks]) + "."


def _tell_total(total: Load) -> str:
    share = format_percent(total.compute_bound, total.seconds) or "0.0%"  # type: ignore[arg-type]
    return (
        "Each op takes the longer of FLOPs/peak and bytes/bandwidth, one after the other: at least "
        f"{format_seconds(total.seconds)}, {share} of it bound by compute. Every op fetches what it reads and "
        "puts back what it writes: caches and fusion save some of that, starting kernels takes more."
    )


def _tell_gaps(roofline: Roofline) -> list[str]:
    gaps: list[tuple[str, Mapping[str, int], Callable[[int], str]]] = [
        (f"UNKNOWN to the table {roofline.table}, so without FLOPs", roofline.unknown, _calls),
        ("Of UNKNOWN bytes", roofline.unmoved, _calls),
        (f"Not in the times, as {roofline.device} has no peak for it", roofline.without_peak, _flops),
    ]
    return [f"{what}: {_list(amounts, say)}." for what, amounts, say in gaps if amounts]


def _list(amounts: Mapping[str, int], say: Callable[[int], str]) -> str:
    ranked: Sequence[tuple[str, int]] = sorted(amounts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{names.printable_short(name)} ({say(amount)})" for name, amount in ranked)


def _calls(count: int) -> str:
    return format_quantity(count, "call")


def _flops(count: int) -> str:
    return f"{format_size(count)} FLOPs"
