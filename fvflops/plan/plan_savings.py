"""What lowers the peak memory of a planned rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from fvflops.capture.training_step import OptimizerMaker
from fvflops.formulas import FormulaTable, resolve_table
from fvflops.plan.checkpointing import Checkpoint, find_checkpointed
from fvflops.plan.memory.memory_savings import PredictedStep, find_savings
from fvflops.plan.memory.saving_records import MemorySavings
from fvflops.plan.plan_options import PlanOptions
from fvflops.plan.rank_plan import plan_ranks


def plan_savings(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    optimizer: OptimizerMaker | None = None,
    checkpoint: Checkpoint = (),
    assume: Mapping[str, Any] | None = None,
    table: str | FormulaTable = "default",
    first_step: bool = False,
    **options: Any,
) -> MemorySavings:
    """Return what lowers the peak memory of a rank, as `memory_savings` does, and the FLOPs that it costs the rank.

    The arguments are those of `plan_rank`, and `first_step` of `RankPlan.memory`. Errors are those of `plan_rank`.

    >>> import torch
    >>> from fvflops.zoo import build
    >>> tokens = torch.ones(8, 128, dtype=torch.int64)
    >>> best = plan_savings(build("llama_tiny", device="meta"), (tokens,), mesh={"tp": 2}).changes[0]
    >>> best.change, best.name, best.modules
    ('checkpoint', 'Block', ('layers.0', 'layers.1'))
    """
    changed = PlanOptions(optimizer=optimizer, checkpoint=checkpoint, assume=assume, table=table, **options)
    return savings_of_rank(model, args, kwargs, changed, first_step=first_step)


def savings_of_rank(
    model: nn.Module, args: Any, kwargs: Mapping[str, Any] | None, options: PlanOptions, *, first_step: bool
) -> MemorySavings:
    """Return what lowers the peak memory of the rank of a plan with some options, as `plan_savings`."""
    table, precision = resolve_table(options.table), options.dtypes

    def predict(
        model: nn.Module = model,
        inputs: Any = args,
        kwargs: Mapping[str, Any] | None = kwargs,
        optimizer: OptimizerMaker | Sequence[OptimizerMaker] | None = options.optimizer,
        autocast: Any = ...,
        **changes: Any,
    ) -> PredictedStep:
        maker: Any = next(iter(optimizer), None) if isinstance(optimizer, (list, tuple)) else optimizer
        if autocast is not ...:
            changes["precision"] = None if autocast is None else "bf16-mixed"
        (plan,) = plan_ranks(model, inputs, kwargs, replace(options, optimizer=maker, table=table, **changes))
        return PredictedStep(plan.memory(first_step=first_step), plan.flops(table).total())

    return find_savings(
        predict,
        model,
        (args, dict(kwargs or {})),
        optimizers=() if options.optimizer is None else (options.optimizer,),
        checkpointed=find_checkpointed(model, options.checkpoint),
        in_autocast=precision is not None and not precision.is_uniform,
        assume=options.assume,
        table=table.name,
    )
