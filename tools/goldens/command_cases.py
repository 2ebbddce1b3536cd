"""The command lines: every command in its formats, lists and options, on models that show much and count quickly."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from functools import partial
from itertools import product

from goldens import clock, inner
from goldens.commands import Commands, write_help
from goldens.jobs import Folder, Job, captured, variables

_SIZES = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 50}
_TINY = ("zoo:llama_tiny", "--input", "1,16:int64")
_NET = ("nets.py:net",)
_LENET = ("zoo:lenet5",)
_BERT = (
    "transformers:BertModel",
    "--input",
    "input_ids=1,12:int64",
    "--config",
    "bert.json",
)
_CONFIGS = {
    "bert.json": {**_SIZES, "num_hidden_layers": 2},
    "deeper.json": {**_SIZES, "num_hidden_layers": 3},
    "llama.json": {**_SIZES, "num_hidden_layers": 2},
    "gpt2.json": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 50, "n_positions": 64},
}
_TEXT_FORMATS = (
    "text",
    "fvcore",
    "tree",
    "json",
    "csv",
    "markdown",
    "paper",
    "latex",
    "html",
    "dot",
    "model-explorer",
)
# Those of every command.
_FORMATS = ("text", "markdown", "csv", "json", "html", "latex")
_VIEWS = ("module", "operator", "both", "op", "call", "line")
_WEIGHTS = ("flops", "macs", "bytes", "memory")


def jobs() -> list[Job]:
    """Return a job for each group of command lines."""
    named: dict[str, Callable[[Commands], None]] = {
        "count/views/lenet5": partial(_count_views, _LENET),
        "count/views/llama_tiny": partial(_count_views, _TINY),
        "count/views/net": partial(_count_views, _NET),
        "count/pictures": _count_pictures,
        "count/orders": _count_orders,
        "count/models": _count_models,
        "count/tables": _count_tables,
        "count/files": _count_files,
        "count/terminal": _count_terminal,
        "formats": _formats,
        "compare": _compare,
        "diff": _diff,
        "diff/revisions": _diff_revisions,
        "check": _check,
        "plan": _plan,
        "memory": _memory,
        "ops/lists": _ops_lists,
        "ops/one": _ops_one,
        "ops/check": _ops_check,
        "roofline": _roofline,
        "profile": _profile,
        "profile/failing": _profile_failing,
        "scale": _scale,
        "scale/generate": _generate,
    }
    return [
        Job("cli/help", write_help),
        *(Job(f"cli/{name}", partial(_run, run)) for name, run in named.items()),
    ]


def _run(run: Callable[[Commands], None], folder: Folder) -> None:
    commands = Commands(folder)
    for name, config in _CONFIGS.items():
        with open(name, "w") as file:
            json.dump(config, file)
    commands.keep()
    run(commands)


def _count_views(model: tuple[str, ...], commands: Commands) -> None:
    for form, view in product(_TEXT_FORMATS, _VIEWS):
        commands.run("count", *model, "--format", form, "--by", view)
    for form, depth in product(_TEXT_FORMATS, ("0", "1", "2")):
        commands.run("count", *model, "--format", form, "--depth", depth)
    for form in ("text", "csv"):
        commands.run("count", *model, "--format", form, "--by", "both", "--depth", "1")
        commands.run("count", *model, "--format", form, "--by", "call", "--depth", "1")
    for table in inner.conventions():
        commands.run("count", *model, "--table", table)
        commands.run("count", *model, "--table", table, "--by", "operator", "--format", "csv")


def _count_pictures(commands: Commands) -> None:
    for form in ("svg", "png"):
        for depth in ((), ("--depth", "1")):
            commands.run("count", *_NET, "--format", form, "--output", f"net.{form}", *depth)
    commands.run("count", *_TINY, "--format", "svg", "--output", "llama.svg")
    commands.run("count", *_TINY, "--format", "svg")
    commands.run("count", *_TINY, "--format", "svg", "--by", "operator", "--output", "llama.svg")


def _count_orders(commands: Commands) -> None:
    for form in ("text", "markdown", "csv"):
        for key in ("parameters", "flops", "activations", "name"):
            commands.run("count", *_NET, "--format", form, "--sort", key)
            commands.run("count", *_NET, "--format", form, "--sort", key, "--top", "3")
        for key in ("flops", "activations", "name"):
            commands.run("count", *_NET, "--format", form, "--by", "operator", "--sort", key, "--top", "2")
            commands.run("count", *_NET, "--format", form, "--by", "both", "--sort", key, "--top", "4")
        commands.run("count", *_NET, "--format", form, "--top", "2")
        commands.run("count", *_TINY, "--format", form, "--collapse")
        commands.run("count", *_TINY, "--format", form, "--collapse", "--by", "both", "--depth", "9")
        commands.run("count", *_TINY, "--format", form, "--collapse", "--sort", "flops", "--top", "3")


def _count_models(commands: Commands) -> None:
    models: list[tuple[str, ...]] = [
        *((name,) for name in ("zoo:resnet50", "zoo:vit_b_16", "zoo:gpt2", "zoo:llama2_7b", "zoo:llama3_405b")),
        *((f"nets.py:{name}",) for name in ("with_inputs", "encoder", "routed", "experts", "with_names", "hostile")),
        ("nets.py:build", "--input", "2,4"),
        ("nets.py:build", "--input", "2x4:float32"),
        ("nets.py:unknown",),
        ("nets.py:with_names", "--input", "x=1,4"),
        ("nets:with_inputs",),
        _BERT,
        ("torchvision:resnet18", "--device", "meta"),
        ("torchvision:lraspp_mobilenet_v3_large", "--device", "meta"),
        ("torchvision:r3d_18", "--input", "1,3,4,56,56", "--device", "meta"),
        ("timm:mixer_s32_224", "--device", "meta"),
        ("transformers:ViTModel", "--device", "meta"),
        ("transformers:T5Model", "--device", "meta"),
    ]
    for model in models:
        for options in ((), ("--train",), ("--table", "exact", "--by", "operator")):
            commands.run("count", *model, *options)
    for form in ("json", "markdown", "csv", "html", "latex", "dot", "tree"):
        commands.run("count", "nets.py:hostile", "--format", form)
        commands.run("count", "nets.py:unknown", "--format", form)
        commands.run("count", "nets.py:routed", "--format", form, "--device", "meta", "--assume", "aten::index=0.25")
    for ways in (
        ("--execution", "real"),
        ("--execution", "shapes"),
        ("--execution", "shapes", "--assume", "aten::index=6"),
        ("--device", "meta", "--assume", "aten::index=0.25"),
        ("--device", "meta"),
    ):
        commands.run("count", "nets.py:routed", *ways)
    commands.run("count", *_NET, "--execution", "real", "--by", "op")
    commands.run("count", *_NET, "--execution", "real", "--device", "cpu", "--train", "--format", "json")


def _count_tables(commands: Commands) -> None:
    names = ("zoo:lenet5", "nets.py:with_inputs", "nets.py:unknown", "nets.py:routed", "nets.py:hostile", "zoo:none")
    with open("accuracy.csv", "w") as file:
        file.write("model,top-1,note\nlenet5,30.25,a_b & c%\nwith_inputs,7.5,\nother,1,x\n")
    commands.keep()
    joined = ("--join", "accuracy.csv")
    for form in (*_FORMATS, "paper"):
        commands.run("count", *names, "--format", form)
        commands.run("count", *names, *joined, "--format", form, "--strict")
        commands.run(
            "count",
            "zoo:l*y",
            "zoo:lenet*",
            "--format",
            form,
            "--columns",
            "memory,inputs",
            "--sort",
            "macs",
            "--top",
            "2",
        )
    for options in ((), ("--y", "memory"), joined, (*joined, "--x", "bytes", "--lower", "top-1")):
        commands.run("count", *names, *options, "--plot", "models.svg")


def _count_files(commands: Commands) -> None:
    for weight in _WEIGHTS:
        for option, path in (("--trace", "a.json"), ("--speedscope", "b.json"), ("--flamegraph", "c.txt")):
            commands.run("count", *_NET, option, path, "--weight", weight, "--depth", "0")
    for form in ("text", "json", "html"):
        commands.run("count", *_LENET, "--format", form, "--output", f"report.{form}", "--trace", "run.json")


def _count_terminal(commands: Commands) -> None:
    for width in ("40", "80", "160"):
        with variables(COLUMNS=width):
            for model in (_NET, _TINY, _LENET, ("nets.py:hostile",), ("nets.py:unknown",)):
                name = f"{model[0].replace(':', '_')}-{width}"
                commands.run("count", *model, name=name, terminal=True)
                commands.run("count", *model, "--by", "operator", name=f"{name}-operator", terminal=True)
    with variables(NO_COLOR=None, FORCE_COLOR="1", TERM="xterm"):
        for model in (_NET, _TINY):
            commands.run("count", *model, name=f"{model[0].replace(':', '_')}-colour", terminal=True)
            commands.run("count", *model, "--collapse", "--sort", "flops", name=f"{model[0][:4]}-ranked", terminal=True)


def _formats(commands: Commands) -> None:
    """Run every command in every format, with its default order and with another."""
    with open("kept.yaml", "w") as file:
        file.write("models: {zoo:lenet5: {flops: 400K, parameters: 61706, memory: 1M}}\n")
    commands.keep()
    reports = (
        ("compare", "zoo:lenet5", "--tables", "default,exact,torch"),
        ("diff", "nets.py:narrow", "nets.py:wide"),
        ("check", "zoo:lenet5", "--budget", "kept.yaml"),
        ("plan", *_TINY, "--mesh", "dp=2,tp=2"),
        ("ops", "--table", "torch"),
        ("ops", "linear"),
        ("memory", *_TINY),
        ("roofline", *_NET, "--device", "H100"),
        ("roofline", *_NET, "--device", "H100", "--by", "op"),
        ("scale", "zoo:lenet5", "--vary", "batch=1..64"),
        *(("count", *_NET, "--by", view) for view in ("op", "call", "line")),
    )
    for report, form in product(reports, _FORMATS):
        commands.run(*report, "--format", form)
    for report in reports:
        commands.run(*report, "--sort", "name", "--top", "2", "--format", "csv")


def _compare(commands: Commands) -> None:
    for model in (_LENET, _TINY, _NET, ("zoo:vit_b_16", "--device", "meta"), _BERT):
        commands.run("compare", *model)
        commands.run("compare", *model, "--format", "json")
        commands.run("compare", *model, "--tables", "torch,exact")
        commands.run("compare", *model, "--table", "fvcore", "--tables", "default,deepspeed", "--train")
    commands.run("compare", "nets.py:routed", "--device", "meta", "--assume", "aten::index=0.25")
    commands.run("compare", "nets.py:unknown")
    commands.run("compare", *_LENET, "--tables", "torch", "--output", "compared.txt")


def _diff(commands: Commands) -> None:
    pairs = (
        ("nets.py:narrow", "nets.py:wide"),
        ("nets.py:net", "nets.py:wide_net"),
        ("nets.py:net", "nets.py:net"),
        ("nets.py:net", "nets.py:encoder"),
        ("zoo:llama3_8b", "zoo:llama2_7b"),
        ("nets.py:with_inputs", "nets.py:unknown"),
    )
    measures = ("flops", "macs", "activations", "parameters")
    for pair in pairs:
        for form in ("text", "markdown", "json"):
            commands.run("diff", *pair, "--format", form)
        for measure in measures:
            commands.run("diff", *pair, "--measure", measure, "--top", "3")
        commands.run("diff", *pair, "--table", "exact")
    commands.run("diff", "nets.py:narrow", "nets.py:build", "--input-b", "3,4")
    commands.run("diff", _BERT[0], *_BERT, "--config-b", "deeper.json")
    _write_trace("saved.json")
    commands.keep()
    commands.run("diff", "zoo:lenet5", "saved.json", "--input", "2,1,28,28", "--format", "json")
    commands.run("diff", "saved.json", "zoo:lenet5")
    commands.run("diff", "saved.json", "zoo:lenet5", "--input", "1,1,28,28")
    _write_program("program.pt2")
    commands.keep()
    commands.run("diff", "program.pt2", "nets.py:with_inputs", "--trust-file")
    commands.run("diff", "nets.py:with_inputs", "program.pt2", "--trust-file", "--format", "json")


def _write_trace(path: str) -> None:
    import torch

    import fvflops
    from fvflops import zoo

    trace = fvflops.FlopCountAnalysis(zoo.build("lenet5").eval(), torch.zeros(1, 1, 28, 28)).trace()
    with open(path, "w") as file:
        file.write(trace.to_json())


def _write_program(path: str) -> None:
    import torch
    from torch import nn

    program = torch.export.export(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), (torch.ones(2, 4),))
    captured(lambda: torch.export.save(program, path))


def _diff_revisions(commands: Commands) -> None:
    dates = {"GIT_AUTHOR_DATE": "2026-01-01T00:00:00Z", "GIT_COMMITTER_DATE": "2026-01-01T00:00:00Z"}
    names = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}
    with variables(**dates, **names, GIT_CONFIG_GLOBAL="/dev/null", GIT_CONFIG_SYSTEM="/dev/null"):
        text = "from torch import nn\nimport torch\ndef build():\n    return nn.Linear(4, {}), torch.ones(3, 4)\n"
        with open("net.py", "w") as file:
            file.write(text.format(3))
        for line in (("init", "-q", "-b", "main"), ("add", "net.py"), ("commit", "-q", "-m", "one")):
            subprocess.run(["git", *line], check=True, capture_output=True)
        with open("net.py", "w") as file:
            file.write(text.format(7))
        os.makedirs("other", exist_ok=True)
        with open("other/net.py", "w") as file:
            file.write(text.format(11))
        commands.keep()
        for form in ("text", "markdown", "json"):
            commands.run("diff", "HEAD:net.py:build", "net.py:build", "--format", form)
        commands.run("diff", "net.py:build", "other/net.py:build")
        commands.run("diff", "HEAD:net.py:biuld", "net.py:build")
        commands.run("diff", "HAED:net.py:build", "net.py:build")
        commands.run("diff", "HEAD:nte.py:build", "net.py:build")


_BUDGETS = {
    "kept": "flops: 1K\n    parameters: 100\n    unknown: 0\n",
    "over": "flops: 100\n    macs: {max: 0.1K, tolerance: 10%}\n    activations: {exact: 30}\n    memory: 1MiB\n",
    "noted": "flops: 144\n    modules: {'0': 90, '2': 48, '3': 1}\n    operators: {linear: 140}\n",
    "exact": "table: exact\n    flops: 342\n    parameters: {exact: 59}\n",
}


def _check(commands: Commands) -> None:
    rows = "".join(f"  {name}:\n    {text}" for name, text in _BUDGETS.items())
    budget = f"# what models may cost\nmodels:\n{rows}"

    def write() -> None:
        with open("budget.yaml", "w") as file:
            file.write(budget)

    write()
    commands.keep()
    for name in _BUDGETS:
        commands.run("check", "nets.py:narrow", "--budget", "budget.yaml", "--name", name)
        commands.run("check", "nets.py:wide", "--budget", "budget.yaml", "--name", name, "--summary", "summary.md")
    commands.run("check", "nets.py:unknown", "--budget", "budget.yaml", "--name", "kept")
    commands.run("check", "nets.py:narrow", "--budget", "budget.yaml", "--name", "kept", "--table", "exact")
    # From here on the file is an output.
    os.remove("budget.yaml")
    commands.keep()
    for name in (*_BUDGETS, "new"):
        for options in ((), ("--depth", "1"), ("--table", "exact")):
            write()
            commands.run("check", "nets.py:wide", "--budget", "budget.yaml", "--name", name, "--update", *options)
    commands.run("check", "zoo:lenet5", "--budget", "made.yaml", "--update", "--depth", "2")


def _plan(commands: Commands) -> None:
    meshes = ("dp=2", "tp=2", "fsdp=4", "dp=128,tp=2", "pp=2", "cp=2", "pp=2,dp=2,fsdp=2,tp=2", "dp=2,cp=2,tp=2")
    for mesh, form in product(meshes, ("text", "json")):
        commands.run("plan", *_TINY, "--mesh", mesh, "--format", form)
    commands.run("plan", *_TINY, "--mesh", "pp=2,tp=2", "--rank", "3", "--microbatches", "4", "--table", "exact")
    commands.run("plan", *_TINY, "--mesh", "tp=2", "--sequence-parallel", "--dtype", "bfloat16")
    commands.run("plan", *_TINY, "--mesh", "fsdp=2", "--dtype", "bfloat16", "--format", "json", "--device", "cuda")
    commands.run("plan", *_TINY, "--mesh", "tp=2", "--device", "cuda")
    commands.run("plan", "nets.py:narrow", "--mesh", "tp=2", "--shard", "nets.py:column_rows")
    commands.run("plan", "nets.py:narrow", "--mesh", "dp=8", "--output", "plan.txt")
    commands.run("plan", "zoo:llama3_8b", "--mesh", "dp=64,tp=8")
    commands.run("plan", "zoo:gpt2", "--mesh", "fsdp=8,tp=2")
    commands.run("plan", *_BERT, "--mesh", "dp=2")


def _memory(commands: Commands) -> None:
    for model in (_LENET, _NET, _TINY, ("zoo:gpt2",), ("zoo:resnet50", "--device", "cuda")):
        commands.run("memory", *model)
    for options in (
        ("--checkpoint", "Block", "--depth", "4"),
        ("--dtype", "bf16", "--optimizer", "sgd"),
        ("--optimizer", "none", "--microbatches", "2", "--first-step"),
        ("--inference", "--format", "json"),
        ("--mesh", "fsdp=2", "--format", "json"),
        ("--mesh", "dp=2", "--microbatches", "2", "--no-savings"),
        ("--format", "svg"),
    ):
        commands.run("memory", *_TINY, *options)


def _ops_lists(commands: Commands) -> None:
    for table in inner.conventions():
        commands.run("ops", "--table", table)


def _ops_one(commands: Commands) -> None:
    names = (
        *("linear", "conv2d", "gelu", "mm", "bmm", "addmm", "aten::add.Tensor", "scaled_dot_product_attention", "lstm"),
        *(
            "einsum",
            "convolution_backward",
            "softmax",
            "nonzero",
            "view",
            "fft_fft",
            "aten::lineer",
            "aten::add.Tenser",
        ),
        *("torch.nn.LSTM", "torchvision::nms", "prim::PythonOp.Swish"),
    )
    for table, name in product(("default", "exact", "fvcore", "torch"), names):
        commands.run("ops", name, "--table", table)
    with open("mine.yaml", "w") as file:
        file.write(
            "description: mine\nextends: default\nmultiply_add: 2\nconstants: {relu: 3}\nmodules:\n"
            "  torch.nn.LSTM: {macs: hidden_size, covers: false}\nops:\n"
            '  aten::relu: {flops: relu*numel(out), example: "2 3 = 18"}\n'
            '  aten::gelu: {flops: 8*numel(out), example: "2 3 = 47"}\n'
        )
    commands.keep()
    for words in ((), ("relu",), ("torch.nn.LSTM",), ("gelu",), ("--check",)):
        commands.run("ops", *words, "--table", "mine.yaml")
    commands.run("count", *_NET, "--table", "mine.yaml")


def _ops_check(commands: Commands) -> None:
    for table in inner.conventions():
        commands.run("ops", "--check", "--table", table)


def _roofline(commands: Commands) -> None:
    for model, device in product((_NET, _TINY, ("zoo:resnet50", "--build", "meta")), ("H100", "A100")):
        for view in ("module", "operator", "op"):
            commands.run("roofline", *model, "--device", device, "--by", view, "--top", "10")
    for options in (
        ("--depth", "1"),
        ("--backward",),
        ("--train",),
        ("--dtype", "bf16"),
        ("--dtype", "tf32", "--by", "operator"),
        ("--dtype", "fp16", "--backward", "--by", "op"),
        ("--table", "default"),
        ("--plot", "roofs.svg"),
        ("--plot", "roofs.png", "--by", "operator"),
        ("--output", "roofs.txt"),
    ):
        commands.run("roofline", *_NET, "--device", "H100", *options)
    with open("own.yaml", "w") as file:
        file.write(
            "devices:\n  mine:\n    source: made up\n    bandwidth: 1e9\n"
            "    matrix: {bf16: 1e10}\n    vector: {fp32: 1e9}\n"
        )
    commands.keep()
    for device in ("own.yaml", "own.yaml:mine", "own.yaml:other", "T4", "V100 SXM2", "TPU v4", "MI300X"):
        commands.run("roofline", *_NET, "--device", device)
    commands.run("roofline", "nets.py:unknown", "--device", "H100")
    commands.run("roofline", "zoo:llama3_8b", "--device", "H100", "--dtype", "bf16", "--depth", "2")


def _profile(commands: Commands) -> None:
    """Run profiles by a clock that ticks at each look: how often it is looked at is part of the output."""
    few = ("--repeat", "3", "--warmup", "1")
    with clock.ticking():
        for model in (_NET, _LENET):
            for view in ("module", "operator", "op"):
                commands.run("profile", *model, *few, "--by", view)
                commands.run("profile", *model, *few, "--by", view, "--backward", "--train")
                commands.run("profile", *model, *few, "--by", view, "--sort", "time", "--top", "3")
        for key in ("self", "calls", "flops", "rate", "bytes", "intensity", "memory", "peak", "mismatch", "name"):
            commands.run("profile", *_NET, *few, "--sort", key, "--top", "5")
        for options in (
            ("--peaks", "H100"),
            ("--peaks", "H100", "--sort", "roofline"),
            ("--by", "operator", "--peaks", "A100"),
            ("--backward", "--phase", "backward"),
            ("--backward", "--phase", "forward", "--by", "op"),
            ("--depth", "0"),
            ("--depth", "9"),
            ("--by", "op", "--ignore", "aten::tanh"),
            ("--table", "default"),
            ("--deepspeed",),
            ("--deepspeed", "--depth", "1", "--top", "3"),
            ("--html", "page.html"),
            ("--trace", "run.json", "--speedscope", "run.speedscope.json", "--flamegraph", "run.txt"),
            ("--trace", "run.json", "--weight", "flops"),
            ("--flamegraph", "run.txt", "--weight", "memory", "--output", "report.txt"),
        ):
            commands.run("profile", *_NET, *few, *options)
        commands.run("profile", *_LENET, "--schedule", "skip_first=1,wait=1,active=2,repeat=1", "--steps", "5")
        commands.run("profile", *_LENET, "--warmup", "0", "--repeat", "1")


def _profile_failing(commands: Commands) -> None:
    with clock.ticking():
        for model in ("nets.py:failing", "nets.py:on_meta", "nets.py:raising", "nets.py:unknown"):
            commands.run("profile", model, "--repeat", "2", "--warmup", "0")


def _scale(commands: Commands) -> None:
    for model, vary in (
        (("zoo:lenet5",), ("batch=1..64",)),
        (("zoo:gpt2", "--device", "meta"), ("seq=1..1024",)),
        (("zoo:llama_tiny",), ("batch=1..8", "seq=1..128")),
        (("nets.py:build", "--input", "batch,4"), ("batch=1..64",)),
        (("nets.py:sized",), ("width=8..512:8",)),
        (("torchvision:resnet18", "--device", "meta"), ("batch=1..8", "size=64..256:32")),
    ):
        options = [word for text in vary for word in ("--vary", text)]
        for form in ("text", "json"):
            commands.run("scale", *model, *options, "--format", form)
        for metric in ("macs", "activations", "parameters"):
            commands.run("scale", *model, *options, "--metric", metric)
        commands.run("scale", *model, *options, "--table", "exact", "--backward")
        commands.run("scale", *model, *options, "--depth", "2")
    commands.run("scale", "zoo:lenet5", "--vary", "batch=1..64", "--plot", "scale.svg")
    commands.run("scale", "zoo:llama_tiny", "--vary", "batch=1..8", "--vary", "seq=1..128", "--plot", "scale.png")


def _generate(commands: Commands) -> None:
    model = ("transformers:GPT2LMHeadModel", "--config", "gpt2.json")
    for options in (
        (),
        ("--format", "json"),
        ("--metric", "macs"),
        ("--metric", "activations"),
        ("--table", "exact"),
        ("--execution", "real"),
        ("--device", "meta"),
        ("--plot", "generated.svg"),
    ):
        commands.run("scale", *model, "--generate", "prompt=8,new=12", *options)
    commands.run("scale", *model, "--generate", "prompt=8,new=12,batch=4")
    commands.run("scale", *model, "--generate", "prompt=60,new=20")
    llama = ("transformers:LlamaForCausalLM", "--config", "llama.json")
    commands.run("scale", *llama, "--generate", "prompt=16,new=16")
