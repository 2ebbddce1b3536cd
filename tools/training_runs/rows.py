"""Rows of the measured training runs in tests/data/training_times, as plain data."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from fvflops.zoo import llama, megatron_gpt, mpt

FOLDER = Path(__file__).resolve().parents[2] / "tests" / "data" / "training_times"
Config = megatron_gpt.MegatronGPTConfig | mpt.MPTConfig | llama.LlamaConfig
Row = Mapping[str, str]

# Quantities that a run states, with their units.
QUANTITIES = ("step seconds", "tokens/s", "tokens/s/GPU", "TFLOP/s/GPU")
CHECKPOINTING = ("none", "selective", "full")
SHARDING = ("none", "FULL_SHARD", "SHARD_GRAD_OP")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """A measured training run.

    `dataset` is a key of `DATASETS`, `line` the line of its file. `mesh` is axis → size as in `plan_rank`, outermost
    first, without axes of size 1; a data-parallel rank (an index of dp and fsdp) processes `local_batch` sequences a
    step in microbatches of `micro_batch`, None where that is not known. `device` is a name of configs/devices.yaml;
    `memory_bandwidth` (bytes/s) is stated where the device has another than there. `node_gbps` are the Gbit/s between
    nodes for each GPU. Parameters are gathered in `gathered_in` and gradients reduced in `reduced_in`, dtypes of torch.
    `checkpointing` is one of `CHECKPOINTING`, `sharding` of `SHARDING`, `virtual_stages` the stages of each pipeline
    rank, None where that is not known.

    What was measured is `value` of `quantity`, one of `QUANTITIES`; TFLOP/s are of `flops_per_step`, by the source's
    formula. `memory` is the peak of a GPU in bytes, None where it is not stated.
    """

    dataset: str
    line: int
    name: str
    config: Config
    sequence: int
    local_batch: int | None
    micro_batch: int | None
    mesh: Mapping[str, int]
    device: str
    node_gbps: float
    precision: str
    gathered_in: str
    reduced_in: str
    quantity: str
    value: float
    checkpointing: str = "none"
    sharding: str = "none"
    gpus_per_node: int = 8
    virtual_stages: int | None = 1
    compiled: bool = False
    memory_bandwidth: float | None = None
    flops_per_step: int | None = None
    memory: float | None = None

    def __post_init__(self) -> None:
        for field, allowed in (("checkpointing", CHECKPOINTING), ("sharding", SHARDING), ("quantity", QUANTITIES)):
            if getattr(self, field) not in allowed:
                raise ValueError(f"{self.place}: {field} {getattr(self, field)!r} is none of {', '.join(allowed)}")
        if self.local_batch is not None and self.micro_batch is not None and self.local_batch % self.micro_batch:
            raise ValueError(
                f"{self.place}: micro batch {self.micro_batch} must divide the {self.local_batch} sequences of a rank"
            )
        if self.config.heads % self.mesh.get("tp", 1):
            raise ValueError(f"{self.place}: tp={self.mesh['tp']} must divide {self.config.heads} heads")
        if not self.value > 0:
            raise ValueError(f"{self.place}: {self.quantity} must be positive; got {self.value}")

    @property
    def place(self) -> str:
        """The row's file and line."""
        return f"{DATASETS[self.dataset][0]}:{self.line}"

    @property
    def gpus(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def replicas(self) -> int:
        """The number of ranks that process different sequences."""
        return self.mesh.get("dp", 1) * self.mesh.get("fsdp", 1)

    @property
    def microbatches(self) -> int | None:
        """The number of microbatches of a step, None where it is not known."""
        if self.local_batch is None or self.micro_batch is None:
            return None
        return self.local_batch // self.micro_batch

    @property
    def tokens(self) -> int | None:
        """The number of tokens of a step of all GPUs, None where it is not known."""
        return None if self.local_batch is None else self.local_batch * self.replicas * self.sequence

    @property
    def step_seconds(self) -> float | None:
        """The measured time of a step, None where the source states a rate without the batch."""
        if self.quantity == "step seconds":
            return self.value
        if self.quantity == "TFLOP/s/GPU":
            return None if self.flops_per_step is None else self.flops_per_step / (self.value * 1e12 * self.gpus)
        if self.tokens is None:
            return None
        return self.tokens / (self.value * (self.gpus if self.quantity == "tokens/s/GPU" else 1))

    def build_model(self) -> nn.Module:
        """Return the model on the meta device."""
        classes: Mapping[type, Callable[..., nn.Module]] = {
            megatron_gpt.MegatronGPTConfig: megatron_gpt.MegatronGPT,
            mpt.MPTConfig: mpt.MPT,
            llama.LlamaConfig: llama.Llama,
        }
        with torch.device("meta"):
            return classes[type(self.config)](self.config)


def read_runs(dataset: str, path: Path | None = None) -> list[TrainingRun]:
    """Return the runs of a dataset, by default those of its file in `FOLDER`.

    A row that is not valid raises ValueError with its file and line.
    """
    name, read_row = DATASETS[dataset]
    path = FOLDER / name if path is None else path
    runs = []
    with path.open(newline="") as file:
        rows = csv.DictReader(file)
        for row in rows:
            try:
                runs.append(read_row(dataset, rows.line_num, row))
            except (KeyError, ValueError, TypeError) as error:
                raise ValueError(f"{path}:{rows.line_num}: {error}") from error
    return runs


def _make_mesh(gpus: int, **sizes: int) -> dict[str, int]:
    """Return the axes of more than one rank, outermost first; their product must be the number of GPUs."""
    if math.prod(sizes.values()) != gpus:
        raise ValueError(f"{' x '.join(f'{axis} {size}' for axis, size in sizes.items())} must be {gpus} GPUs")
    return {axis: size for axis, size in sizes.items() if size > 1} or {"dp": 1}


def _divide_batch(global_batch: int, replicas: int) -> int:
    if global_batch % replicas:
        raise ValueError(f"a global batch of {global_batch} must be divisible by {replicas} data-parallel ranks")
    return global_batch // replicas


# --- vTrain: GPT by Megatron-DeepSpeed --------------------------------------------------------------------------------


def read_vtrain(dataset: str, line: int, row: Row) -> TrainingRun:
    """Return a run of vTrain's: full checkpointing, 1F1B, fp16, the vocabulary padded as Megatron does."""
    tp, dp, pp = (int(row[f"{kind} parallelism"]) for kind in ("tensor", "data", "pipeline"))
    layers, hidden, sequence = int(row["# layers"]), int(row["hidden size"]), int(row["sequence length"])
    if layers % pp:
        raise ValueError(f"{layers} layers must be divisible by {pp} stages")
    return TrainingRun(
        dataset=dataset,
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
        local_batch=_divide_batch(int(row["global batch"]), dp),
        micro_batch=int(row["micro batch"]),
        mesh=_make_mesh(int(row["# GPUs"]), pp=pp, dp=dp, tp=tp),
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

# Device and Gbit/s between nodes for each GPU; those of H100s are assumed.
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
    local_batch = _divide_batch(int(row["GlobalBatchSize"]), gpus)
    if local_batch != micro_batch * int(row["GradAccum"]):
        raise ValueError(f"{row['GradAccum']} microbatches of {micro_batch} must be {local_batch} sequences")
    if row["ActivationCPUOffload"] != "False":
        raise ValueError("activations are offloaded, which no field describes")
    shape = mpt.CONFIGS[f"mpt_{row['Model']}"]
    return TrainingRun(
        dataset=dataset,
        line=line,
        name=f"mpt {row['Model']}",
        config=mpt.MPTConfig(positions=sequence, hidden_size=shape.hidden_size, layers=shape.layers, heads=shape.heads),
        sequence=sequence,
        local_batch=local_batch,
        micro_batch=micro_batch,
        mesh=_make_mesh(gpus, fsdp=gpus),
        device=device,
        node_gbps=gbps,
        precision=row["Precision"],
        gathered_in=gathered,
        reduced_in=reduced,
        checkpointing={"True": "full", "False": "none"}[row["ActivationCheckpointing"]],
        sharding=row["ShardingStrategy"],
        quantity="tokens/s",
        value=float(row["Throughput_T_s"]),
    )


# --- published figures ------------------------------------------------------------------------------------------------

# The source's GPU → device, GPUs per node, Gbit/s between nodes for each GPU, and what differs from the device.
# The Gbit/s of the last two are assumed. Where the source does not say more, a run with stages has micro batch 1, and
# one without (but of torchtitan) one microbatch.
_GPUS: Mapping[str, tuple[str, int, float, dict[str, float]]] = {
    "H100 96GB HBM2e 500W": ("H100 SXM", 8, 400, {"memory_bandwidth": 2.4e12}),
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
    if local_batch is not None and local_batch != _divide_batch(int(row["global_batch"]), replicas):
        raise ValueError(f"{replicas} ranks of {local_batch} sequences must be {row['global_batch']}")
    micro_batch = 1 if local_batch and pp > 1 else local_batch
    quantity = "tokens/s/GPU" if row["tokens_per_s_per_gpu"] else "TFLOP/s/GPU"
    flops = None
    if quantity == "TFLOP/s/GPU" and local_batch is not None:
        flops = _flops_per_step(config, local_batch * replicas, sequence)
    memory = row["peak_memory_gib"]
    return TrainingRun(
        dataset=dataset,
        line=line,
        name=name,
        config=config,
        sequence=sequence,
        local_batch=local_batch,
        micro_batch=micro_batch,
        mesh=_make_mesh(gpus, pp=pp, **{kind or "dp": replicas}, cp=cp, tp=tp),
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
        quantity=quantity,
        value=float(row["tokens_per_s_per_gpu"] or row["tflops_per_gpu"]),
        flops_per_step=flops,
        memory=float(memory) * (1e9 if "Kempner" in row["source"] else 2**30) if memory else None,
        **differences,
    )


def _find_config(name: str, described: str) -> Config:
    """Return the sizes of a model, from its name or from what is in parentheses after it."""
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


# Dataset → its file in `FOLDER`, and the function that reads a row.
DATASETS: Mapping[str, tuple[str, Callable[[str, int, Row], TrainingRun]]] = {
    "single node": ("measured_single_node_a100.csv", read_vtrain),
    "multi node": ("measured_multi_node_a100.csv", read_vtrain),
    "mpt": ("measured_mpt_fsdp.csv", read_mpt),
    "published": ("published_training.csv", read_published),
}
