"""The work of one of two ranks that train by Accelerate and record their steps."""

import os

import torch
from torch import nn

from fvflops.integrations.accelerate import FlopsRecording


def prepare():
    import accelerate.optimizer  # noqa: F401


def main(rank, folder):
    from accelerate import Accelerator

    # Accelerate finds the process group that there is by these.
    os.environ |= {"WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # not used: the group exists
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    loader = torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters()), loader)
    assert isinstance(model, nn.parallel.DistributedDataParallel)
    with FlopsRecording(accelerator, model, path=folder) as run:
        for batch in loader:
            accelerator.backward(model(batch).sum())
            optimizer.step()
            optimizer.zero_grad()
            run.step()
