"""The work of one of four processes that talk by gloo: models of each family, divided in each way, and recorded."""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from fvflops import FlopCountAnalysis, load_table, record_call
from fvflops.plan.communication import read_communication
from fvflops.plan.sharding.expert_parallel import divide, shard_experts_fully, without_experts
from fvflops.plan.sharding.tensor_parallel import find_sharding, shard
from fvflops.trace import Trace
from fvflops.zoo import build
from tests.support.models.small_transformers import EXPERTS, HEADS, NAMES, TOP_K, build_small
from tests.support.processes.layout_worker import COMPARED, Family, make_mesh, record_step
from tests.support.processes.layout_worker import TOKENS as MICROBATCH
from tests.support.processes.rank_worker import keep_stage
from tests.support.schemas.torchvision_schemas import define_torchvision_schemas
from tests.support.trace_comparison import transfers

TOKENS = torch.arange(2 * 16).view(2, 16)

Mesh = dict[str, int]


def apply(model: nn.Module, mesh: Mesh, *, sequence: bool = False) -> nn.Module:
    """Divide a model as a plan does; its router decides by value which expert gets which token."""
    device_mesh = make_mesh(mesh)
    if mesh.get("tp", 1) > 1:
        sharding = find_sharding(model, sequence=sequence)
        shard(model, device_mesh["tp"], without_experts(model, sharding, mesh))
    if mesh.get("ep", 1) > 1:
        shard_experts_fully(divide(model, device_mesh, mesh, rank=dist.get_rank()))
    blocks = model.get_submodule("layers" if hasattr(model, "layers") else "model.layers")
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
CASES = {
    "zoo ep": (lambda: build("mixtral_tiny"), apply, {"fsdp": 4, "ep": 2}, False),
    "zoo ep sequence": (lambda: build("mixtral_tiny"), apply, {"fsdp": 2, "tp": 2, "ep": 2}, True),
    "zoo ep etp": (lambda: build("mixtral_tiny"), apply, {"fsdp": 2, "tp": 2, "ep": 2, "etp": 2}, False),
    "zoo tp": (lambda: build("mixtral_tiny"), apply, {"fsdp": 2, "tp": 2}, False),
    **{
        f"{name} tp": (partial(build_small, name, "cpu", num_key_value_heads=HEADS), distribute, {"tp": 4}, False)
        for name in NAMES
    },
    **{
        f"{name} ep": (partial(build_small, name, "cpu"), apply, {"fsdp": 4, "ep": 2}, False)
        for name in ("mixtral", "qwen3_moe", "deepseek_v3")
    },
    "deepseek_v3 ep tp": (lambda: build_small("deepseek_v3", "cpu"), apply, {"fsdp": 2, "tp": 2, "ep": 4}, False),
}

# Of gradients after the last microbatch, outside of autograd's engine: not recorded as backward.
REDUCTION = ("_reduce_scatter_base_", "div")
# In training steps each expert gets as many tokens, as a plan assumes.
CHOSEN = torch.arange(MICROBATCH.numel() * TOP_K).view(-1, TOP_K) % EXPERTS
LAYOUTS = {
    "accumulation": ({"fsdp": 2}, {"microbatches": 2}),
    "stages": ({"pp": 2, "fsdp": 2}, {"microbatches": 2}),
    "interleaved": ({"pp": 2, "fsdp": 2}, {"microbatches": 2, "schedule": "interleaved"}),
    "tp stages": ({"pp": 2, "tp": 2}, {"microbatches": 2}),
    "expert stages": ({"pp": 2, "fsdp": 2, "ep": 2}, {"microbatches": 2}),
    "sequence stages": ({"pp": 2, "tp": 2}, {"microbatches": 2, "sequence_parallel": True}),
}
MIXTURES = ("mixtral", "qwen3_moe", "deepseek_v3", "zoo mixtral")
STEPS = [
    *((family, layout) for family in ("llama", "qwen3", *MIXTURES) for layout in list(LAYOUTS)[:4]),
    *((family, "expert stages") for family in MIXTURES),
    *((f"zoo {name}", "sequence stages") for name in ("llama", "mixtral")),  # transformers has no plan for it
    ("zoo llama", "tp stages"),
    ("qwen3 sliding", "stages"),
]


def make_family(name: str, layout: str) -> Family:
    """Return a family with as many layers as the layout has stages, at least two."""
    layers = 4 if layout == "interleaved" else 2
    if name.startswith("zoo "):
        return Family(lambda: build(f"{name.removeprefix('zoo ')}_tiny", layers=layers), layers, keep_stage_of_zoo)
    # The first layer has full attention, the second attention in a window.
    windows = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1} if "sliding" in name else {}
    make = partial(build_small, name.split()[0], "cpu", num_hidden_layers=layers, **windows)
    return Family(make, layers, keep_stage_of_transformers)


def keep_stage_of_zoo(model: nn.Module, stage: int, counts: Sequence[int]) -> None:
    keep_stage(model, stage, counts)
    for name, module in model.named_modules():
        if name.endswith("mlp.router"):
            module.register_forward_hook(lambda _, args, result: (result[0], CHOSEN))


def keep_stage_of_transformers(model: Any, stage: int, counts: Sequence[int]) -> None:
    """Reduce a model to a stage as transformers does, layers keeping their index; its argument is a hidden state."""
    from transformers.distributed.pipeline_parallel import PipelineIdentityLayer

    end = sum(counts[: stage + 1])
    others = [f"model.layers.{index}" for index in range(sum(counts)) if not end - counts[stage] <= index < end]
    first, last = ["model.embed_tokens"], ["model.norm", "lm_head"]
    for path in (*others, *(first if stage > 0 else []), *(last if end < sum(counts) else [])):
        model.set_submodule(path, PipelineIdentityLayer())
    argument, forward = "inputs_embeds" if stage else "input_ids", model.forward
    model.forward = lambda x: forward(**{argument: x}, use_cache=False).logits
    for name, module in model.named_modules():
        if name.endswith("mlp.experts"):
            module.register_forward_pre_hook(lambda _, args: (args[0], CHOSEN, *args[2:]))


def watch_routing(model: nn.Module) -> dict[str, tuple[torch.Tensor, int]]:
    """Return a dict that gets the experts that each token is sent to, and their number, by the name of the experts."""
    chosen = {}
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
    """Return how many tokens a rank sends to each expert: with ep and without etp, the tokens of its slice over tp."""
    tp = mesh.get("tp", 1) if mesh.get("etp", 1) == 1 else 1
    return torch.bincount(chosen.chunk(tp)[rank % tp].flatten(), minlength=number).tolist()


def describe_work(trace: Trace) -> dict[str, Any]:
    """Return the multiply-adds of a step, its FLOPs by op, and the calls and bytes of what it communicates."""
    analysis = FlopCountAnalysis.from_trace(trace, table="exact", warn=False)
    phases = analysis.by_phase()
    forward = {label: flops for label, flops in phases["forward"].items() if label not in REDUCTION}
    moved = sorted([*key, *volume] for key, volume in transfers(read_communication(trace)).items())
    flops = sum(phases.values(), Counter())
    return {"macs": analysis.macs(), "forward": forward, "flops": dict(flops), "transfers": moved}


def sum_of(result):
    return (result if isinstance(result, torch.Tensor) else result.logits).sum()


def prepare():
    define_torchvision_schemas()
    import_module("transformers.distributed.pipeline_parallel")
    for name in NAMES:
        build_small(name)


def main(rank: int, names: list[str], family_layouts: list[list[str]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return case → what this rank sends to each expert and its trace, and step → the work of this rank."""
    passes = {}
    for name in names:
        make, divide_model, mesh, sequence = CASES[name]
        torch.manual_seed(0)
        model = make()
        chosen = watch_routing(model)
        model = divide_model(model, mesh, **({"sequence": True} if sequence else {}))
        kwargs = {} if name.startswith("zoo") else {"use_cache": False}
        # Each rank with other data has other tokens.
        inputs = (TOKENS + 37 * (rank // mesh.get("tp", 1))) % 256
        sum_of(model(inputs, **kwargs)).backward()  # a recording would restore the dict
        model.zero_grad()
        passes[name] = [{key: count_sent(*value, mesh, rank) for key, value in chosen.items()}]
        if rank in COMPARED:
            stops_at = load_table("exact").stops_at
            trace = record_call(model, (inputs,), kwargs, loss=sum_of, execution="real", stops_at=stops_at)
            passes[name].append(trace.to_json())
        else:
            sum_of(model(inputs, **kwargs)).backward()
    steps = {tuple(step): record_step(make_family(*step), *LAYOUTS[step[1]]) for step in family_layouts}
    return passes, {" ".join(step): describe_work(trace) for step, trace in steps.items() if trace is not None}
