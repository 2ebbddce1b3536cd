"""Table of kernels: torch.profiler's table of events, with modules, FLOPs and FLOP/s."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from operator import attrgetter

from fvflops.formulas import FormulaTable
from fvflops.reports.display_width import text_table
from fvflops.reports.escaping import printable
from fvflops.text import short_repr
from fvflops.trace.kernel_events import KernelLedger, KernelRow
from fvflops.units import flops_to_string, format_percent, format_quantity, format_seconds, format_size

# What rows can be sorted by; torch.profiler's older names with "cuda" for the device are accepted too.
SORTS = (
    *(
        field.name
        for field in fields(KernelRow)
        if field.name.rpartition("_")[2] in ("total", "usage", "count", "macs", "flops")
    ),
    "cpu_time",
    "device_time",
    "flops_per_second",
)
_MAX_ROWS = 40  # of what is printed
_MAX_NAME = 55  # characters
_MAX_OPS = 6  # in one sentence

Column = tuple[str, Callable[[KernelRow], str]]


class KernelAverages(list[KernelRow]):
    """The rows of a profile's events, and their table.

    >>> row = KernelRow("aten::mm", count=2, cpu_time_total=100, self_cpu_time_total=100, macs=1000, flops=2000)
    >>> print(KernelAverages([row]))
    Name      Self CPU %  Self CPU  CPU total %  CPU total  CPU time avg  # of Calls  MACs  FLOPs     FLOP/s
    --------  ----------  --------  -----------  ---------  ------------  ----------  ----  -----  ---------
    aten::mm      100.0%    100 µs       100.0%     100 µs         50 µs           2    1K     2K  20 MFLOPS
    --------  ----------  --------  -----------  ---------  ------------  ----------  ----  -----  ---------
    Self CPU time total: 100 µs
    """

    def __init__(self, rows: Iterable[KernelRow], header: str = "") -> None:
        super().__init__(rows)
        self._header = header

    def __repr__(self) -> str:
        return short_repr(self, format_quantity(len(self), "row"), self._header.partition("\n")[0])

    def __str__(self) -> str:
        return self.table(row_limit=_MAX_ROWS)

    def table(self, sort_by: str | None = None, row_limit: int = 100, header: str | None = None) -> str:
        """Return the first `row_limit` rows as text, with `sort_by` the largest first; -1 shows all.

        `sort_by` is one of torch.profiler's columns, "macs", "flops", "self_macs", "self_flops" or "flops_per_second";
        another raises ValueError. `header` replaces the profile's own summary above the table. Percentages are of the
        time of all rows, and "--" is an unknown value.
        """
        header = self._header if header is None else header
        ranked = list(self) if sort_by is None else sorted(self, key=_sort_key(sort_by), reverse=True)
        visible_rows = ranked if row_limit < 0 else ranked[:row_limit]
        columns = _list_columns(self)
        headings = [name for name, _ in columns]
        left = [index for index, name in enumerate(headings) if name in ("Name", "Module", "Source Location")]
        table = text_table(headings, [[write(row) for _, write in columns] for row in visible_rows], left=left)
        rule = table.split("\n", 2)[1]
        total = sum(row.self_cpu_time_total for row in self)
        device = sum(row.self_device_time_total for row in self if not row.cpu_time_total)
        footer = [f"Self CPU time total: {_time(total)}"] + [f"Self device time total: {_time(device)}"] * bool(device)
        return "\n".join([*([header] if header else []), table, rule, *footer])


def describe_ledger(ledger: KernelLedger, table: FormulaTable) -> list[str]:
    """Return how ops and events were matched, in lines: what differs from a match of all of them.

    >>> from fvflops import load_table
    >>> describe_ledger(KernelLedger(no_op=[("aten::mm", 2), ("aten::view", 1)]), load_table("exact"))
    ['events without FLOPs, since no counted op matches them: aten::mm ×2']
    """
    lines = []
    if ledger.compiled:
        lines.append(
            f"{format_quantity(ledger.compiled, 'op event')} in compiled code, where the FLOPs of fused ops are "
            "attributed to their module or step"
        )
    elif ledger.attributed_to_modules:
        ops = list_calls(ledger.attributed_to_modules)
        where = "attributed to their module or step"
        if ledger.lost_flops:
            where = f"on no event ({format_size(ledger.lost_flops)})"
        lines.append(f"ops without an event, whose FLOPs are {where}: {ops}")
    rows = {name: table.row(name) for name, _ in ledger.no_op}
    unmatched = [
        (name, count) for name, count in ledger.no_op if (row := rows[name]) is None or row.kind != "zero_flop"
    ]
    if unmatched:
        lines.append(f"events without FLOPs, since no counted op matches them: {list_calls(unmatched)}")
    return lines


def list_calls(calls: Iterable[tuple[str, int]]) -> str:
    """Return the most frequent calls as text."""
    ops = [f"{name} ×{count}" for name, count in calls]
    more = f" and {len(ops) - _MAX_OPS} more" if len(ops) > _MAX_OPS else ""
    return ", ".join(ops[:_MAX_OPS]) + more


def _sort_key(sort_by: str) -> Callable[[KernelRow], float]:
    name = sort_by.replace("cuda", "device").replace("xpu", "device")
    if name not in SORTS:
        raise ValueError(f"sort_by must be one of {', '.join(SORTS)}; got {sort_by!r}")
    value_of = attrgetter(name)
    return lambda row: -1 if value_of(row) is None else value_of(row)


def _list_columns(rows: Sequence[KernelRow]) -> list[Column]:
    cpu = round(sum(row.self_cpu_time_total for row in rows) * 1000)
    device = round(sum(row.self_device_time_total for row in rows if not row.cpu_time_total) * 1000)
    columns: list[Column] = [("Name", lambda row: _truncate(row.key))]
    if any(row.module is not None for row in rows):
        columns.append(("Module", lambda row: _truncate(row.module or "(model)")))
    columns += [
        ("Self CPU %", lambda row: format_percent(round(row.self_cpu_time_total * 1000), cpu)),
        ("Self CPU", lambda row: _time(row.self_cpu_time_total)),
        ("CPU total %", lambda row: format_percent(round(row.cpu_time_total * 1000), cpu)),
        ("CPU total", lambda row: _time(row.cpu_time_total)),
        ("CPU time avg", lambda row: _time(row.cpu_time)),
    ]
    if any(row.device_time_total for row in rows):
        columns += [
            ("Self device", lambda row: _time(row.self_device_time_total)),
            ("Self device %", lambda row: format_percent(round(row.self_device_time_total * 1000), device)),
            ("Device total", lambda row: _time(row.device_time_total)),
            ("Device time avg", lambda row: _time(row.device_time)),
        ]
    if any(row.cpu_memory_usage or row.self_cpu_memory_usage for row in rows):
        columns += [
            ("CPU Mem", lambda row: _bytes(row.cpu_memory_usage)),
            ("Self CPU Mem", lambda row: _bytes(row.self_cpu_memory_usage)),
        ]
    if any(row.device_memory_usage or row.self_device_memory_usage for row in rows):
        columns += [
            ("Device Mem", lambda row: _bytes(row.device_memory_usage)),
            ("Self device Mem", lambda row: _bytes(row.self_device_memory_usage)),
        ]
    columns += [
        ("# of Calls", lambda row: str(row.count)),
        ("MACs", lambda row: "--" if row.macs is None else format_size(row.macs)),
        ("FLOPs", lambda row: "--" if row.flops is None else format_size(row.flops)),
        ("FLOP/s", lambda row: "--" if row.flops_per_second is None else flops_to_string(row.flops_per_second)),
    ]
    if any(row.input_shapes for row in rows):
        columns.append(("Input Shapes", lambda row: row.input_shapes[:80]))
    if any(row.stack for row in rows):
        columns.append(("Source Location", lambda row: " < ".join(map(_truncate, row.stack))))
    return columns


def _truncate(name: str) -> str:
    name = printable(name)
    return name if len(name) <= _MAX_NAME else name[: _MAX_NAME - 3] + "..."


def _time(microseconds: float) -> str:
    if not microseconds:
        return "0"
    # torch.profiler's self time of a Python function that begins in one event and ends in another is negative.
    return ("-" if microseconds < 0 else "") + format_seconds(abs(microseconds) / 1e6)


def _bytes(count: int) -> str:
    return f"{format_size(count)}B"
