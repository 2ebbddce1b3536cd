"""The work of one of two ranks that train by Accelerate and record their steps: RANK PORT FOLDER."""

import os
import sys

import torch
from accelerate import Accelerator
from torch import nn

from fvflops.integrations.accelerate import FlopsRecording

if __name__ == "__main__":
    rank, port, folder = sys.argv[1:]
    os.environ |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "LOCAL_RANK": rank}
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
