"""The work of one of two processes that train a sharded or replicated model by gloo under a StepMeter."""

from collections import Counter
from dataclasses import asdict, astuple
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fvflops import Device, StepMeter, mfu
from tests.support.models.parts import Parts

RANKS, STEPS, WIDTH = 2, 3, 16
CHIP = Device("chip", matrix={"fp32": 10**15})


def rows_of(rank: int) -> int:
    return 4 * (rank + 1)


class TwoLayers(Parts):
    """Two layers, in a class of its own: torch.compile skips frames of torch.nn."""

    def forward(self, x):
        return self.second(nn.functional.gelu(self.first(x)))


def make_model():
    """Return a model with the same parameters each time."""
    torch.manual_seed(0)
    return TwoLayers(first=nn.Linear(WIDTH, WIDTH), second=nn.Linear(WIDTH, WIDTH))


def wrap(model: nn.Module, case: str, graphs: list[str]) -> nn.Module:
    """Return a model as it is trained; to `graphs` a compiled one adds "compiled" or "run" for each graph."""
    if case == "fsdp2":
        for layer in model.children():
            fully_shard(layer)
        fully_shard(model)
        return model
    if case == "compiled ddp":

        def backend(graph, inputs):
            graphs.append("compiled")

            def run_graph(*args):
                graphs.append("run")
                return graph.forward(*args)

            return run_graph

        return torch.compile(DistributedDataParallel(model), backend=backend)
    return DistributedDataParallel(model)


def run(case: str, rank: int, metered: bool) -> tuple[list[torch.Tensor], dict]:
    """Return the parameters after a training, and what the meter found."""
    graphs = []
    model = wrap(make_model(), case, graphs)
    optimizer = torch.optim.AdamW(model.parameters())
    meter = StepMeter(model, optimizer=optimizer, device=CHIP) if metered else None
    collectives = []
    gather = dist.all_gather_object
    dist.all_gather_object = lambda *args, **kwargs: collectives.append(1) or gather(*args, **kwargs)
    try:
        for _ in range(STEPS):
            if meter is not None:
                meter.begin()
            model(torch.ones(rows_of(rank), WIDTH)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if meter is not None:
                meter.end()
        assert not collectives  # in the loop
        found = {"graphs": dict(Counter(graphs))}
        if meter is not None:
            meter.close()
            alone, summary = meter.summary(), meter.summary(gather=True)
            assert len(collectives) == 1 and [*map(str, map(astuple, alone.ranks))] == [
                str(astuple(summary.ranks[rank]))
            ]
            found |= {"steps": [asdict(step) for step in meter.steps], "ranks": [asdict(one) for one in summary.ranks]}
            found |= {"total": asdict(summary.total), "mfu": mfu(summary, device=CHIP, dtype="fp32")}
            found |= {"predicted": summary.memory_predicted, "text": str(summary)}
    finally:
        dist.all_gather_object = gather
    parameters = [parameter.full_tensor() if case == "fsdp2" else parameter for parameter in model.parameters()]
    return [parameter.detach() for parameter in parameters], found


def main(rank: int) -> dict[str, Any]:
    results = {}
    for case in ("ddp", "compiled ddp", "fsdp2"):
        torch._dynamo.reset()
        plain, unmetered = run(case, rank, metered=False)
        torch._dynamo.reset()
        metered, results[case] = run(case, rank, metered=True)
        results[case]["graphs without a meter"] = unmetered["graphs"]
        results[case]["equal"] = all(torch.equal(a, b) for a, b in zip(plain, metered, strict=True))
    return results
