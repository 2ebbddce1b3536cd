"""Train a Megatron GPT and an MPT as one of two processes that divide each layer, by gloo, and as one process alone."""

from copy import deepcopy

import torch
import torch._dynamo  # DTensor would import it in each rank
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fvflops import FlopCountAnalysis, load_table, record_call
from fvflops.plan.communication import read_communication
from fvflops.plan.sharding.tensor_parallel import find_sharding, shard
from fvflops.zoo import build

RANKS = 2
TOKENS = torch.arange(32).reshape(2, 16) * 7 % 256
LABELS = torch.arange(32).reshape(2, 16) * 5 % 256
CASES = {
    f"{name}{' sequence' * sequence}": (name, sequence)
    for name in ("megatron_gpt_tiny", "mpt_tiny")
    for sequence in (False, True)
}
SIZES = {"megatron_gpt_tiny": {"hidden_dropout": 0.0, "attention_dropout": 0.0}, "mpt_tiny": {}}


def group_by_rank(name, tensor):
    """Return the rows of MPT's queries, keys and values as its ranks hold them."""
    return tensor.unflatten(0, (3, RANKS, -1)).transpose(0, 1).flatten(0, 2) if "Wqkv" in name else tensor


def run_case(mesh, name, sequence):
    model = build(name, **SIZES[name])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
    expected = model(TOKENS, LABELS)
    gradients = torch.autograd.grad(expected, list(model.parameters()))
    expected_gradients = {
        key: group_by_rank(key, gradient)
        for (key, _), gradient in zip(model.named_parameters(), gradients, strict=True)
    }
    divided = deepcopy(model)
    with torch.no_grad():
        for key, parameter in divided.named_parameters():
            parameter.copy_(group_by_rank(key, parameter.clone()))
    shard(divided, mesh, find_sharding(divided, sequence=sequence))
    loss = divided(TOKENS, LABELS)
    loss.backward()
    distance = {"loss": (loss - expected).abs().item()}
    for key, parameter in divided.named_parameters():
        gradient = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        distance[key] = (gradient - expected_gradients[key]).abs().max().item()
    divided.zero_grad()
    stops_at = load_table("default").stops_at
    trace = record_call(divided, (TOKENS, LABELS), loss=lambda result: result, execution="real", stops_at=stops_at)
    return {"loss": loss.item(), "distance": distance, **describe_work(trace)}


def describe_work(trace):
    volumes = read_communication(trace).by_collective_and_group()
    return {
        "macs": FlopCountAnalysis.from_trace(trace, warn=False).macs(),
        "payloads": {key.collective: [volume.calls, volume.payload] for key, volume in volumes.items()},
    }


def main(rank):
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    return {case: run_case(mesh, *arguments) for case, arguments in CASES.items()}
