"""Minimum, mean and maximum of a cost over several random draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

from fvflops.analysis.model_analysis import ModelAnalysis, model_run, record_again
from fvflops.analysis.model_counts import FlopCountAnalysis
from fvflops.capture.restore.global_state import seeded
from fvflops.formulas import FormulaTable


def repeat_count(analysis: FlopCountAnalysis, times: int, table: FormulaTable) -> list[int]:
    """Return the FLOPs of the analysed run, and of `times` - 1 more runs of the model."""

    def measure() -> int:
        again = record_again(analysis, analysis.trace().stops_at)
        return FlopCountAnalysis.from_trace(again, table=table, warn=False).total()

    return repeat(analysis, times, measure, first=analysis.total)


def repeat(
    analysis: ModelAnalysis, times: int, measure: Callable[[], int], *, first: Callable[[], int] | None = None
) -> list[int]:
    """Return the cost of a model for several draws: of the `first` run, and of others with the seeds 1, 2, 3 ..."""
    if model_run(analysis) is None:
        raise ValueError("--repeat runs the model again: it does not apply to a saved Trace or a git revision")
    costs = [(first or measure)()]
    for seed in range(1, times):
        with seeded(seed):
            costs.append(measure())
    return costs


def describe_draws(values: Sequence[int], unit: str) -> str:
    """Return the minimum, mean and maximum of a cost over draws.

    >>> describe_draws([10_000, 10_001], "FLOPs")
    '2 draws: minimum 10,000, mean 10,000.5, maximum 10,001 FLOPs'
    """
    mean = Fraction(sum(values), len(values))
    tenths = round(mean * 10)
    shown = f"{tenths // 10:,}" + (f".{tenths % 10}" if tenths % 10 else "")
    return f"{len(values)} draws: minimum {min(values):,}, mean {shown}, maximum {max(values):,} {unit}"
