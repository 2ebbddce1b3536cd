"""Count one model by several conventions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fvflops.analysis.inputs import InputSize, inputs_of_size
from fvflops.analysis.model_counts import FlopCountAnalysis
from fvflops.capture.run import Model
from fvflops.counting.ignored_work import describe_ignored_work
from fvflops.features.conventions.compute import explain_differences
from fvflops.features.conventions.model import Comparison, ConventionTotal
from fvflops.formulas import FormulaTable, resolve_table, shipped_tables
from fvflops.trace import Counts, Status, TraceError


def compare(
    model: Model,
    inputs: Any = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    input_size: InputSize | None = None,
    tables: Sequence[str | FormulaTable] = (),
    execution: str = "auto",
    device: str | torch.device | None = None,
    assume: Mapping[str, Any] | None = None,
) -> Comparison:
    """Return the counts of a model's forward pass by several conventions, and why each pair differs.

    `tables` are conventions: names, paths or FormulaTables; by default all shipped ones. The other arguments are those
    of FlopCountAnalysis. A duplicate convention raises ValueError.

    >>> from torch import nn
    >>> comparison = compare(nn.Linear(3, 2), torch.ones(4, 3), tables=["default", "torch"])
    >>> {name: count.total for name, count in comparison.totals.items()}
    {'default': 24, 'torch': 48}
    >>> comparison.between("default", "torch")
    (Difference(kind='unit', value=24, first='', second='', calls=0),)
    """
    resolved = [resolve_table(table) for table in tables or shipped_tables()]
    names = [table.name for table in resolved]
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise ValueError(f"compare: duplicate tables: {', '.join(duplicates)}")
    inputs, kwargs = inputs_of_size(model, inputs, kwargs, input_size)
    options: dict[str, Any] = {"kwargs": kwargs, "execution": execution, "device": device, "assume": assume}
    return compare_by(resolved, lambda table: FlopCountAnalysis(model, inputs, table=table, warn=False, **options))


def compare_by(
    tables: Sequence[FormulaTable],
    analyse: Callable[[FormulaTable], FlopCountAnalysis],
    *,
    may_leave_out: bool = False,
) -> Comparison:
    """Return the counts of one model by several conventions; `analyse` returns its analysis by one of them.

    A loaded Trace cannot be counted by every convention. TraceError is raised then, or with `may_leave_out` those after
    the first are left out.
    """
    counts: dict[str, Counts] = {}
    ignored: dict[str, str] = {}
    left_out: list[str] = []
    inputs_text = ""
    for table in tables:
        analysis = analyse(table)
        try:
            counts[table.name] = analysis.counts()
        except TraceError:
            if not may_leave_out or not counts:
                raise
            left_out.append(table.name)
            continue
        trace = analysis.trace()
        ignored[table.name] = describe_ignored_work(trace, counts[table.name], table)
        inputs_text = trace.info.inputs
    tables = [table for table in tables if table.name in counts]
    units = {table.name: table.multiply_add for table in tables}
    return Comparison(
        inputs_text,
        {table.name: _convention_total(table, counts[table.name], ignored[table.name]) for table in tables},
        {
            (first, second): explain_differences(counts[first], counts[second], units=(units[first], units[second]))
            for first in counts
            for second in counts
            if first != second
        },
        tuple(left_out),
    )


def _convention_total(table: FormulaTable, counts: Counts, ignored: str) -> ConventionTotal:
    macs, flops = (sum(getattr(entry, part) for entry in counts.entries) for part in ("macs", "flops"))
    unsupported = tuple(counts.ledger()[Status.UNSUPPORTED])
    return ConventionTotal(table.name, table.description, table.multiply_add, macs, flops, unsupported, ignored)
