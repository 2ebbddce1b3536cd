"""Rows of the layout study of Llama on A100s (Hagemann et al., arXiv:2311.05610)."""

from __future__ import annotations

import math

from training_runs.measured_llama import MeasuredLlamaConfig
from training_runs.run_record import Row, TrainingRun, divide_batch, make_mesh

# Layers, hidden size, heads, and width of the MLP.
SIZES = {"llama-13B": (40, 5120, 40, 13_824), "llama-30B": (60, 6656, 52, 17_920), "llama-65B": (80, 8192, 64, 22_016)}
# Inferred from MFU, as is the vocabulary: sequences of a step, by their length.
SEQUENCES = {2048: 2048, 8192: 512}
_ATTENTION = {"torch": "separate ops", "fused": "fused softmax"}


def divide_evenly(layers: int, stages: int) -> tuple[int, ...] | None:
    """Return the layers of each stage where embedding, norm and head are divided with them, as layers of their own.

    The default of Aleph-Alpha/scaling on GitHub, by the study's authors: PipePartitionMethod.UNIFORM.
    """
    if stages == 1:
        return None
    least, more = divmod(layers + 3, stages)
    counts = [least + (stage < more) for stage in range(stages)]
    return (counts[0] - 1, *counts[1:-1], counts[-1] - 2)


def read_study(dataset: str, line: int, row: Row) -> TrainingRun | None:
    """Return a timed run, None of any other."""
    return read_layout(dataset, line, row) if row["status"] == "ok" else None


def read_layout(dataset: str, line: int, row: Row) -> TrainingRun:
    """Return a run, whose step has no end where it ran out of memory."""
    gpus, tp, pp, micro_batch, sequence = (int(row[key]) for key in ("gpus", "tp", "pp", "micro_batch", "sequence"))
    layers, hidden, heads, intermediate = SIZES[row["model"]]
    replicas, rest = divmod(gpus, tp * pp)
    if rest:
        raise ValueError(f"tp {tp} x pp {pp} must divide {gpus} GPUs")
    kernel, _, norms = row["kernel"].partition(" + ")
    return TrainingRun(
        dataset=dataset,
        source="layout study 2023",
        line=line,
        name=row["model"],
        config=MeasuredLlamaConfig(
            vocab_size=128_000,
            hidden_size=hidden,
            intermediate_size=intermediate,
            layers=layers,
            heads=heads,
            kv_heads=heads,
            attention=_ATTENTION.get(kernel, "flash"),
            fused_norms=bool(norms),
            gathers_logits=True,
        ),
        sequence=sequence,
        local_batch=divide_batch(SEQUENCES[sequence], replicas),
        micro_batch=micro_batch,
        mesh=make_mesh(gpus, pp=pp, dp=replicas, tp=tp),
        device="A100 SXM 80GB",
        node_gbps=200,
        precision="bf16",
        gathered_in="bfloat16",
        reduced_in="bfloat16",  # and accumulated
        checkpointing=row["checkpointing"],
        sequence_parallel=row["sequence_parallel"] == "True" and tp > 1,
        sharded_optimizer=True,
        all_reduced_in="float32",
        recomputes_all=True,
        stage_layers=divide_evenly(layers, pp),
        quantity="step seconds",
        value=math.inf if row["status"] == "oom" else float(row["step_s"]),
    )
