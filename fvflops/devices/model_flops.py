"""FLOPs of a model's forward and backward passes, by the conventions in which trainings are reported."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from fvflops.capture.errors.model_check import trace_of
from fvflops.counting import TableCostModel, count
from fvflops.counting.uncounted_work import describe_unknown_masks
from fvflops.devices.utilisation import MODEL_PHASES, with_attention
from fvflops.formulas import FormulaTable, resolve_table

if TYPE_CHECKING:
    from fvflops.analysis.model_counts import FlopCountAnalysis


def model_flops(
    analysis: FlopCountAnalysis,
    *,
    attention: str = "dense",
    matmul_only: bool = False,
    table: str | FormulaTable = "default",
) -> int:
    """Return the FLOPs of a model's forward and backward passes, 2 for a multiply-add.

    Recomputation, by activation checkpointing or inside the backward of flash attention, and optimizers are excluded.
    `attention` is "dense", in which all pairs of query and key count, or "causal", in which only those within a causal
    mask, a window or a known mask do. Attention written out as products and a softmax counts all pairs in both.
    `matmul_only` leaves out all FLOPs that are no multiply-adds, such as those of norms. `table` is the convention.

    >>> import torch
    >>> from fvflops import TrainingStepAnalysis
    >>> from fvflops.zoo import build
    >>> step = TrainingStepAnalysis(build("llama_tiny"), torch.zeros(1, 16, dtype=torch.long), loss=torch.sum)
    >>> model_flops(step, matmul_only=True) > model_flops(step, attention="causal", matmul_only=True)
    True
    """
    chosen = with_attention(resolve_table(table), attention)
    trace = trace_of(analysis)
    if masks := describe_unknown_masks(trace, chosen):
        warnings.warn(f"mask unknown, counted as dense: {masks}", stacklevel=2)
    counts = count(trace, TableCostModel(chosen, "flops"), "flops")
    return sum(
        2 * (entry.macs - entry.recomputed) + (0 if matmul_only else entry.other_flops)
        for entry in counts.entries
        if entry.phase in MODEL_PHASES
    )
