"""Plans of measured training runs, as programs that can be simulated again and again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from training_runs.rows import TrainingRun

from fvflops.features.planning.master_weights import MasterWeights
from fvflops.features.planning.plan import plan_step
from fvflops.features.step_time.step_program import StepProgram, read_step
from fvflops.zoo import llama, megatron_gpt, mpt

_DTYPES = {"fp16": torch.float16, "bf16": torch.float32, "amp_bf16": torch.float32}
_NORMS = ("torch.nn.modules.normalization.LayerNorm", "torch.nn.modules.normalization.RMSNorm")
_FUSED = {
    megatron_gpt.MegatronGPTConfig: (
        *(f"{item.__module__}.{item.__qualname__}" for item in megatron_gpt.FUSED),
        *_NORMS,
    ),
    mpt.MPTConfig: _NORMS,
    llama.LlamaConfig: _NORMS,
}
_BLOCKS = {
    megatron_gpt.MegatronGPTConfig: megatron_gpt.Block,
    mpt.MPTConfig: mpt.Block,
    llama.LlamaConfig: llama.Block,
}


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """A measured run with its simulated program; `host_waits` is that of `simulate`."""

    run: TrainingRun
    step: StepProgram
    host_waits: bool


def prepare(run: TrainingRun) -> PreparedRun:
    """Plan a run: its model, mesh, microbatches, checkpointing and optimizer, in shape execution."""
    if run.microbatches is None or run.micro_batch is None:
        raise ValueError(f"{run.place}: the micro batch is not known")
    is_megatron = isinstance(run.config, megatron_gpt.MegatronGPTConfig)
    model = run.build_model().to(_DTYPES[run.precision])
    tokens = torch.ones(run.micro_batch, run.sequence, dtype=torch.int64)
    adam = partial(torch.optim.AdamW, fused=True)
    plan = plan_step(
        model,
        (tokens, tokens),
        mesh=dict(run.mesh),
        microbatches=run.microbatches,
        checkpoint=[_BLOCKS[type(run.config)]] if run.checkpointing == "full" else (),
        optimizer=partial(MasterWeights, make=adam) if is_megatron else adam,
        **_options(run),
    )
    host_waits = is_megatron and run.mesh.get("pp", 1) > 1
    return PreparedRun(run, read_step(plan.ranks, fused=_FUSED[type(run.config)]), host_waits)


def _options(run: TrainingRun) -> Mapping[str, object]:
    if "fsdp" not in run.mesh:
        return {"device": "cuda"}
    precision = "bf16-mixed" if run.reduced_in == "float32" else "bf16-mixed-reduce"
    return {"device": "cuda", "precision": precision, "reshard_after_forward": run.sharding == "FULL_SHARD"}
