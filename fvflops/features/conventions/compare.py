"""Count one model by several conventions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fvflops.analysis.model_counts import FlopCountAnalysis
from fvflops.capture.run import Model
from fvflops.features.conventions.compute import explain_differences
from fvflops.features.conventions.model import Comparison, ConventionTotal
from fvflops.formulas import FormulaTable, resolve_table, shipped_tables
from fvflops.trace import Counts, Status


def compare(
    model: Model,
    inputs: Any = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
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
    counts: dict[str, Counts] = {}
    inputs_text = ""
    for table in resolved:
        analysis = FlopCountAnalysis(
            model, inputs, kwargs=kwargs, table=table, execution=execution, device=device, assume=assume, warn=False
        )
        counts[table.name] = analysis.counts()
        inputs_text = analysis.trace().info.inputs
    units = {table.name: table.multiply_add for table in resolved}
    return Comparison(
        inputs_text,
        {table.name: _convention_total(table, counts[table.name]) for table in resolved},
        {
            (first, second): explain_differences(counts[first], counts[second], units=(units[first], units[second]))
            for first in counts
            for second in counts
            if first != second
        },
    )


def _convention_total(table: FormulaTable, counts: Counts) -> ConventionTotal:
    macs, flops = (sum(getattr(entry, part) for entry in counts.entries) for part in ("macs", "flops"))
    unsupported = tuple(counts.ledger()[Status.UNSUPPORTED])
    return ConventionTotal(table.name, table.description, table.multiply_add, macs, flops, unsupported)
