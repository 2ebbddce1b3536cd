"""Rows of the measured training runs in tests/data/training_times, as plain data."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fvflops.zoo import llama, megatron_gpt, mpt
from training_runs.measured_rows import read_measured
from training_runs.run_record import FILES, Config, Row, TrainingRun, divide_batch, make_mesh
from training_runs.study_rows import read_study

FOLDER = Path(__file__).resolve().parents[2] / "tests" / "data" / "training_times"


def read_runs(dataset: str, path: Path | None = None) -> list[TrainingRun]:
    """Return the runs of a dataset, by default from its file in `FOLDER`.

    Rows without a time are left out; one that is not valid raises ValueError with its file and line.
    """
    read_row = DATASETS[dataset]
    path = FOLDER / FILES[dataset] if path is None else path
    runs = []
    with path.open(newline="") as file:
        rows = csv.DictReader(file)
        for row in rows:
            try:
                run = read_row(dataset, rows.line_num, row)
            except (KeyError, ValueError, TypeError) as error:
                raise ValueError(f"{path}:{rows.line_num}: {error}") from error
            if run is not None:
                runs.append(run)
    return runs


# --- vTrain: GPT by Megatron-DeepSpeed --------------------------------------------------------------------------------


def read_vtrain(dataset: str, line: int, row: Row) -> TrainingRun:
    """Return a run of vTrain's: full checkpointing, 1F1B, fp16, the vocabulary padded as Megatron does."""
    tp, dp, pp = (int(row[f"{kind} parallelism"]) for kind in ("tensor", "data", "pipeline"))
    layers, hidden, sequence = int(row["# layers"]), int(row["hidden size"]), int(row["sequence length"])
    if layers % pp:
        raise ValueError(f"{layers} layers must be divisible by {pp} stages")
    return TrainingRun(
        dataset=dataset,
        source=f"vTrain {dataset}",
        line=line,
        name=f"gpt {layers} x {hidden}",
        config=megatron_gpt.MegatronGPTConfig(
            vocab_size=50_257,
            vocab_multiple=128 * tp,
            positions=sequence,
            hidden_size=hidden,
            layers=layers,
            heads=int(row["attention heads"]),
        ),
        sequence=sequence,
        local_batch=divide_batch(int(row["global batch"]), dp),
        micro_batch=int(row["micro batch"]),
        mesh=make_mesh(int(row["# GPUs"]), pp=pp, dp=dp, tp=tp),
        device="A100 SXM 80GB",  # assumed: the source does not say how much memory they have
        node_gbps=100,
        precision="fp16",
        gathered_in="float16",
        reduced_in="float16",
        checkpointing="full",
        quantity="step seconds",
        value=float(row["iteration time (ms)"]) / 1000,
    )


# --- MosaicML: MPT under FSDP -----------------------------------------------------------------------------------------

# Device and Gbit/s between nodes for each GPU, assumed for H100s.
_MPT_DEVICES = {
    "h100_80gb": ("H100 SXM", 400),
    "a100_80gb": ("A100 SXM 80GB", 200),
    "a100_40gb": ("A100 SXM 40GB", 200),
}
# Composer's modes: the dtypes in which FSDP gathers parameters and reduces gradients; in old Composer the reverse.
_MPT_MODES = {"DEFAULT": ("bfloat16", "float32"), "PURE": ("bfloat16", "bfloat16")}


def read_mpt(dataset: str, line: int, row: Row) -> TrainingRun:
    """Return a run of MPT, with as many positions as the sequence has."""
    device, gbps = _MPT_DEVICES[row["GPU"]]
    gathered, reduced = _MPT_MODES[row["MPMode"]]
    gpus, sequence, micro_batch = int(row["GPUs"]), int(row["SeqLen"]), int(row["MicroBatchSize"])
    local_batch = divide_batch(int(row["GlobalBatchSize"]), gpus)
    if local_batch != micro_batch * int(row["GradAccum"]):
        raise ValueError(f"{row['GradAccum']} microbatches of {micro_batch} must be {local_batch} sequences")
    if row["ActivationCPUOffload"] != "False":
        raise ValueError("activations are offloaded, which no field describes")
    shape = mpt.CONFIGS[f"mpt_{row['Model']}"]
    return TrainingRun(
        dataset=dataset,
        source="MPT",
        line=line,
        name=f"mpt {row['Model']}",
        config=mpt.MPTConfig(positions=sequence, hidden_size=shape.hidden_size, layers=shape.layers, heads=shape.heads),
        sequence=sequence,
        local_batch=local_batch,
        micro_batch=micro_batch,
        mesh=make_mesh(gpus, fsdp=gpus),
        device=device,
        node_gbps=gbps,
        precision=row["Precision"],
        gathered_in=gathered,
        reduced_in=reduced,
        checkpointing={"True": "full", "False": "none"}[row["ActivationCheckpointing"]],
        recomputes_all="A100" in device,  # assumed: torch before 2.1
        sharding=row["ShardingStrategy"],
        quantity="tokens/s",
        value=float(row["Throughput_T_s"]),
    )


# --- published figures ------------------------------------------------------------------------------------------------

# The source's GPU → device, GPUs per node, Gbit/s between nodes for each GPU, and what differs from the device.
# The Gbit/s of the last two are assumed. Where the source does not say more, a run with stages has micro batch 1, and
# one without (but of torchtitan) one microbatch.
# Power falls with about the third power of the clock: 500 W in place of 700.
_CLOCK_AT_500_W = (500 / 700) ** (1 / 3)
_GPUS: Mapping[str, tuple[str, int, float, dict[str, Any]]] = {
    "H100 96GB HBM2e 500W": ("H100 SXM", 8, 400, {"memory_bandwidth": 2.4e12, "clock": _CLOCK_AT_500_W}),
    "A100 80GB": ("A100 SXM 80GB", 8, 200, {}),
    "H100 80GB 700W": ("H100 SXM", 8, 400, {}),
    "H200 141GB": ("H200", 4, 400, {}),
}
_LLAMAS = {"llama3.1-8b": "llama3_8b", "llama3.1-70b": "llama3_70b", "llama3.1-405b": "llama3_405b"}
# KempnerForge names the parameters of these; the rows that give only the name follow one that gives the sizes.
_KEMPNER = {"llama3 7b": (32, 4096, 32, 14_336), "llama3 13b": (40, 5120, 40, 17_920)}


def read_published(dataset: str, line: int, row: Row) -> TrainingRun:
    """Return a published run; a micro batch that is not stated is the whole batch of a rank, with stages 1."""
    name = row["model"].partition(" (")[0]
    device, per_node, gbps, differences = _GPUS[row["gpu"].partition(" (")[0]]
    gpus, tp, cp, pp = (int(row[key]) for key in ("gpus", "tp", "cp", "pp"))
    kind, _, size = row["dp_or_fsdp"].rpartition(" ")
    replicas, sequence, config = int(size), int(row["sequence"]), _find_config(name, row["model"])
    local_batch = int(row["local_batch"]) if row["local_batch"] else None
    if local_batch is not None and local_batch != divide_batch(int(row["global_batch"]), replicas):
        raise ValueError(f"{replicas} ranks of {local_batch} sequences must be {row['global_batch']}")
    micro_batch = 1 if local_batch and pp > 1 else local_batch
    quantity = "tokens/s/GPU" if row["tokens_per_s_per_gpu"] else "TFLOP/s/GPU"
    flops = None
    if quantity == "TFLOP/s/GPU" and local_batch is not None:
        flops = _flops_per_step(config, local_batch * replicas, sequence)
    memory = row["peak_memory_gib"]
    return TrainingRun(
        dataset=dataset,
        source=re.sub(r" (table \d+|asynctp.*|mfu_scaling.*)$", "", row["source"]),
        line=line,
        name=name,
        config=config,
        sequence=sequence,
        local_batch=local_batch,
        micro_batch=micro_batch,
        mesh=make_mesh(gpus, pp=pp, **{kind or "dp": replicas}, cp=cp, tp=tp),
        gpus_per_node=per_node,
        device=device,
        node_gbps=gbps,
        precision=row["precision"],
        gathered_in="float16" if row["precision"] == "fp16" else "bfloat16",
        reduced_in="float16" if row["precision"] == "fp16" else "float32",
        checkpointing=row["activation_checkpointing"],
        sharding="FULL_SHARD" if kind == "fsdp" and pp == 1 else "SHARD_GRAD_OP" if kind == "fsdp" else "none",
        virtual_stages=None if "interleaved" in row["schedule"] else 1,
        compiled=row["compile"] == "yes",
        # As torchtitan does; the paper on Llama 3 does not say.
        sequence_parallel=isinstance(config, llama.LlamaConfig) and tp > 1,
        quantity=quantity,
        value=float(row["tokens_per_s_per_gpu"] or row["tflops_per_gpu"]),
        flops_per_step=flops,
        memory=float(memory) * (1e9 if "Kempner" in row["source"] else 2**30) if memory else None,
        **differences,
    )


def _find_config(name: str, described: str) -> Config:
    """Return the sizes of a model, from its name or from the parentheses after it."""
    if name in _LLAMAS:
        return llama.CONFIGS[_LLAMAS[name]]
    if name in _KEMPNER:
        layers, hidden, heads, intermediate = _KEMPNER[name]
        return llama.LlamaConfig(
            vocab_size=128_256,
            hidden_size=hidden,
            intermediate_size=intermediate,
            layers=layers,
            heads=heads,
            kv_heads=8,
            rope_theta=500_000.0,
        )
    sizes = re.fullmatch(r"gpt .* \((\d+) layers; hidden (\d+); heads (\d+)\)", described)
    if sizes is None:
        raise ValueError(f"the sizes of model {described!r} are not known")
    layers, hidden, heads = map(int, sizes.groups())
    return megatron_gpt.MegatronGPTConfig(layers=layers, hidden_size=hidden, heads=heads)


def _flops_per_step(config: Config, sequences: int, n: int) -> int:
    """Return the FLOPs of a step by the formula of the source of a rate.

    Of Megatron's paper equation 3, with the recomputed forward pass. Llama 3's paper does not state one: six for each
    parameter, with the causal half of attention.
    """
    layers, h, vocabulary = config.layers, config.hidden_size, config.vocab_size
    if isinstance(config, megatron_gpt.MegatronGPTConfig):
        # 96 B s l h^2 (1 + s/6h + V/(16 l h))
        return sequences * n * (96 * layers * h * h + 16 * layers * n * h + 6 * vocabulary * h)
    assert isinstance(config, llama.LlamaConfig)
    attention = 2 * h * h + 2 * h * config.kv_heads * config.head_size
    linears = layers * (attention + 3 * h * config.intermediate_size) + vocabulary * h
    return sequences * n * (6 * linears + 6 * layers * h * n)


# Dataset → the function that reads a row.
DATASETS: Mapping[str, Callable[[str, int, Row], TrainingRun | None]] = {
    "single node": read_vtrain,
    "multi node": read_vtrain,
    "mpt": read_mpt,
    "published": read_published,
    "runs": read_measured,
    "layout study": read_study,
}
