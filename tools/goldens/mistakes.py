"""Mistakes: what is said of bad command lines, bad calls of the public interface, and bad tables and budgets."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import fvflops
from fvflops import zoo
from goldens.commands import Commands
from goldens.counts import sections
from goldens.jobs import Folder, Job, captured

_COUNT: tuple[tuple[str, ...], ...] = (
    ("zoo:resnet5",),
    ("resnet50",),
    ("zoo:",),
    ("timm:resnet5o",),
    ("torchvision:resnet51",),
    ("transformers:BertModle",),
    ("transformers:BertModel", "--config", "{"),
    ("transformers:BertModel", "--config", "missing.json"),
    ("transformers:BertModel", "--config", "[]"),
    ("transformers:AutoModel",),
    ("transformers:CLIPModel", "--device", "meta"),
    ("zoo:lenet5", "--config", "{}"),
    ("zoo:lenet5", "--input", "1,a"),
    ("zoo:lenet5", "--input", "1:floot"),
    ("zoo:lenet5", "--input", "0y=1"),
    ("zoo:lenet5", "--input", "1,3,28,28"),
    ("zoo:lenet5", "--input", "1,1,2,2"),
    ("zoo:gpt2", "--input", "1,1025:int64"),
    ("zoo:lenet5", "--format", "tabel"),
    ("zoo:lenet5", "--table", "defualt"),
    ("zoo:lenet5", "--table", "missing.yaml"),
    ("zoo:lenet5", "--execution", "fast"),
    ("zoo:lenet5", "--by", "modul"),
    ("zoo:lenet5", "--depth", "-1"),
    ("zoo:lenet5", "--sort", "flosp"),
    ("zoo:lenet5", "--sort", "parameters", "--by", "operator"),
    ("zoo:lenet5", "--sort", "flops", "--format", "json"),
    ("zoo:lenet5", "--top", "0"),
    ("zoo:lenet5", "--collapse", "--by", "operator"),
    ("zoo:lenet5", "--collapse", "--by", "op"),
    ("zoo:lenet5", "--by", "op", "--format", "markdown"),
    ("zoo:lenet5", "--by", "operator", "--format", "dot"),
    ("zoo:lenet5", "--format", "svg", "--output", "/dev/null/a.svg"),
    ("zoo:lenet5", "--output", "/dev/null/out.txt"),
    ("zoo:lenet5", "--trace", "a.json", "--speedscope", "a.json"),
    ("zoo:lenet5", "--weight", "flops"),
    ("zoo:lenet5", "--weight", "time", "--trace", "a.json"),
    ("zoo:lenet5", "--weight", "watts", "--trace", "a.json"),
    ("zoo:lenet5", "--device", "cdua"),
    ("no.such.package:model",),
    ("missing.py:model",),
    ("nets.py:buidl",),
    ("nets.py:broken",),
    ("nets.py:raising",),
    ("nets.py:exiting",),
    ("nets.py:number",),
    ("nets.py:build",),
    ("nets.py:net", "--input", "2,4,12,12"),
    ("nets.py:routed", "--execution", "shapes"),
    ("nets.py:routed", "--device", "meta"),
    ("nets.py:routed", "--assume", "aten::index"),
    ("nets.py:routed", "--assume", "aten::indx=3", "--execution", "shapes"),
    ("nets.py:routed", "--assume", "aten::index=-3", "--execution", "shapes"),
    ("nets.py:unknown", "--strict"),
    ("zoo:lenet5", "nets.py:net", "--by", "op"),
    ("zoo:lenet5", "nets.py:net", "--format", "svg", "--output", "x.svg"),
    ("zoo:lenet5", "nets.py:net", "--columns", "flosp"),
    ("zoo:lenet5", "nets.py:net", "--plot", "x.pdf"),
    ("zoo:lenet5", "--join", "none.csv"),
    ("zoo:x*",),
)
_OTHERS: tuple[tuple[str, ...], ...] = (
    (),
    ("cuont", "x"),
    ("count",),
    ("compare", "zoo:lenet5", "--tables", "torhc"),
    ("compare", "zoo:lenet5", "--tables", ","),
    ("compare", "zoo:lenet5", "--format", "cvs"),
    ("compare", "zoo:lenet5", "--sort", "flosp"),
    ("compare", "zoo:lenet5", "--top", "0"),
    ("diff", "zoo:lenet5"),
    ("diff", "zoo:lenet5", "zoo:lenet6"),
    ("diff", "zoo:lenet5", "missing.json"),
    ("diff", "zoo:lenet5", "nets.py"),
    ("diff", "zoo:lenet5", "zoo:lenet5", "--format", "jsno"),
    ("diff", "bad.json", "zoo:lenet5"),
    ("check", "zoo:lenet5", "--budget", "missing.yaml"),
    ("check", "zoo:lenet5", "--budget", "budget.yaml"),
    ("check", "zoo:lenet5", "--budget", "budget.yaml", "--name", "ent"),
    ("check", "zoo:lenet5", "--budget", "budget.yaml", "--depth", "1"),
    ("check", "zoo:lenet5", "--budget", "bad.yaml", "--name", "net"),
    ("plan", "zoo:llama_tiny"),
    ("plan", "zoo:llama_tiny", "--mesh", "dp"),
    ("plan", "zoo:llama_tiny", "--mesh", "dq=2"),
    ("plan", "zoo:llama_tiny", "--mesh", "dp=2", "--rank", "2"),
    ("plan", "zoo:llama_tiny", "--mesh", "tp=3"),
    ("plan", "zoo:llama_tiny", "--mesh", "dp=2", "--dtype", "int8"),
    ("plan", "zoo:llama_tiny", "--mesh", "dp=2", "--microbatches", "0"),
    ("plan", "zoo:llama_tiny", "--mesh", "dp=2", "--format", "table"),
    ("plan", "nets.py:narrow", "--mesh", "tp=2"),
    ("plan", "nets.py:narrow", "--mesh", "tp=2", "--shard", "nets.py:colum_rows"),
    ("memory", "zoo:lenet5", "--optimizer", "adm"),
    ("memory", "zoo:lenet5", "--checkpoint", "Conv"),
    ("memory", "zoo:lenet5", "--inference", "--checkpoint", "Linear"),
    ("memory", "zoo:lenet5", "--rank", "1"),
    ("ops", "aten::lineer"),
    ("ops", "--table", "fvcroe"),
    ("roofline",),
    ("roofline", "zoo:lenet5"),
    ("roofline", "zoo:lenet5", "--device", "H10"),
    ("roofline", "zoo:lenet5", "--device", "H100", "--dtype", "int4"),
    ("roofline", "zoo:lenet5", "--device", "H100", "--plot", "a.pdf"),
    ("roofline", "zoo:lenet5", "--device", "H100", "--backward", "--execution", "real"),
    ("peak", "--output", "mine.txt"),
    ("peak", "--device", "cpu", "--seconds", "0"),
    ("profile", "zoo:lenet5", "--schedule", "wait=3,active=1", "--steps", "3"),
    ("profile", "zoo:lenet5", "--schedule", "active=1"),
    ("profile", "zoo:lenet5", "--steps", "3"),
    ("profile", "zoo:lenet5", "--schedule", "activ=1", "--steps", "1"),
    ("profile", "zoo:lenet5", "--schedule", "active=1", "--steps", "1", "--repeat", "2"),
    ("profile", "zoo:lenet5", "--phase", "backward"),
    ("profile", "zoo:lenet5", "--phase", "optimizer"),
    ("profile", "zoo:lenet5", "--phase", "back"),
    ("profile", "zoo:lenet5", "--sort", "tim"),
    ("profile", "zoo:lenet5", "--by", "op", "--sort", "self"),
    ("profile", "zoo:lenet5", "--sort", "roofline"),
    ("profile", "zoo:lenet5", "--ignore", "aten::view"),
    ("profile", "zoo:lenet5", "--by", "op", "--ignore", "aten::veiw"),
    ("profile", "zoo:lenet5", "--peaks", "H10"),
    ("profile", "zoo:lenet5", "--deepspeed", "--by", "op"),
    ("profile", "zoo:lenet5", "--repeat", "0"),
    ("scale", "zoo:lenet5"),
    ("scale", "zoo:lenet5", "--vary", "batch=1"),
    ("scale", "zoo:lenet5", "--vary", "batch=64..1"),
    ("scale", "zoo:lenet5", "--vary", "depth=1..4"),
    ("scale", "zoo:lenet5", "--vary", "batch=1..4", "--vary", "batch=1..8"),
    ("scale", "zoo:lenet5", "--vary", "batch=1..4", "--metric", "flosp"),
    ("scale", "zoo:lenet5", "--vary", "batch=1..4", "--format", "jsn"),
    ("scale", "zoo:lenet5", "--vary", "batch=1..4", "--plot", "a.pdf"),
    ("scale", "zoo:gpt2", "--device", "meta", "--vary", "seq=1..1025"),
    ("scale", "zoo:gpt2", "--generate", "prompt=8"),
    ("scale", "zoo:gpt2", "--generate", "prompt=8,new=2"),
    ("scale", "zoo:gpt2", "--generate", "prompt=8,new=2", "--backward"),
)

# Each is a table with one mistake.
_TABLES = {
    "unknown key": "multiply_add: 1\nrows: {}",
    "near key": "\nmultiply_ad: 1",
    "bad multiply_add": "multiply_add: two",
    "unknown key of a row": "ops:\n  aten::mm: {mac: 1}",
    "comma outside quotes": "ops:\n  aten::mm: {macs: max(1, 2)}",
    "unknown op in free": "free:\n- aten::view\n- aten::veiw",
    "unknown op of a row": "ops:\n\n  aten::addm: zero_flop",
    "unknown overload": "ops:\n  aten::add.Tenser: zero_flop",
    "an op without namespace": "ops:\n  linear: free",
    "an op as torch prints it": "ops:\n  torch.ops.aten.mm: free",
    "unknown argument": "ops:\n  aten::mm:\n    shapes: m k, k n\n    macs: numel(mat3)",
    "unknown dimension": "ops:\n  aten::mm: {shapes: 'm k, k n', macs: m*k*q}",
    "unknown function": "ops:\n  aten::mm: {macs: numl(self)}",
    "forbidden syntax": "ops:\n  aten::mm: {macs: self.shape}",
    "bad activations": "ops:\n  aten::mm: {activations: numel(ou)}",
    "division by zero": "ops:\n  aten::mm: {macs: 1//0}",
    "negative": "ops:\n  aten::mm: {macs: 1 - 2}",
    "not whole": "ops:\n  aten::mm: {macs: 1/2}",
    "unknown formula": "ops:\n  aten::mm: {use: convolutoin}",
    "use beside macs": "ops:\n  aten::mm: {use: matmul, macs: 1}",
    "no cost": "ops:\n  aten::mm: {label: product}",
    "bad short form": "ops:\n  aten::mm: fre",
    "empty row": "ops:\n  aten::mm:\n",
    "bad pattern": "ops:\n  aten::mm: {shapes: 'm-k, k', macs: m}",
    "too many tensors": "ops:\n  aten::mm: {shapes: 'm, k, n', macs: m}",
    "pattern hides an argument": "ops:\n  aten::topk: {shapes: k n, flops: n}",
    "bad example": "ops:\n  aten::mm: {macs: 1, example: 4 5}",
    "decompose of a core op": "ops:\n  aten::mm: decompose",
    "decompose of a module": "modules:\n  torch.nn.LSTM: decompose",
    "a module that is no name": "modules:\n  torch.nn::LSTM: {macs: 1}",
    "a class that torch lacks": "modules:\n  torch.nn.LSTMM: {macs: 1}",
    "extends nothing": "extends: defualt",
    "extends itself": "extends: extends itself.yaml",
    "no mapping": "- a\n- b",
    "not YAML": "ops: {",
    "a key twice": "multiply_add: 1\nmultiply_add: 2",
    "a pattern that does not fit": "ops:\n  aten::linear: {shapes: 'm k', macs: m}",
    "an anchor": "ops: &a {aten::mm: zero_flop}\nfree: *a",
    "a tag": "ops: !!python/object:os.system {}",
}

_BUDGETS = {
    "no models": "limits: {}",
    "unknown figure": "models:\n  net: {flosp: 1}",
    "bad size": "models:\n  net: {flops: 1Q}",
    "bad tolerance": "models:\n  net: {flops: {max: 1, tolerance: much}}",
    "exact and max": "models:\n  net: {flops: {max: 1, exact: 1}}",
    "negative": "models:\n  net: {flops: -1}",
    "unknown table": "models:\n  net: {table: defualt, flops: 1}",
    "empty": "",
}


def jobs() -> list[Job]:
    """Return the jobs."""
    return [
        Job("mistakes/commands", _write_commands),
        Job("mistakes/calls", _write_calls),
        Job("mistakes/files", _write_files),
    ]


def _write_commands(folder: Folder) -> None:
    commands = Commands(folder)
    with open("budget.yaml", "w") as file:
        file.write("models:\n  net:\n    flops: 1\n")
    with open("bad.yaml", "w") as file:
        file.write("models:\n  net:\n    flosp: 1\n")
    with open("bad.json", "w") as file:
        file.write('{"format": "other"}')
    commands.keep()
    for words in _COUNT:
        commands.run("count", *words)
    commands.run_all(_OTHERS)


def _write_files(folder: Folder) -> None:
    def load(name: str, text: str) -> Any:
        with open(f"{name}.yaml", "w") as file:
            file.write(text)
        return fvflops.load_table(f"{name}.yaml")

    def use(name: str, text: str) -> Any:
        table = load(name, text)
        return fvflops.FlopCountAnalysis(nn.Linear(3, 2), torch.ones(4, 3), table=table).total()

    folder.write("tables.txt", sections({name: partial(use, name, text) for name, text in _TABLES.items()}))
    commands = Commands(folder)
    for name, text in _BUDGETS.items():
        with open("budget.yaml", "w") as file:
            file.write(text)
        commands.keep()
        commands.run("check", "nets.py:narrow", "--budget", "budget.yaml", "--name", "net", name=f"budget {name}")
    whole = fvflops.record_call(nn.Linear(3, 2), (torch.ones(4, 3),)).to_json()
    damaged = {
        "no JSON": "{",
        "other JSON": "[]",
        "another format": '{"format": "other"}',
        "cut short": whole[: len(whole) // 2],
        "a newer schema": whole.replace('"schema":1', '"schema":99'),
        "no schema": whole.replace('"schema":1', '"schema":"1"'),
        "no calls": whole.replace('"calls":', '"clals":', 1),
        "an unknown column": whole.replace('"kind":[', '"knid":[', 1),
        "an unknown phase": whole.replace('"forward"', '"forwards"'),
        "a stack that is not there": whole.replace('"stacks":[[],[0]]', '"stacks":[[],[7]]'),
    }
    folder.write(
        "traces.txt", sections({name: partial(fvflops.Trace.from_json, text) for name, text in damaged.items()})
    )


def _write_calls(folder: Folder) -> None:
    public: Any = fvflops  # whatever the types: what is wrong is meant to be
    linear, x = nn.Linear(3, 2), torch.ones(4, 3)
    analyse = public.FlopCountAnalysis
    flops = analyse(linear, x)
    trace = flops.trace()
    profiled = partial(public.ProfileAnalysis, linear, x)
    tokens = torch.ones(1, 16, dtype=torch.int64)
    tiny = zoo.build("llama_tiny", device="meta")
    calls: dict[str, Callable[[], Any]] = {
        "wrong shape": lambda: analyse(linear, torch.ones(4, 5)).total(),
        "wrong shape, deeper": lambda: analyse(zoo.build("lenet5"), torch.ones(1, 3, 28, 28)).total(),
        "wrong dtype": lambda: analyse(linear, torch.ones(4, 3, dtype=torch.int64)).total(),
        "too many inputs": lambda: analyse(linear, (x, x)).total(),
        "no inputs": lambda: analyse(linear).total(),
        "wrong keyword": lambda: analyse(linear, {"inptu": x}).total(),
        "no model": lambda: analyse(3, x).total(),
        "unknown convention": lambda: analyse(linear, x, table="defualt"),
        "unknown execution": lambda: analyse(linear, x, execution="fast"),
        "unknown module": lambda: flops.total("wieght"),
        "unknown module of operators": lambda: flops.by_operator("0.1"),
        "lone handle": lambda: flops.copy().set_op_handle("aten::linear"),
        "handle of a bad result": lambda: flops.copy().set_op_handle("aten::linear", lambda call: "7").total(),
        "handle of an unknown op": lambda: flops.copy().set_op_handle("aten::lineer", lambda call: 7).total(),
        "handle of an unknown class": lambda: flops.copy().set_module_handle("torch.nn.Linaer", None),
        "handle of a loaded trace": lambda: (
            analyse.from_trace(public.record_call(linear, (x,))).set_op_handle("aten::linear", None).total()
        ),
        "ancestor mode": lambda: flops.ancestor_mode("parent"),
        "tracer warnings": lambda: flops.tracer_warnings("some"),
        "to_dict by": lambda: flops.to_dict(by="layer"),
        "table sort": lambda: public.flop_count_table(flops, sort="flosp"),
        "table top": lambda: public.flop_count_table(flops, top=0),
        "export ending": lambda: flops.export("run.svg"),
        "export format": lambda: flops.export("run.json", format="perfetto"),
        "export weight": lambda: flops.export("run.json", weight="watts"),
        "export time that was not measured": lambda: flops.export("run.json", weight="time"),
        "export path": lambda: flops.export("/dev/null/run.json"),
        "graph format": lambda: flops.to_graph("graphviz"),
        "picture ending": lambda: flops.to_picture("a.pdf"),
        "picture measure": lambda: flops.to_picture("a.svg", measure="flosp"),
        "op calls phase": lambda: flops.op_calls(phase="back"),
        "op calls phase that was not run": lambda: flops.op_calls(phase="backward"),
        "op calls ignore": lambda: flops.op_calls(ignore=["aten::veiw"]),
        "op table sort": lambda: flops.op_table(sort="flosp"),
        "lines": lambda: flops.line_counts(),
        "aggregated": lambda: analyse.from_trace(trace.aggregate()).op_calls(),
        "aggregated memory": lambda: public.predict_memory(trace.aggregate()),
        "memory of another device": lambda: public.predict_memory(flops, device="cuda:7"),
        "part": lambda: public.ByteCountAnalysis(linear, x, part="sent"),
        "merge nothing": lambda: public.Trace.merge([]),
        "merge two models": lambda: public.Trace.merge([trace, public.record_call(nn.ReLU(), (x,))]),
        "loss of a bool": lambda: public.TrainingStepAnalysis(linear, x, loss=lambda y: True).total(),
        "loss of a matrix": lambda: public.TrainingStepAnalysis(linear, x, loss=lambda y: y).total(),
        "optimizer": lambda: public.TrainingStepAnalysis(linear, x, optimizer=3),
        "micro batches": lambda: public.TrainingStepAnalysis(linear, x, micro_batches=0),
        "checkpoint": lambda: public.TrainingStepAnalysis(linear, x, loss=torch.sum, checkpoint=["0"]).total(),
        "step outside": lambda: public.record(linear).step(),
        "measure": lambda: public.record(linear, measure="time").__enter__(),
        "schedule": lambda: public.schedule(active=0),
        "profile repeat": lambda: profiled(repeat=0),
        "profile steps": lambda: profiled(steps=3),
        "profile schedule": lambda: profiled(schedule=public.schedule(wait=3, active=1), steps=2),
        "profile salvage": lambda: profiled().salvage(),
        "kernels entered twice": lambda: public.KernelProfile(3),
        "mfu device": lambda: public.mfu(10**12, 1, device="H10", dtype="bf16"),
        "mfu too good": lambda: public.mfu(10**15, 0.5, device="H100", dtype="fp32"),
        "mfu dtype": lambda: public.mfu(10**12, 1, device="T4", dtype="fp8"),
        "mfu without dtype": lambda: public.mfu(10**12, 1, device="H100"),
        "mfu seconds": lambda: public.mfu(10**12, 0, device="H100", dtype="bf16"),
        "mfu devices": lambda: public.mfu(10**12, 1, device="H100", dtype="bf16", devices=0),
        "hfu too good": lambda: public.hfu({"bf16": 10**16}, 1, device="A100"),
        "find device": lambda: public.find_device("A10000"),
        "device without bandwidth": lambda: public.roofline(flops, device=public.Device("d", vector={"fp32": 1e9})),
        "plan axis": lambda: public.plan_rank(tiny, (tokens,), mesh={"dq": 2}),
        "plan rank": lambda: public.plan_rank(tiny, (tokens,), mesh={"dp": 2}, rank=2),
        "plan heads": lambda: public.plan_rank(tiny, (tokens,), mesh={"tp": 3}),
        "plan of no known model": lambda: public.plan_rank(nn.Sequential(linear), (x,), mesh={"tp": 2}),
        "plan stages": lambda: public.plan_rank(nn.Sequential(linear), (x,), mesh={"pp": 2}),
        "gather": lambda: public.gather(trace),
        "cost of nothing": lambda: public.cost_of(linear, x, vary={}),
        "cost of an unknown size": lambda: public.cost_of(linear, lambda n: torch.ones(n, 3), vary={"m": (1, 4)}),
        "cost of a bad range": lambda: public.cost_of(linear, lambda n: torch.ones(n, 3), vary={"n": 4}),
        "cost by an unknown metric": lambda: public.cost_of(
            linear, lambda n: torch.ones(n, 3), vary={"n": (1, 4)}, metric="flosp"
        ),
        "cost that is refused": lambda: public.cost_of(linear, lambda n: torch.ones(2, n), vary={"n": (3, 4)}),
        "generation": lambda: public.generation_cost(tiny, prompt=2, new=2),
        "generation of nothing": lambda: public.generation_cost(tiny, prompt=2, new=0),
        "diff of nothing": lambda: public.diff(linear, 3, x),
        "compare": lambda: public.compare(linear, x, tables=["default", "defualt"]),
        "register": lambda: public.register_formula("a formula")(3),
        "zoo": lambda: zoo.build("resnet5"),
        "record_call": lambda: public.record_call(linear, (torch.ones(4, 5),)),
        "assume": lambda: analyse(linear, x, assume={"aten::indx": 3}).total(),
        "public name": lambda: public.FlopsCountAnalysis,
    }
    _, out, err = captured(lambda: folder.write("calls.txt", sections(calls)))
    folder.write("printed.txt", f"{out}\n{err}")
