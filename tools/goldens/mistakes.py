"""Mistakes: what is said of bad command lines, bad calls of the public interface, and bad tables and budgets."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import fvflops
from fvflops import zoo
from goldens.command_cases import read_cases, run_lines
from goldens.commands import Commands
from goldens.counts import sections
from goldens.jobs import Folder, Job, captured


def jobs() -> list[Job]:
    """Return the jobs."""
    return [
        Job("mistakes/commands", _write_commands),
        Job("mistakes/calls", _write_calls),
        Job("mistakes/files", _write_files),
    ]


def _write_commands(folder: Folder) -> None:
    commands = Commands(folder)
    run_lines("mistakes/commands", commands)
    commands.run()


def _write_files(folder: Folder) -> None:
    def load(name: str, text: str) -> Any:
        with open(f"{name}.yaml", "w") as file:
            file.write(text)
        return fvflops.load_table(f"{name}.yaml")

    def use(name: str, text: str) -> Any:
        table = load(name, text)
        return fvflops.FlopCountAnalysis(nn.Linear(3, 2), torch.ones(4, 3), table=table).total()

    folder.write(
        "tables.txt", sections({name: partial(use, name, text) for name, text in read_cases()["tables"].items()})
    )
    commands = Commands(folder)
    for name, text in read_cases()["budgets"].items():
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
