"""What else the public interface answers: training steps, recordings, memory, plans, scaling, differences."""

from __future__ import annotations

import json
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
from goldens.jobs import Folder, Job, captured
from goldens.showing import show, shown
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
    named: dict[str, Callable[[Folder], Any]] = {
        "training/options": _train_options,
        "record": _record,
        "handles": _handles,
        "calls": _calls,
        "memory": _memory,
        "parameters": _parameters,
        "roofline": _roofline,
        "utilisation": _utilise,
        "plan": _plan,
        "scaling": _scale,
        "generation": _generate,
        "diff": _diff,
        "compare": _compare,
        "deepspeed": _deepspeed,
    }
    return [*trained, *(Job(f"features/{name}", run) for name, run in named.items())]


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


def _handles(folder: Folder) -> None:
    model, x = nets.net()

    def analysis(kind: Any = fvflops.FlopCountAnalysis, **options: Any) -> Any:
        return quieten(kind(model, x, **options))

    def tell(found: Any) -> str:
        return "\n".join([*tell_analysis("count", found, by_module=True), show(found.unsupported_ops())])

    texts: dict[str, Callable[[], Any]] = {
        "numbers": lambda: tell(
            analysis(fvflops.ModelAnalysis).set_op_handle("aten::relu", lambda call: call.out.numel)
        ),
        "fvcore's": lambda: tell(analysis().set_op_handle("aten::gelu", lambda inputs, outputs: 7)),
        "ignored": lambda: tell(analysis().set_op_handle("aten::convolution", None, "aten::conv2d", None)),
        "composite": lambda: tell(analysis().set_op_handle(**{"aten::lstm": lambda call: {"a": 1, "b": 2}})),
        "modules": lambda: tell(analysis().set_module_handle(nn.LSTM, lambda call: call.attributes["hidden_size"])),
        "module ignored": lambda: tell(analysis().set_module_handle("torch.nn.MultiheadAttention", None)),
        "cleared": lambda: tell(analysis().clear_op_handles()),
        "by caller": lambda: tell(analysis().ancestor_mode("caller")),
        "no table": lambda: tell(analysis(fvflops.ModelAnalysis)),
        "bytes": lambda: tell(analysis(fvflops.ByteCountAnalysis).set_op_handle("aten::gelu", lambda call: 1)),
        "copy": lambda: tell(analysis().copy(new_inputs=torch.ones(1, 3, 20, 20))),
        "real": lambda: tell(analysis(execution="real", table="exact")),
        "registered": _registered,
    }
    captured(lambda: folder.write("handles.txt", sections(texts)))
    loud: dict[str, Callable[[], Any]] = {
        "uncalled": lambda: fvflops.FlopCountAnalysis(model, x).total(),
        "unknown": lambda: fvflops.FlopCountAnalysis(*nets.unknown()).total(),
        "for real": lambda: fvflops.FlopCountAnalysis(*nets.experts()).total(),
    }
    _, _, err = captured(lambda: folder.write("warned.txt", sections(loud)))
    folder.write("warnings.txt", err)


def _twice(call: Any) -> fvflops.Cost:
    return fvflops.Cost(macs=call.out.numel, flops=1)


def _registered() -> str:
    @torch.library.custom_op("fvflops_golden::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    fvflops.register_formula("golden_twice", _twice)
    with open("twice.yaml", "w") as file:
        file.write("extends: default\nops:\n  fvflops_golden::twice: {use: golden_twice}\n")
    analysis = fvflops.FlopCountAnalysis(lambda x: twice(x), torch.ones(3), table="twice.yaml")
    return f"{analysis.total()} {analysis.macs()} {analysis.by_operator()}"


def _calls(folder: Folder) -> None:
    for name, (model, inputs) in {"net": nets.net(), "encoder": nets.encoder(), "experts": nets.experts()}.items():
        if isinstance(model, nn.Module):
            model.eval()
        flops = quieten(fvflops.FlopCountAnalysis(model, inputs, table="exact", lines=True))
        texts: dict[str, Callable[[], Any]] = {
            "op_table": flops.op_table,
            "op_table, sorted": partial(flops.op_table, sort="flops", top=5),
            "module_call_table": flops.module_call_table,
            "module_call_table, 1": partial(flops.module_call_table, depth=1),
            "line_table": flops.line_table,
            "op_calls": partial(shown, flops.op_calls),
            "module_calls": partial(shown, flops.module_calls),
            "line_counts": partial(shown, flops.line_counts),
            "to_graph": flops.to_graph,
            "summarise": partial(shown, fvflops.summarise, flops),
            "analysis in a notebook": flops._repr_html_,
            "trace in a notebook": flops.trace()._repr_html_,
            **{
                f"to_dict by {by}": partial(_tell_dict, flops, by)
                for by in ("module", "operator", "both", "op", "call", "line")
            },
            "to_pandas": partial(_tell_frame, flops),
            "to_pandas by operator": partial(_tell_frame, flops, by="operator"),
            "aggregated": partial(_tell_aggregated, flops),
        }
        folder.write(f"{name}.txt", sections(texts))
        folder.write(f"{name}.html", flops.to_html())
        folder.write(f"{name}.json", break_lines(flops.trace().to_json()))


def _tell_frame(flops: Any, **options: Any) -> str:
    frame = flops.to_pandas(**options)
    return f"{frame.to_csv()}\n{show(frame.attrs)}"


def _tell_aggregated(flops: Any) -> str:
    again = fvflops.FlopCountAnalysis.from_trace(flops.trace().aggregate(), table="exact")
    return _tell_step(quieten(again))


def _tell_dict(flops: Any, by: str) -> str:
    return "\n".join(f"{heading}: {json.dumps(cells)}" for heading, cells in flops.to_dict(by=by).items())


def _memory(folder: Folder) -> None:
    names = (
        *("toy", "zoo:lenet5", "zoo:llama_tiny"),
        *("torchvision:resnet18", "transformers:BertModel", "timm:mixer_s32_224"),
    )
    for name in names:
        torch.manual_seed(0)
        model, inputs = MODELS[name]()
        flops = quieten(fvflops.FlopCountAnalysis(model.eval(), inputs))

        def predict(analysis: Any = flops, **options: Any) -> str:
            return _tell_memory(fvflops.predict_memory(analysis, **options))

        texts: dict[str, Callable[[], Any]] = {
            "forward": predict,
            "without workspaces": partial(predict, workspaces=False),
            "granularity": partial(predict, granularity=512),
            "of the trace": partial(predict, flops.trace()),
            "on CUDA": partial(predict, quieten(fvflops.FlopCountAnalysis(model, inputs, device="cuda"))),
        }
        folder.write(f"{name.replace(':', '_')}.txt", sections(texts))
    timeline = fvflops.predict_memory(fvflops.FlopCountAnalysis(*nets.sized()))
    folder.write("blocks.txt", f"{show(timeline.blocks)}\n{timeline.curve()}\n{show(timeline.at(-1))}")


def _parameters(folder: Folder) -> None:
    mixture, x = nets.experts()
    tiny = zoo.build("llama_tiny")
    tokens = torch.zeros(1, 16, dtype=torch.long)
    frozen = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 3).requires_grad_(False), nn.BatchNorm1d(3))
    cases: dict[str, Any] = {
        "model": tiny,
        "run": fvflops.FlopCountAnalysis(tiny, tokens),
        "mixture": fvflops.FlopCountAnalysis(mixture, x, execution="real"),
        "frozen": frozen,
    }
    texts: dict[str, Callable[[], Any]] = {}
    for name, of in cases.items():
        texts[name] = partial(shown, fvflops.parameter_summary, of)
        texts[f"{name}, table"] = partial(fvflops.parameter_summary_table, of)
    texts["count"] = lambda: show(dict(fvflops.parameter_count(frozen)))
    texts["table of counts"] = lambda: fvflops.parameter_count_table(tiny, 2)
    captured(lambda: folder.write("parameters.txt", sections(texts)))


def _roofline(folder: Folder) -> None:
    own = fvflops.Device("slow", matrix={"bf16": 10e9}, vector={"fp32": 1e9}, bandwidth=1e9, source="made up")
    for name, (model, inputs) in {"net": nets.net(), "encoder": nets.encoder()}.items():
        flops = quieten(fvflops.FlopCountAnalysis(model, inputs, table="exact"))
        for device in ("H100", "A100", own):
            drawn = fvflops.roofline(flops, device=device)
            texts: dict[str, Callable[[], Any]] = {
                "total": partial(shown, drawn.total),
                "by module": partial(shown, drawn.by_module),
                "by operator": partial(shown, drawn.by_operator),
                "peaks": partial(show, drawn.peaks),
                "in bf16": partial(_bound_in_bf16, flops, device),
            }
            folder.write(f"{name}-{device if isinstance(device, str) else 'own'}.txt", sections(texts))


def _bound_in_bf16(flops: Any, device: Any) -> str:
    return show(fvflops.roofline(flops, device=device, dtype="bf16", table="default").total())


def _utilise(folder: Folder) -> None:
    encoder, x = nets.encoder()
    step = quieten(
        fvflops.TrainingStepAnalysis(encoder, x, loss=add_up, checkpoint=["layers.0"], optimizer=torch.optim.AdamW)
    )
    texts: dict[str, Callable[[], Any]] = {
        "mfu of a number": lambda: fvflops.mfu(10**14, 1, device="H100", dtype="bf16"),
        "mfu of dtypes": lambda: fvflops.mfu({"fp32": 10**13, "bf16": 10**14}, 2, device="A100", devices=4),
        "mfu of a step": lambda: fvflops.mfu(step, 1e-3, device="H100 SXM"),
        "hfu of a step": lambda: fvflops.hfu(step, 1e-3, device="H100 SXM"),
        "tf32": lambda: fvflops.mfu(step, 1e-3, device="A100", float32_matmul="tf32"),
        "sparse": lambda: fvflops.mfu(10**14, 1, device="H100", dtype="bf16", sparse=True),
        **{
            name: partial(_tell_device, name)
            for name in ("H100", "A100", "V100 SXM2", "T4", "MI300X", "TPU v4", "NVIDIA H100 80GB HBM3", "B200", "L4")
        },
    }
    folder.write("utilisation.txt", sections(texts))


def _tell_device(name: str) -> str:
    return show(fvflops.find_device(name))


def _plan(folder: Folder) -> None:
    tokens = torch.ones(1, 16, dtype=torch.int64)
    tiny = partial(zoo.build, "llama_tiny", device="meta")
    cases: dict[str, Mapping[str, Any]] = {
        "tp": {"mesh": {"tp": 2}},
        "dp tp": {"mesh": {"dp": 512, "tp": 2}, "rank": 5},
        "sequence": {"mesh": {"tp": 2}, "sequence_parallel": True},
        "fsdp": {"mesh": {"fsdp": 4}},
        "hybrid": {"mesh": {"dp": 2, "fsdp": 4}, "table": "exact"},
        "pp": {"mesh": {"pp": 2}, "rank": 1, "microbatches": 4},
        "pp first": {"mesh": {"pp": 2}, "microbatches": 4},
        "cp": {"mesh": {"cp": 2}, "rank": 1},
        "all but fsdp": {"mesh": {"pp": 2, "dp": 2, "cp": 2, "tp": 2}, "rank": 9},
    }
    for name, options in cases.items():
        plan = fvflops.plan_rank(tiny(), (tokens,), **options)
        sent = plan.communication()
        flops = plan.flops(options.get("table", "default"))
        texts: dict[str, Callable[[], Any]] = {
            "plan": partial(_tell_plan, plan),
            "sent": partial(shown, sent.total),
            "sent by axis": partial(shown, sent.by_axis),
            "sent by collective": partial(shown, sent.by_collective),
            "sent by phase": partial(shown, sent.by_phase),
            "sent by module": partial(shown, sent.by_module),
            "sent by collective and group": partial(shown, sent.by_collective_and_group),
            "flops": partial(_tell_step, flops),
        }
        folder.write(f"{name.replace(' ', '-')}.txt", sections(texts))
        folder.write(f"{name.replace(' ', '-')}.json", break_lines(plan.trace.to_json()))


def _tell_plan(plan: Any) -> str:
    told = ("mesh", "world", "rank", "coordinates", "parameters", "parameter_bytes", "model_parameters")
    return "\n".join(f"{key}: {getattr(plan, key)}" for key in (*told, "derived", "left_out"))


def _scale(folder: Folder) -> None:
    def tokens(batch: int, seq: int) -> torch.Tensor:
        return torch.zeros(batch, seq, dtype=torch.long, device="meta")

    tiny = zoo.build("llama_tiny", device="meta")
    linear = {
        "model": lambda width: nn.Linear(width, 4 * width),
        "inputs": lambda batch, width: torch.zeros(batch, width),
        "vary": {"batch": (1, 64), "width": (8, 512)},
    }
    image = {
        "model": zoo.build("resnet50", device="meta"),
        "inputs": lambda size: torch.zeros(1, 3, size, size, device="meta"),
        "vary": {"size": (64, 256, 32)},
    }
    llama = {"model": tiny, "inputs": tokens, "vary": {"batch": (1, 8), "seq": (1, 128)}}
    cases: dict[str, Callable[[], Any]] = {}
    for name, case in {"linear": linear, "image": image, "llama": llama}.items():
        for metric in ("flops", "macs", "activations", "parameters"):
            cases[f"{name}, {metric}"] = partial(_tell_cost, **case, metric=metric)
        cases[f"{name}, exact"] = partial(_tell_cost, **case, table="exact")
        cases[f"{name}, backward"] = partial(_tell_cost, **case, loss=add_up)
    cases["experts"] = partial(
        _tell_cost, model=nets.sized()[0], inputs=lambda n: torch.ones(n, 4), vary={"n": range(2, 40, 3)}
    )
    for title, make in cases.items():
        folder.write(f"{title.replace(', ', '-')}.txt", sections({title: make}))


def _tell_cost(**options: Any) -> str:
    cost = fvflops.cost_of(**options)
    lines = [str(cost), f"everywhere {cost.everywhere}", f"fitted {cost.fitted}", f"held out {cost.held_out}"]
    lines += [f"counted {sizes}: {value}" for sizes, value in cost.counted.items()]
    for part in (cost.by_module(), cost.by_operator()):
        lines += [f"  {name or '(model)'}: {law}" for name, law in part.items()]
    return "\n".join(lines)


def _generate(folder: Folder) -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=50, n_positions=64)
    gpt2 = transformers.GPT2LMHeadModel(config).eval()
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
    }
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=50)).eval()

    def tell(model: nn.Module, **options: Any) -> str:
        cost = fvflops.generation_cost(model, **options)
        lines = [
            f"prefill {cost.prefill}",
            f"decode {cost.decode}",
            f"polynomial {cost.polynomial}",
            f"total {cost.total}",
        ]
        return "\n".join([*lines, f"counted up to {cost.counted_up_to}", f"batch {cost.batch}", str(cost)])

    texts: dict[str, Callable[[], Any]] = {}
    for name, model in {"gpt2": gpt2, "llama": llama}.items():
        for metric in ("flops", "macs", "activations"):
            texts[f"{name}, {metric}"] = partial(tell, model, prompt=8, new=12, metric=metric)
        texts[f"{name}, batch"] = partial(tell, model, prompt=5, new=3, batch=4, table="exact")
    texts["gpt2, real"] = partial(tell, gpt2, prompt=4, new=4, execution="real")
    texts["gpt2, too long"] = partial(tell, gpt2, prompt=60, new=14)
    folder.write("generation.txt", sections(texts))


def _diff(folder: Folder) -> None:
    pairs: dict[str, tuple[Any, ...]] = {
        "widened": (nets.narrow()[0], nets.wide()[0], torch.ones(3, 4)),
        "net": (nets.net()[0], nets.wide_net()[0], torch.ones(2, 3, 12, 12)),
        "equal": (nets.narrow()[0], nets.narrow()[0], torch.ones(3, 4)),
        "llama": (zoo.build("llama2_7b"), zoo.build("llama3_8b"), torch.zeros(1, 128, dtype=torch.long, device="meta")),
        "renamed": (
            nn.Sequential(nn.Linear(4, 4), nn.ReLU()),
            nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.ReLU()),
            torch.ones(3, 4),
        ),
    }
    for name, (one, two, x) in pairs.items():
        for table in ("default", "exact"):
            found = fvflops.diff(one, two, x, table=table)
            texts: dict[str, Callable[[], Any]] = {
                "str": partial(str, found),
                "differs": partial(bool, found),
                "JSON": found.to_json,
                **{
                    f"total {measure}": partial(_tell_total, found, measure)
                    for measure in ("flops", "macs", "activations", "parameters")
                },
                "by module": partial(shown, found.by_module),
                "by operator": partial(shown, found.by_operator),
            }
            folder.write(f"{name}-{table}.txt", sections(texts))


def _tell_total(found: Any, measure: str) -> str:
    change = found.total(measure)
    return f"{show(change)}\ndifference {change.difference} ratio {change.ratio}"


def _compare(folder: Folder) -> None:
    for name, (model, inputs) in {"net": nets.net(), "encoder": nets.encoder(), "lenet5": _lenet()}.items():
        texts = {name: partial(shown, fvflops.compare, model.eval(), inputs)}
        captured(partial(folder.write, f"{name}.txt", sections(texts)))


def _lenet() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return zoo.build("lenet5"), (torch.zeros(1, 1, 28, 28),)


def _deepspeed(folder: Folder) -> None:
    """Write what DeepSpeed's interface gives, but for the times."""

    def profile() -> str:
        model, inputs = _lenet()
        profiler = fvflops.FlopsProfiler(model)
        profiler.start_profile()
        model(*inputs).sum().backward()
        profiler.stop_profile()
        figures = [
            (profiler.get_total_flops(text), profiler.get_total_macs(text), profiler.get_total_params(text))
            for text in (False, True)
        ]
        profiler.end_profile()
        return str(figures)

    def model_profile(**options: Any) -> str:
        return str(fvflops.get_model_profile(_lenet()[0], (1, 1, 28, 28), print_profile=False, **options))

    texts: dict[str, Callable[[], Any]] = {
        "profiler": profile,
        "as text": model_profile,
        "as numbers": partial(model_profile, as_string=False),
        "unknown mode": partial(model_profile, mode="train"),
    }
    _, out, err = captured(lambda: folder.write("deepspeed.txt", sections(texts)))
    folder.write("printed.txt", f"{out}\n{err}")
