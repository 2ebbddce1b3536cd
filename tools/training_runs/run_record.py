"""A measured training run, as plain data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from fvflops.zoo import llama, megatron_gpt, mpt
from training_runs.measured_llama import FUSED, MeasuredBlock, MeasuredLlamaConfig, build_llama

Row = Mapping[str, str]
Config = megatron_gpt.MegatronGPTConfig | mpt.MPTConfig | llama.LlamaConfig

# Quantities that a run states, with their units.
QUANTITIES = ("step seconds", "tokens/s", "tokens/s/GPU", "TFLOP/s/GPU")
# "selective" is torchtitan's, "attention" Megatron's: attention between its projections is recomputed.
CHECKPOINTING = ("none", "attention", "selective", "every 2", "full")
# Dataset → the file of its rows.
FILES = {
    "single node": "measured_single_node_a100.csv",
    "multi node": "measured_multi_node_a100.csv",
    "mpt": "measured_mpt_fsdp.csv",
    "published": "published_training.csv",
    "runs": "measured_runs.csv",
    "layout study": "layout_study_a100.csv",
}
SHARDING = ("none", "FULL_SHARD", "SHARD_GRAD_OP")


class Parts(NamedTuple):
    """The model of a config, its layer, and the classes whose ops are one kernel."""

    model: Callable[..., nn.Module]
    block: type[nn.Module]
    fused: tuple[type[nn.Module], ...] = ()


PARTS: Mapping[type, Parts] = {
    megatron_gpt.MegatronGPTConfig: Parts(megatron_gpt.MegatronGPT, megatron_gpt.Block, megatron_gpt.FUSED),
    mpt.MPTConfig: Parts(mpt.MPT, mpt.Block),
    llama.LlamaConfig: Parts(llama.Llama, llama.Block),
    MeasuredLlamaConfig: Parts(build_llama, MeasuredBlock, FUSED),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """A measured training run.

    `dataset` is a key of `FILES`, `line` the line of its file. `mesh` is axis → size as in `plan_rank`, outermost
    first, without axes of size 1; a data-parallel rank (an index of dp and fsdp) processes `local_batch` sequences a
    step in microbatches of `micro_batch`, None where that is not known. `device` is a name of configs/devices.yaml;
    `memory_bandwidth` (bytes/s) and `clock`, a share of its clock, are stated where the device has others. `node_gbps`
    are the Gbit/s between nodes for each GPU. Parameters are gathered in `gathered_in` and gradients reduced in
    `reduced_in`, dtypes of torch. `checkpointing` is one of `CHECKPOINTING`, `sharding` of `SHARDING`,
    `virtual_stages` the stages of each pipeline rank, None where that is not known.

    The measurement is `value` of `quantity`, one of `QUANTITIES`; TFLOP/s are of `flops_per_step`, by the source's
    formula. `memory` is the peak of a GPU in bytes, None where it is not stated. The first word of `source` is who
    measured it. With `sharded_optimizer` the data-parallel ranks divide the optimizer (ZeRO-1), and scatter gradients;
    with `all_reduced_in` each gets all of them, reduced in that dtype. `stage_layers` are the layers of each pipeline
    stage where they are not divided evenly. With `recomputes_all` a checkpointed layer is recomputed to its end, as
    before torch 2.1, whose checkpoints stop at the last tensor that the backward pass needs (pytorch/pytorch#96866).
    """

    dataset: str
    source: str
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
    clock: float = 1.0
    sequence_parallel: bool = False
    sharded_optimizer: bool = False
    all_reduced_in: str | None = None
    stage_layers: tuple[int, ...] | None = None
    recomputes_all: bool = False

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
        return f"{FILES[self.dataset]}:{self.line}"

    @property
    def publisher(self) -> str:
        """The first word of the source, which several of its sources share."""
        return self.source.split()[0]

    @property
    def gpus(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def replicas(self) -> int:
        """The number of ranks that process different sequences."""
        return self.mesh.get("dp", 1) * self.mesh.get("fsdp", 1)

    @property
    def microbatches(self) -> int | None:
        if self.local_batch is None or self.micro_batch is None:
            return None
        return self.local_batch // self.micro_batch

    @property
    def tokens(self) -> int | None:
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
        with torch.device("meta"):
            return PARTS[type(self.config)].model(self.config)


def make_mesh(gpus: int, **sizes: int) -> dict[str, int]:
    """Return the axes of more than one rank, outermost first; their product must be the number of GPUs."""
    if math.prod(sizes.values()) != gpus:
        raise ValueError(f"{' x '.join(f'{axis} {size}' for axis, size in sizes.items())} must be {gpus} GPUs")
    return {axis: size for axis, size in sizes.items() if size > 1} or {"dp": 1}


def divide_batch(global_batch: int, replicas: int) -> int:
    if global_batch % replicas:
        raise ValueError(f"a global batch of {global_batch} must be divisible by {replicas} data-parallel ranks")
    return global_batch // replicas
