"""What a plan of a training step assumes."""

from __future__ import annotations

from typing import Any

from torch import nn

from fvflops.capture.run import Loss
from fvflops.capture.training_step import checkpointed_modules
from fvflops.plan.action_recording import Recipe
from fvflops.plan.layout import Layout
from fvflops.plan.memory.step_settings import (
    describe_checkpointed,
    describe_loss,
    given,
    settings_of_inputs,
    settings_of_model,
)
from fvflops.plan.pipeline_stages import Inputs


def settings_of_plan(
    model: nn.Module, inputs: Inputs, layout: Layout, recipe: Recipe, loss: Loss | None
) -> dict[str, Any]:
    """Return what the plan of a rank assumes besides what its Trace says, without what does not apply."""
    precision, checkpoint, pipelined = layout.precision, recipe.checkpoint, layout.size("pp") > 1
    of_model = settings_of_model(model, None if precision is None else precision.compute)
    weights = of_model["weights"] if precision is None else _name(precision.parameters)
    reduction = weights if precision is None or not layout.is_fully_sharded else _name(precision.reduce)
    has_many = layout.size("dp") * layout.size("fsdp") * layout.size("cp") > 1
    return given(
        mesh=dict(layout.axes),
        **settings_of_inputs(inputs),
        microbatches=recipe.microbatches,
        **{**of_model, "weights": weights},
        gradient_reduction=reduction if has_many else None,
        checkpointing=checkpoint
        if isinstance(checkpoint, str)
        else describe_checkpointed(checkpointed_modules(model, checkpoint)),
        schedule=layout.schedule if pipelined else None,
        stages_per_rank=layout.stages_per_rank if pipelined else None,
        stage_layers=None if layout.stage_layers is None else list(layout.stage_layers),
        reshard_after_forward=layout.reshard_after_forward if layout.is_fully_sharded else None,
        reduce_each_microbatch=_reduces_each(layout, recipe),
        sequence_parallel=layout.sequence_parallel if layout.size("tp") > 1 else None,
        routing=layout.routing,
        loss="sum of the first output" if loss is None else describe_loss(loss),
    )


def _reduces_each(layout: Layout, recipe: Recipe) -> bool | None:
    if not layout.is_fully_sharded or recipe.microbatches == 1 or recipe.pipelined:
        return None
    return recipe.reduce_each_microbatch


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
