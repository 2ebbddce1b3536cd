"""The work of one of four processes that talk by gloo: mixtures of experts, divided in each way, and recorded."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fvflops import load_table, record_call
from fvflops.features.communication.ranks import gather
from fvflops.features.planning.parallelism.expert_parallel import (
    dense_axes,
    divide,
    shard_experts_fully,
    without_experts,
)
from fvflops.features.planning.sharding import find_sharding, shard
from fvflops.zoo import build
from tests.support.models.small_transformers import HEADS, build_small
from tests.support.torchvision_schemas import define_torchvision_schemas

RANKS = 4
TOKENS = torch.arange(2 * 16).view(2, 16)

Mesh = dict[str, int]


def apply(model: nn.Module, mesh: Mesh, *, sequence: bool = False) -> nn.Module:
    """Divide a model as a plan does; its router decides by value which expert gets which token."""
    device_mesh = init_device_mesh("cpu", tuple(dense_axes(mesh).values()), mesh_dim_names=tuple(dense_axes(mesh)))
    if mesh.get("tp", 1) > 1:
        sharding = find_sharding(model, sequence=sequence)
        shard(model, device_mesh["tp"], without_experts(model, sharding, mesh))
    if mesh.get("ep", 1) > 1:
        shard_experts_fully(divide(model, device_mesh, mesh, rank=dist.get_rank()))
    blocks: Any = model.get_submodule("layers" if hasattr(model, "layers") else "model.layers")
    for block in blocks:
        fully_shard(block, mesh=device_mesh["fsdp"])
    return fully_shard(model, mesh=device_mesh["fsdp"])


def distribute(model: Any, mesh: Mesh) -> nn.Module:
    """Divide a model of transformers by transformers alone."""
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(tp_size=mesh["tp"])
    config, _, manager = model.prepare_distribute_model(config)
    return type(model).maybe_distribute_model(model, config, manager)


# Name → (the model, how it is divided, the mesh, whether tp divides the sequence).
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[..., nn.Module], Mesh, bool]] = {
    "zoo ep": (lambda: build("mixtral_tiny"), apply, {"fsdp": 4, "ep": 2}, False),
    "zoo ep sequence": (lambda: build("mixtral_tiny"), apply, {"fsdp": 2, "tp": 2, "ep": 2}, True),
    "zoo ep etp": (lambda: build("mixtral_tiny"), apply, {"fsdp": 2, "tp": 2, "ep": 2, "etp": 2}, False),
    "zoo tp": (lambda: build("mixtral_tiny"), apply, {"fsdp": 2, "tp": 2}, False),
    "mixtral tp": (
        lambda: build_small("mixtral", "cpu", num_key_value_heads=HEADS),
        distribute,
        {"tp": 4},
        False,
    ),
    "qwen3_moe ep": (lambda: build_small("qwen3_moe", "cpu"), apply, {"fsdp": 4, "ep": 2}, False),
    "deepseek_v3 ep tp": (lambda: build_small("deepseek_v3", "cpu"), apply, {"fsdp": 2, "tp": 2, "ep": 4}, False),
}


def watch_routing(model: nn.Module) -> dict[str, tuple[torch.Tensor, int]]:
    """Return a dict that gets the experts that each token is sent to, and their number, by the name of the experts."""
    chosen: dict[str, tuple[torch.Tensor, int]] = {}
    for name, module in model.named_modules():
        if name.endswith("mlp.router"):
            key, number = f"{name.removesuffix('router')}experts", module.gate.out_features
            module.register_forward_hook(
                lambda _, args, result, key=key, number=number: chosen.update({key: (result[1], number)})
            )
        elif name.endswith("mlp.experts") and hasattr(module, "num_experts"):
            number = module.num_experts
            module.register_forward_pre_hook(
                lambda _, args, key=name, number=number: chosen.update({key: (args[1], number)})
            )
    return chosen


def count_sent(chosen: torch.Tensor, number: int, mesh: Mesh, rank: int) -> list[int]:
    """Return how many tokens a rank sends to each expert: with ep and without etp, those of its slice over tp."""
    tp = mesh.get("tp", 1) if mesh.get("etp", 1) == 1 else 1
    return torch.bincount(chosen.chunk(tp)[rank % tp].flatten(), minlength=number).tolist()


def sum_of(result: Any) -> torch.Tensor:
    return (result if isinstance(result, torch.Tensor) else result.logits).sum()


def main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    define_torchvision_schemas()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    for name, (make, divide_model, mesh, sequence) in CASES.items():
        torch.manual_seed(0)
        model = make()
        chosen = watch_routing(model)
        model = divide_model(model, mesh, **({"sequence": True} if sequence else {}))
        kwargs = {} if name.startswith("zoo") else {"use_cache": False}
        # Each rank with other data has other tokens.
        inputs = (TOKENS + 37 * (rank // mesh.get("tp", 1))) % 256
        sum_of(model(inputs, **kwargs)).backward()  # a recording would restore the dict
        model.zero_grad()
        trace = record_call(
            model, (inputs,), kwargs, loss=sum_of, execution="real", stops_at=load_table("exact").stops_at
        )
        step = gather(trace, dst=0)
        histograms: list[Any] = [None] * RANKS
        dist.all_gather_object(histograms, {key: count_sent(*value, mesh, rank) for key, value in chosen.items()})
        if rank == 0:
            texts = {number: trace.to_json() for number, trace in step.traces.items()}
            Path(folder, f"{name}.json").write_text(json.dumps([texts, histograms]))
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads may outlive the group


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
