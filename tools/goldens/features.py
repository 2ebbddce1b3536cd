"""Training steps and recordings."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import fvflops
from fvflops import zoo
from goldens import nets
from goldens.expressions import break_lines, evaluate, quieten
from goldens.jobs import Folder, Job
from tests.support.models.whole_models import MODELS

# Models of which a training step is counted.
_TRAINED = (
    *("toy", "unused", "small_einsum", "zoo:lenet5", "zoo:resnet50", "zoo:gpt2", "zoo:llama_tiny"),
    *("torchvision:mobilenet_v2", "torchvision:efficientnet_b0", "torchvision:densenet121", "torchvision:swin_t"),
    *("timm:mixer_s32_224", "timm:convit_tiny", "transformers:BertModel", "transformers:LlamaModel"),
)


def jobs() -> list[Job]:
    trained = [Job(f"training/{name.replace(':', '_')}", partial(_train, name)) for name in _TRAINED]
    return [*trained, Job("features/training/options", _train_options), Job("features/record", _record)]


def add_up(result: Any) -> torch.Tensor:
    """Return the sum of all tensors of a result that have a gradient."""
    if isinstance(result, torch.Tensor):
        return result.float().sum()
    values = result.values() if isinstance(result, Mapping) else result
    return sum(
        (add_up(value) for value in values if isinstance(value, torch.Tensor) and value.requires_grad), torch.zeros(())
    )


def _tell_step(step: Any) -> str:
    return evaluate("step", step=quieten(step))


def _train(name: str, folder: Folder) -> None:
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    model.train()
    for table in ("default", "exact", "fvcore"):
        step = fvflops.TrainingStepAnalysis(model, inputs, loss=add_up, optimizer=torch.optim.AdamW, table=table)
        folder.write(f"{table}.txt", _tell_step(step))
    step = quieten(fvflops.TrainingStepAnalysis(model, inputs, loss=add_up, optimizer=torch.optim.SGD))
    trace = step.trace()
    activations = quieten(fvflops.ActivationCountAnalysis.from_trace(trace))
    moved = quieten(fvflops.ByteCountAnalysis.from_trace(trace))
    folder.write("more.txt", evaluate("training", step=step, activations=activations, moved=moved))
    folder.write("trace.json", break_lines(trace.to_json()))


def _train_options(folder: Folder) -> None:
    def step(of: tuple[Any, Any], **options: Any) -> str:
        return _tell_step(fvflops.TrainingStepAnalysis(of[0].train(), of[1], loss=add_up, **options))

    def groups(parameters: Any) -> Any:
        weights = [parameter for parameter in parameters if parameter.ndim > 1]
        others = [parameter for parameter in parameters if parameter.ndim <= 1]
        return torch.optim.AdamW([{"params": weights, "name": "weights"}, {"params": others, "name": "others"}])

    llama: Any = zoo.build("llama3_8b", device="meta").bfloat16(), torch.zeros(1, 512, dtype=torch.long)
    models = {"net": nets.net(), "encoder": nets.encoder(), "llama": llama, "block": type(llama[0].layers[0])}
    folder.write("options.txt", evaluate("training options", step=step, groups=groups, **models))


def _record(folder: Folder) -> None:
    def loop(*, steps: int = 3, told: bool = True, **options: Any) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 10))
        optimizer = torch.optim.AdamW(model.parameters())
        with fvflops.record(model, **options) as run:
            for number in range(steps):
                x = torch.randn(8 * (number + 1), 64)
                F.cross_entropy(model(x), torch.zeros(len(x), dtype=torch.long)).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                if told:
                    run.step()
        return quieten(run)

    def nested() -> list[str]:
        model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.ones(2, 8)
        y = model(x)
        with fvflops.record(model) as outer:
            y.sum().backward()
            with fvflops.record(model[0]) as inside:
                model(x)
            torch.ones(3, 3) @ torch.ones(3, 3)
        return [_tell_step(outer), _tell_step(inside)]

    def broken() -> list[Any]:
        model = nn.Linear(4, 4)
        run = fvflops.record(model)
        try:
            with run:
                model(torch.ones(2, 4))
                model(torch.ones(2, 5))
        except RuntimeError as error:
            text = str(error)
        return [text, run.trace().complete, _tell_step(run)]

    def function() -> str:
        with fvflops.record(None, table="exact") as run:
            x = torch.ones(4, 5, requires_grad=True)
            (torch.fft.fft(x).abs() @ torch.ones(5, 2)).softmax(-1).sum().backward()
        return _tell_step(run)

    def per_step(run: Any) -> list[Any]:
        return [len(run.steps), run.step_num, run.per_step()]

    names = {"nested": nested, "broken": broken, "function": function, "per_step": per_step}
    folder.write("record.txt", evaluate("recordings", loop=loop, tell=_tell_step, **names))
    folder.write("trace.json", break_lines(loop(steps=2).trace().to_json()))
