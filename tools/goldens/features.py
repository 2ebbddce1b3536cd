"""Training steps and recordings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import fvflops
from fvflops import zoo
from goldens import nets
from goldens.counts import break_lines, quieten, sections, tell_analysis
from goldens.jobs import Folder, Job
from goldens.showing import show
from tests.support.models.whole_models import MODELS

# Of these a training step is counted.
_TRAINED = (
    *("toy", "unused", "small_einsum", "zoo:lenet5", "zoo:resnet50", "zoo:gpt2", "zoo:llama_tiny"),
    *("torchvision:mobilenet_v2", "torchvision:efficientnet_b0", "torchvision:densenet121", "torchvision:swin_t"),
    *("timm:mixer_s32_224", "timm:convit_tiny", "transformers:BertModel", "transformers:LlamaModel"),
)
_OPTIMIZERS: Mapping[str, Any] = {
    "SGD": torch.optim.SGD,
    "AdamW": torch.optim.AdamW,
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "Adafactor": torch.optim.Adafactor,
}
_PHASES = ("forward", "recompute", "backward", "optimizer")


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
    lines = [f"macs {phase} {step.macs(phase=phase)}" for phase in _PHASES]
    lines += ["", *tell_analysis("flops", step, by_module=True), ""]
    for phase, labels in step.by_phase().items():
        lines += [f"phase {phase} {sum(labels.values())}", *(f"  {label} {value}" for label, value in labels.items())]
    lines.append("modules by phase")
    for name, phases in step.by_module_and_phase().items():
        if any(phases.values()):
            lines.append(f"  {name or '(model)'} " + " ".join(f"{phase}={value}" for phase, value in phases.items()))
    lines += ["parameter groups", show(step.by_parameter_group()), "dtypes", show(step.by_dtype())]
    return "\n".join(lines)


def _train(name: str, folder: Folder) -> None:
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    model.train()
    for table in ("default", "exact", "fvcore"):
        step = fvflops.TrainingStepAnalysis(model, inputs, loss=add_up, optimizer=torch.optim.AdamW, table=table)
        folder.write(f"{table}.txt", sections({"step": partial(_tell_step, quieten(step))}))
    step = quieten(fvflops.TrainingStepAnalysis(model, inputs, loss=add_up, optimizer=torch.optim.SGD))
    trace = step.trace()
    activations = quieten(fvflops.ActivationCountAnalysis.from_trace(trace))
    moved = quieten(fvflops.ByteCountAnalysis.from_trace(trace))
    texts: dict[str, Callable[[], Any]] = {
        "activations": lambda: "\n".join(tell_analysis("activations", activations, by_module=False)),
        "bytes": lambda: "\n".join(tell_analysis("bytes", moved, by_module=False)),
        "bytes by phase": lambda: show(moved.by_phase()),
        "table": lambda: fvflops.flop_count_table(step, 2, activations),
        "memory": lambda: _tell_memory(fvflops.predict_memory(step)),
        "memory of the first step": lambda: _tell_memory(fvflops.predict_memory(step, first_step=True)),
        "roofline": lambda: show(fvflops.roofline(step, device="H100").by_phase()),
    }
    folder.write("more.txt", sections(texts))
    folder.write("trace.json", break_lines(trace.to_json()))


def _tell_memory(timeline: Any) -> str:
    curve = timeline.curve()
    lines = [
        f"device {timeline.device}, granularity {timeline.granularity}",
        f"baseline {timeline.baseline}, peak {timeline.peak}",
        f"at the peak: {show(timeline.at_peak())}",
        f"by phase: {show(timeline.by_phase())}",
        f"unseen: {show(dict(timeline.unseen))}",
        f"{len(timeline.blocks)} blocks, of {sum(block.nbytes for block in timeline.blocks)} bytes together",
        f"{len(curve)} events, whose sum is {sum(curve)}",
    ]
    return "\n".join(lines)


def _train_options(folder: Folder) -> None:
    def step(model: Any, inputs: Any, **options: Any) -> str:
        return _tell_step(quieten(fvflops.TrainingStepAnalysis(model.train(), inputs, loss=add_up, **options)))

    def groups(parameters: Any) -> Any:
        weights = [parameter for parameter in parameters if parameter.ndim > 1]
        others = [parameter for parameter in parameters if parameter.ndim <= 1]
        return torch.optim.AdamW([{"params": weights, "name": "weights"}, {"params": others, "name": "others"}])

    net, x = nets.net()
    encoder, y = nets.encoder()
    tokens = torch.zeros(1, 512, dtype=torch.long)
    llama: Any = zoo.build("llama3_8b", device="meta").bfloat16()
    block = type(llama.layers[0])
    texts: dict[str, Callable[[], Any]] = {
        **{f"optimizer {name}": partial(step, net, x, optimizer=maker) for name, maker in _OPTIMIZERS.items()},
        "no optimizer": partial(step, net, x),
        "parameter groups": partial(step, net, x, optimizer=groups),
        "two optimizers": partial(step, net, x, optimizer=[torch.optim.SGD, torch.optim.Adam]),
        "micro batches": partial(step, net, x, micro_batches=4, optimizer=torch.optim.SGD),
        "checkpoint by class": partial(step, encoder, y, checkpoint=[nn.TransformerEncoderLayer]),
        "checkpoint by name": partial(step, encoder, y, checkpoint=["layers.1"]),
        "checkpoint, reentrant": partial(
            step, encoder, y, checkpoint=["layers.1"], checkpoint_options={"use_reentrant": True}
        ),
        "Llama 3 8B": partial(step, llama, tokens, optimizer=torch.optim.AdamW, checkpoint=[block], table="exact"),
        "on CUDA": partial(step, encoder, y, device="cuda"),
    }
    folder.write("options.txt", sections(texts))


def _record(folder: Folder) -> None:
    def loop(*, steps: int = 3, told: bool = True, shapes: bool = False, **options: Any) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 10))
        optimizer = torch.optim.AdamW(model.parameters())
        execution = "shapes" if shapes else "real"
        with fvflops.record(model, execution=execution, **options) as run:
            for number in range(steps):
                x = torch.randn(8 * (number + 1), 64)
                F.cross_entropy(model(x), torch.zeros(len(x), dtype=torch.long)).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                if told:
                    run.step()
        return quieten(run)

    def nested() -> str:
        model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.ones(2, 8)
        y = model(x)
        with fvflops.record(model) as outer:
            y.sum().backward()
            with fvflops.record(model[0]) as inside:
                model(x)
            torch.ones(3, 3) @ torch.ones(3, 3)
        return f"{_tell_step(quieten(outer))}\n\n{_tell_step(quieten(inside))}"

    def broken() -> str:
        model = nn.Linear(4, 4)
        run = fvflops.record(model)
        try:
            with run:
                model(torch.ones(2, 4))
                model(torch.ones(2, 5))
        except RuntimeError as error:
            text = str(error)
        return f"{text}\ncomplete {run.trace().complete}\n{_tell_step(quieten(run))}"

    def eager(**options: Any) -> str:
        run = loop(**options)
        return f"{run.per_step()}\n{len(run.steps)} steps recorded of {run.step_num}\n{show(run.per_step())}"

    texts: dict[str, Callable[[], Any]] = {
        "one step": lambda: _tell_step(loop(steps=1, told=False)),
        "steps": lambda: _tell_step(loop(table="exact")),
        "per step": eager,
        "per step by shapes": lambda: eager(shapes=True),
        "schedule": lambda: eager(steps=6, schedule=fvflops.schedule(wait=1, warmup=1, active=2, repeat=1)),
        "no model": lambda: _record_function(),
        "nested, and a graph of before": nested,
        "broken": broken,
        "table": lambda: fvflops.flop_count_table(loop(table="exact"), show_param_shapes=False),
        "str": lambda: fvflops.flop_count_str(loop()),
        "merged": lambda: show(
            fvflops.FlopCountAnalysis.from_trace(fvflops.Trace.merge(loop().steps)).by_module_and_phase()
        ),
    }
    folder.write("record.txt", sections(texts))
    folder.write("trace.json", break_lines(loop(steps=2).trace().to_json()))


def _record_function() -> str:
    with fvflops.record(None, table="exact") as run:
        x = torch.ones(4, 5, requires_grad=True)
        (torch.fft.fft(x).abs() @ torch.ones(5, 2)).softmax(-1).sum().backward()
    return _tell_step(quieten(run))
