"""Write chrome traces of training steps with torch.profiler alone, in one of several ranks.

A rank writes FOLDER/ddp_RANK.json and FOLDER/fsdp_RANK.json. The first then writes, as a process alone,
FOLDER/NAME.json for each of MODELS, one of them compressed, one without shapes and one with stacks.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile, schedule

from fvflops.zoo.gpt2 import GPT2, GPT2Config
from fvflops.zoo.llama import Llama, LlamaConfig
from fvflops.zoo.resnet50 import ResNet50


def make_resnet50() -> tuple[nn.Module, torch.Tensor]:
    """Return the first block of each stage, which has the shortcut's convolution."""
    model = ResNet50()
    for stage in (model.layer1, model.layer2, model.layer3, model.layer4):
        del stage[1:]
    return model, torch.randn(2, 3, 32, 32)


def make_gpt2() -> tuple[nn.Module, torch.Tensor]:
    return GPT2(GPT2Config(vocab_size=512, width=128, layers=4, heads=4)), torch.randint(0, 512, (2, 32))


def make_llama() -> tuple[nn.Module, torch.Tensor]:
    config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=176, layers=2, heads=4, kv_heads=2)
    return Llama(config), torch.randint(0, 256, (2, 32))


MODELS = {"resnet50": make_resnet50, "gpt2": make_gpt2, "llama": make_llama}
STEPS = 2


def write_trace(path, model, parameters, x, **options):
    optimizer = torch.optim.AdamW(parameters)
    steps = schedule(wait=0, warmup=1, active=STEPS, repeat=1)
    with profile(activities=[ProfilerActivity.CPU], schedule=steps, **options) as profiler:
        for _ in range(1 + STEPS):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    profiler.export_chrome_trace(str(path))


def write_alone(folder):
    for name, make in MODELS.items():
        model, x = make()
        options = {"record_shapes": name != "resnet50", "with_stack": name == "llama"}
        suffix = ".json.gz" if name == "gpt2" else ".json"
        write_trace(folder / f"{name}{suffix}", model.train(), model.parameters(), x, **options)


def write_rank(folder: Path, rank: int) -> None:
    torch.distributed.init_device_mesh("cpu", (dist.get_world_size(),))
    model, x = make_gpt2()
    wrapped = nn.parallel.DistributedDataParallel(model.train())
    write_trace(folder / f"ddp_{rank}.json", wrapped, model.parameters(), x, record_shapes=True)
    model, x = make_llama()
    for layer in model.layers:  # type: ignore[union-attr]
        fully_shard(layer)
    fully_shard(model.train())
    write_trace(folder / f"fsdp_{rank}.json", model, model.parameters(), x, record_shapes=True)
    dist.destroy_process_group()


def main(rank: int, folder: str) -> None:
    torch.manual_seed(0)
    write_rank(Path(folder), rank)
    if rank == 0:
        write_alone(Path(folder))
