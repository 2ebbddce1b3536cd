"""Measure the peak memory of one of several processes that train a model together by gloo."""

import time
from functools import partial

import torch
import torch._dynamo  # DTensor would import it in each rank
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fvflops.plan.sharding.tensor_parallel import find_sharding, shard
from fvflops.zoo.llama import Block, Llama, LlamaConfig
from tests.support.measured_memory import compare_steps, measure_steps

CONFIG = LlamaConfig(vocab_size=2048, hidden_size=256, intermediate_size=704, layers=2, heads=8, kv_heads=4)
TOKENS = torch.ones(2, 128, dtype=torch.int64)
OPTIMIZERS = {
    "AdamW": torch.optim.AdamW,
    "foreach": partial(torch.optim.AdamW, foreach=True),
    "fused": partial(torch.optim.AdamW, fused=True),
}


def cross_entropy(result):
    """Return the cross-entropy: of a sum, the gradient would be expanded, which matrix products copy."""
    return nn.functional.cross_entropy(result.flatten(0, 1), TOKENS.flatten())


def split(model, mesh, **options):
    """Shard a model over this program's processes, as `plan_rank` does; the options are FSDP2's."""
    device_mesh = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
    if "tp" in mesh:
        shard(model, device_mesh["tp"], find_sharding(model, sequence=False))
    if "fsdp" in mesh:
        for block in model.layers:
            fully_shard(block, mesh=device_mesh["fsdp"], **options)
        fully_shard(model, mesh=device_mesh["fsdp"], **options)
    return model


def wait_for_workers():
    """Wait after each collective until gloo's thread has dropped its tensors, whose freeing there is not recorded."""

    def longer(wait, seconds):
        def wait_longer(*args):
            result = wait(*args)
            time.sleep(seconds)
            return result

        return wait_longer

    dist.Work.wait = longer(dist.Work.wait, 0.05)
    functional.wait_tensor = longer(functional.wait_tensor, 0.01)


def measure(mesh, optimizer, times=2):
    """Return the most bytes allocated in each of the first steps, besides parameters and inputs."""
    torch.manual_seed(0)
    model = split(Llama(CONFIG), mesh)
    held = {"optimizer": OPTIMIZERS[optimizer](model.parameters())}

    def step():
        held["optimizer"].zero_grad()
        cross_entropy(model(TOKENS)).backward()
        held["optimizer"].step()

    return measure_steps(step, times)


def compare_sharded(processes):
    """Return (predicted, measured) bytes of this process's first two steps, predicted from its sharded model.

    FSDP2 computes in bfloat16 and reduces gradients in float32, and the blocks are checkpointed.
    """
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = split(Llama(CONFIG), {"fsdp": processes}, mp_policy=policy)
    return compare_steps(
        model,
        (TOKENS,),
        loss=lambda result: cross_entropy(result.float()),
        optimizer=torch.optim.AdamW,
        checkpointed=(Block,),
    )


def main(rank, cases):
    wait_for_workers()
    return [measure(mesh, optimizer) for mesh, optimizer in cases], compare_sharded(dist.get_world_size())
