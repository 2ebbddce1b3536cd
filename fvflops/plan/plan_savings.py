"""What lowers the peak memory of a planned rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from fvflops.capture.training_step import OptimizerMaker
from fvflops.formulas import FormulaTable, resolve_table
from fvflops.plan.checkpointing import Checkpoint, find_checkpointed
from fvflops.plan.memory.memory_savings import PredictedStep, find_savings
from fvflops.plan.memory.saving_records import MemorySavings
from fvflops.plan.rank_plan import plan_rank
from fvflops.plan.sharding.fully_sharded import find_precision


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
    formulas, precision = resolve_table(table), find_precision(options.get("precision"))

    def predict(
        model: nn.Module = model,
        inputs: tuple[Any, ...] = args,
        kwargs: Mapping[str, Any] | None = kwargs,
        optimizer: OptimizerMaker | Sequence[OptimizerMaker] | None = optimizer,
        checkpoint: Checkpoint = checkpoint,
        assume: Mapping[str, Any] | None = assume,
        autocast: Any = ...,
    ) -> PredictedStep:
        maker: Any = next(iter(optimizer), None) if isinstance(optimizer, (list, tuple)) else optimizer
        changed: Any = {"optimizer": maker, "checkpoint": checkpoint, "assume": assume, "table": formulas}
        if autocast is not ...:
            changed["precision"] = None if autocast is None else "bf16-mixed"
        plan = plan_rank(model, inputs, kwargs, **{**options, **changed})
        return PredictedStep(plan.memory(first_step=first_step), plan.flops(formulas).total())

    return find_savings(
        predict,
        model,
        args,
        kwargs or {},
        optimizers=() if optimizer is None else (optimizer,),
        checkpointed=find_checkpointed(model, checkpoint),
        in_autocast=precision is not None and not precision.is_uniform,
        assume=assume,
        table=formulas.name,
    )
