"""Roofline of a run on a device: the least time of each op call, its bound, and the report."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from fvflops.capture.errors.model_check import Recorded, trace_of
from fvflops.counting.cost_models import TableCostModel
from fvflops.counting.count_trace import CostModel, RegionCost, count
from fvflops.counting.traffic.byte_costs import TrafficCostModel, split_by_aliasing
from fvflops.counting.traffic.traffic_rules import bytes_in
from fvflops.devices.devices import Device, resolve_device, short_dtype
from fvflops.devices.utilisation import check_float32_matmul, product_dtype
from fvflops.formulas import FormulaTable, OpCost, resolve_table
from fvflops.reports.display import Displayed
from fvflops.reports.document import Document, Part, Table, Value, module_column, number_column, text_column
from fvflops.reports.escaping import list_ops, plain_name
from fvflops.text import explaining_arguments, short_repr, shown_by_fields
from fvflops.trace import Entry, ModuleInfo, ModuleTree, Region, RegionSignature, Signature, Status, Trace
from fvflops.trace.counts import Counts
from fvflops.trace.module_tree import innermost
from fvflops.units import format_percent, format_quantity, format_ratio, format_seconds, format_short, format_thousands
from fvflops.views.summary_rows import check_view, depth_of


@shown_by_fields
class Load(NamedTuple):
    """Work of some op calls, and the least seconds they take on a device, one after the other.

    `flops` are floating-point operations, a multiply-add being 2; `bytes` are read and written. `compute_bound` is the
    part of `seconds` spent in compute-bound calls; the others are memory-bound.
    """

    calls: int = 0
    flops: int = 0
    bytes: int = 0
    seconds: float = 0.0
    compute_bound: float = 0.0

    @property
    def intensity(self) -> float:
        """The arithmetic intensity, FLOP/byte; infinite without memory traffic, 0 without FLOPs."""
        return self.flops / self.bytes if self.bytes else math.inf if self.flops else 0.0

    @property
    def bound(self) -> str:
        """The bound of most of the time: "compute" or "memory", "" if there is none."""
        if not self.seconds:
            return ""
        return "compute" if 2 * self.compute_bound > self.seconds else "memory"


def sum_loads(loads: Iterable[Load]) -> Load:
    columns = list(zip(*loads, strict=True))
    return Load(*map(sum, columns[:3]), *map(math.fsum, columns[3:]))


@shown_by_fields
class Bounded(NamedTuple):
    """The load of all calls of one signature in one scope and phase.

    `scope` has the names of the modules that the calls ran under, root first; `dtype` is the short name of the dtype
    whose peak applies to its matrix products.
    """

    scope: tuple[str, ...]
    phase: str
    op: str
    label: str
    dtype: str
    load: Load


@dataclass(frozen=True, slots=True, repr=False)
class Roofline(Displayed):
    """The bound of each op call of a trace on a device, and the least time that it takes.

    `device` is its name, `bandwidth` in bytes/s, `peaks` in FLOP/s by dtype; `table` is the convention, which counts
    `convention_flops` with `multiply_add` for a MAC; all other FLOPs here have 2, as peaks do.
    `unsupported` is op → calls, `unknown_traffic` op of unknown memory traffic → calls, `without_peak` dtype without a
    peak on the device → FLOPs. The times do not include these.
    """

    _report = "fvflops.measure.op_roofline:roofline_report"

    device: str
    bandwidth: int
    peaks: Mapping[str, int]
    table: str
    modules: ModuleTree
    entries: tuple[Bounded, ...]
    unsupported: Mapping[str, int] = field(default_factory=Counter)
    unknown_traffic: Mapping[str, int] = field(default_factory=Counter)
    without_peak: Mapping[str, int] = field(default_factory=Counter)
    multiply_add: int = 2
    convention_flops: int = 0

    def __repr__(self) -> str:
        seconds = format_seconds(self.total().seconds)
        return short_repr(self, self.modules.root.class_name, f"at least {seconds} on {self.device}")

    def ridge(self, dtype: str) -> float:
        """Return the ridge point of a dtype, FLOP/byte: the intensity above which work is compute-bound."""
        return self.peaks[dtype] / self.bandwidth

    def total(self) -> Load:
        """Return the load of the whole run."""
        return sum_loads(entry.load for entry in self.entries)

    def by_module(self, ancestors: str = "owner") -> dict[str, Load]:
        """Return module name → load, for every module in which an op ran; `ancestors` is as in `Counts`."""
        counts = Counts("bytes", self.modules, ())
        loads = sum_by((name, one.load) for one in self.entries for name in counts.of_scope(one.scope, ancestors))
        return {name: loads[name] for name in self.modules.by_name if name in loads}

    def by_operator(self) -> dict[str, Load]:
        """Return operator label → load, the longest time first."""
        return _by_time((entry.label, entry.load) for entry in self.entries)

    def by_phase(self) -> dict[str, Load]:
        """Return phase → load."""
        return _by_time((entry.phase, entry.load) for entry in self.entries)


def sum_by(items: Iterable[tuple[str, Load]]) -> dict[str, Load]:
    """Return name → the sum of its loads."""
    loads: dict[str, list[Load]] = {}
    for name, load in items:
        loads.setdefault(name, []).append(load)
    return {name: sum_loads(parts) for name, parts in loads.items()}


def _by_time(items: Iterable[tuple[str, Load]]) -> dict[str, Load]:
    return dict(sorted(sum_by(items).items(), key=lambda item: (-item[1].seconds, item[0])))


@explaining_arguments
def roofline(
    recorded: Trace | Recorded,
    *,
    device: str | Device,
    table: str | FormulaTable = "exact",
    dtype: object = None,
    float32_matmul: str | None = None,
) -> Roofline:
    """Return the bound of each op call of a run on a device, and the least time that the device needs for it.

    The least time of a call is the longer of FLOPs/peak and bytes/bandwidth; for a module, an operator or the model it
    is the sum over the calls, which run one after the other. A run is faster only where caches and fusion save memory
    traffic (see `fvflops.counting.traffic.traffic`), or where a kernel skips work, such as the masked half of causal
    attention. Kernel launch overhead is excluded.

    `recorded` is a Trace, or an analysis that has one; `table` counts its FLOPs as 2 * macs + flops, and only `exact`
    counts all ops. The highest peak for a dtype applies to both `macs` and `flops`: compute-bound work outside
    the matrix units takes longer. `device` is as in `mfu`: a name, a file or a Device; one without a bandwidth raises
    ValueError. With `dtype`, its peak applies to all FLOPs, else each op's dtype has its own; bytes are always of the
    recorded dtypes. `float32_matmul` is as in `mfu`. A device without a peak for any of the dtypes raises ValueError.

    Source: Williams, Waterman, Patterson 2009, Roofline: An Insightful Visual Performance Model.

    >>> import torch
    >>> from fvflops import FlopCountAnalysis
    >>> layer = FlopCountAnalysis(torch.nn.Linear(1000, 1000, dtype=torch.bfloat16), torch.ones(8, 1000).bfloat16())
    >>> bound = roofline(layer, device="H100").total()
    >>> bound.flops, bound.bytes, bound.bound, round(bound.intensity, 1)
    (16008000, 2034000, 'memory', 7.9)
    """
    check_float32_matmul(float32_matmul)
    device = resolve_device(device)
    if device.bandwidth is None:
        raise ValueError(f"{device.name} has no bandwidth, which a roofline needs: add one in bytes/s")
    trace = trace_of(recorded)
    formula_table = resolve_table(table)
    trace, traffic_model = split_by_aliasing(trace)
    cost_model = _WorkCostModel(TableCostModel(formula_table, "flops"), traffic_model, trace.modules)
    timer = _CallTimer(device, None if dtype is None else short_dtype(dtype), float32_matmul)
    counts = count(trace, cost_model, "bytes")
    entries = tuple(timer.time(entry) for entry in counts.entries if entry.macs or entry.flops or entry.value)
    if timer.without_peak and not timer.peaks:
        device.peak(next(iter(timer.without_peak)))  # raises, with the dtypes that the device has
    return Roofline(
        device.name,
        int(device.bandwidth),
        timer.peaks,
        formula_table.name,
        trace.modules,
        entries,
        unsupported=counts.ledger()[Status.UNSUPPORTED],
        unknown_traffic=count(trace, traffic_model, "bytes").ledger()[Status.UNSUPPORTED],
        without_peak=timer.without_peak,
        multiply_add=formula_table.multiply_add,
        convention_flops=sum(formula_table.multiply_add * entry.macs + entry.flops for entry in counts.entries),
    )


class _WorkCostModel:
    """Cost model of FLOPs and bytes at once: the value of a cost is its bytes, its status refers to its FLOPs.

    The memory traffic of a region that the formula table counts as one unit is its inputs, outputs and parameters.
    """

    def __init__(self, flops: CostModel, moved: TrafficCostModel, modules: ModuleTree) -> None:
        self._flops = flops
        self._moved = moved
        self._modules = modules
        self.stops_at = flops.stops_at
        self.counts_modules = flops.counts_modules

    def op_cost(self, signature: Signature) -> tuple[OpCost, ...]:
        traffic = self._moved.op_traffic(signature)
        return _with_bytes(self._flops.op_cost(signature), 0 if traffic is None else sum(traffic))

    def region_cost(self, region: Region, module: ModuleInfo | None, signature: RegionSignature) -> RegionCost | None:
        cost = self._flops.region_cost(region, module, signature)
        if cost is None:
            return None
        moved = bytes_in((*signature.inputs, *signature.outputs)) if cost.exclusive else 0
        if module is not None and cost.exclusive:
            inside = f"{module.name}." if module.name else ""
            moved += sum(
                bytes_in((item.spec,)) if item.stored is None else item.stored
                for item in self._modules.parameters()
                if item.name.startswith(inside)
            )
        return RegionCost(_with_bytes(cost.costs, moved), cost.exclusive)


def _with_bytes(costs: tuple[OpCost, ...], moved: int) -> tuple[OpCost, ...]:
    """Return the costs with bytes as values: all on the first, 0 on the others."""
    return tuple(cost._replace(value=0 if index else moved) for index, cost in enumerate(costs))


class _CallTimer:
    """Computes least times on a device; `peaks` are the used ones, `without_peak` is dtype → FLOPs for the others."""

    def __init__(self, device: Device, dtype: str | None, float32_matmul: str | None) -> None:
        self._device = device
        self._bandwidth = int(device.bandwidth or 0)
        self._dtype = dtype
        self._float32_matmul = float32_matmul
        self.peaks: dict[str, int] = {}
        self.without_peak: Counter[str] = Counter()

    def time(self, entry: Entry) -> Bounded:
        """Return an entry of bytes, macs and flops with its least time."""
        dtype = self._dtype or _short(entry.dtype)
        products = product_dtype(entry.op, dtype, self._device, self._float32_matmul)
        compute = self._compute(2 * entry.macs, products) + self._compute(entry.flops, dtype)
        memory = entry.value / self._bandwidth
        seconds = max(compute, memory)
        flops, bound = 2 * entry.macs + entry.flops, seconds if compute > memory else 0.0
        load = Load(entry.calls, flops, entry.value, seconds, bound)
        return Bounded(entry.scope, entry.phase, entry.op, entry.label, products if entry.macs else dtype, load)

    def _compute(self, flops: int, dtype: str) -> float:
        if flops and dtype not in self.peaks:
            if dtype not in self._device.dtypes():
                self.without_peak[dtype] += flops
                return 0.0
            self.peaks[dtype] = self._device.peak(dtype)
        return flops / self.peaks[dtype] if flops else 0.0


def _short(dtype: str) -> str:
    """Return the short name of a dtype, or torch's where no device has a peak for it."""
    try:
        return short_dtype(dtype)
    except ValueError:
        return dtype


VIEWS = ("module", "operator", "op")
DEPTH = 3  # levels of modules below the root
SHOWN = 20  # ops, by time
_LOAD = (
    number_column("seconds", "least time", form=format_seconds),
    number_column("share", form=format_percent),
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
    module and phase, the longest time first. `subject` names the model. An unknown view raises ValueError.
    """
    check_view(by, VIEWS, "the roofline")
    total = roofline.total()
    table = _tabulate(roofline, total, by, DEPTH if depth is None else depth)
    compute = format_percent(total.compute_bound, total.seconds) or "0.0%"
    explained = (
        f"Least time: {format_seconds(total.seconds)}, {compute} of it compute-bound. Each op takes the longer of "
        "FLOPs/peak and bytes/bandwidth, and ops run one after the other. Assumes no cache reuse or fusion; kernel "
        "launch overhead excluded."
    )
    convention = _describe_convention(roofline, total)
    parts: list[Part] = [table, convention, "\n".join([explained, *_list_gaps(roofline)])]
    if roofline.peaks:
        ranked = sorted(roofline.peaks.items(), key=lambda item: -item[1])
        rows = [(dtype, peak, roofline.bandwidth, roofline.ridge(dtype)) for dtype, peak in ranked]
        parts.append(Table("peaks", _PEAKS, rows, title=f"Peaks of {roofline.device}", noun="dtype"))
    least = f"at least {format_seconds(total.seconds)}, {total.bound}-bound"
    title = f"{subject or 'Roofline'} on {roofline.device}: {least}"
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
        loads = roofline.by_operator().items()
        rows = [(name, load.calls, *_list_values(load, total)) for name, load in loads if load.seconds]
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
