"""Measured training runs: the rows of tests/data/training_times/runs.csv, as plain data."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from torch import nn

from fvflops.zoo import llama, megatron_gpt, mpt
from training_runs.measured_llama import FUSED, MeasuredBlock, MeasuredLlamaConfig, build_llama

FOLDER = Path(__file__).resolve().parents[2] / "tests" / "data" / "training_times"
RUNS = FOLDER / "runs.csv"
Config = megatron_gpt.MegatronGPTConfig | mpt.MPTConfig | llama.LlamaConfig


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
_KINDS: Mapping[str, Callable[..., Config]] = {config.__name__: config for config in PARTS}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """A measured training run, of line `line` of runs.csv.

    The first word of `source` is who measured it. `mesh` is axis → size as in `plan_rank`, outermost first, without
    axes of size 1; a data-parallel rank (an index of dp and fsdp) processes `microbatches` of `micro_batch` sequences a
    step, None where these are not known. `seconds` are of a step: None where the source states a rate without the
    batch, infinite where it ran out of memory. `memory` is what torch reserves on a GPU in bytes, `kernel` the source's
    name of the attention. `memory_bandwidth` (bytes/s) and `clock`, a share of the device's, are stated where the
    device has others. `node_gbps` are the Gbit/s between nodes for each GPU. Parameters are in `precision`, gradients
    reduced in `reduced_in`. `checkpointing` is "none", "full", "every 2", torchtitan's "selective" or Megatron's
    "attention", which recomputes attention between its projections. With `reshards` FSDP frees parameters after the
    forward pass; with `sharded_optimizer` the data-parallel ranks divide the optimizer (ZeRO-1), and scatter gradients;
    with `all_reduced_in` each gets all of them, reduced in that dtype. `virtual_stages` are the pipeline stages of a
    rank, `stage_layers` the layers of each stage where they are not divided evenly. With `recomputes_all` a
    checkpointed layer is recomputed to its end, as before torch 2.1, whose checkpoints stop at the last tensor that the
    backward pass needs (pytorch/pytorch#96866). The figures of `software` in configs/efficiencies.yaml predict the run,
    and are fitted to it if it `is_fitted`.
    """

    source: str
    line: int
    name: str
    config: Config
    sequence: int
    mesh: Mapping[str, int]
    device: str
    node_gbps: int
    precision: str
    reduced_in: str
    software: str
    micro_batch: int | None = None
    microbatches: int | None = None
    seconds: float | None = None
    memory: float | None = None
    kernel: str = ""
    is_fitted: bool = False
    checkpointing: str = "none"
    reshards: bool = False
    gpus_per_node: int = 8
    virtual_stages: int = 1
    compiled: bool = False
    memory_bandwidth: float | None = None
    clock: float = 1.0
    sequence_parallel: bool = False
    sharded_optimizer: bool = False
    all_reduced_in: str | None = None
    stage_layers: tuple[int, ...] | None = None
    recomputes_all: bool = False

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

    def __str__(self) -> str:
        return f"{RUNS.name}:{self.line}: {self.name} on {self.device}"

    def build_model(self) -> nn.Module:
        with torch.device("meta"):
            return PARTS[type(self.config)].model(self.config)


@cache
def read_runs() -> tuple[TrainingRun, ...]:
    """Return all runs, also ones that ran out of memory."""
    known = yaml.safe_load((FOLDER / "sources.yaml").read_text())
    with RUNS.open(newline="") as file:
        rows = csv.DictReader(file)
        return tuple(_read_run(rows.line_num, row, known["sources"], known["models"]) for row in rows)


def _read_run(line: int, row: Mapping[str, str], sources: Mapping[str, Any], models: Mapping[str, Any]) -> TrainingRun:
    fields = {**sources[row["source"]], **{name: _read(cell) for name, cell in row.items() if cell}}
    config = {**sources[row["source"]]["config"], **models.get(row["name"], {}), **_read_pairs(row["config"])}
    layers = tuple(map(int, row["stage_layers"].split())) or None
    fields |= {"config": _KINDS[config.pop("kind")](**config), "mesh": _read_pairs(row["mesh"]), "stage_layers": layers}
    return TrainingRun(line=line, **fields)


def _read_pairs(text: str) -> dict[str, Any]:
    return {name: _read(value) for name, _, value in (pair.partition("=") for pair in text.split())}


def _read(text: str) -> Any:
    """Return a number, a bool or a text.

    >>> _read("8"), _read("0.5"), _read("True"), _read("bf16")
    (8, 0.5, True, 'bf16')
    """
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text == "True" if text in ("True", "False") else text
