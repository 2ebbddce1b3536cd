"""Features of the Python interface."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import fvflops
from fvflops.zoo import build

Make = Callable[[], tuple[nn.Module, tuple[Any, ...]]]


def network() -> tuple[nn.Module, tuple[Any, ...]]:
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
    return layers.eval(), (torch.rand(2, 3, 6, 6),)


def llama() -> tuple[nn.Module, tuple[Any, ...]]:
    return build("llama_tiny").eval(), (torch.zeros(1, 8, dtype=torch.long),)


def _analyse(**options):
    return fvflops.FlopCountAnalysis(*network(), **options)


def _step():
    return fvflops.TrainingStepAnalysis(*network(), loss=torch.sum, optimizer=torch.optim.AdamW)


def _handle():
    analysis = _analyse().set_op_handle("aten::relu", lambda inputs, outputs: 7)
    return dict(analysis.by_operator())


def _communicate():
    model, inputs = llama()
    plan = fvflops.plan_rank(model, inputs, mesh={"fsdp": 2}, loss=lambda y: y.sum())
    return [str(plan), fvflops.read_communication(plan.trace).total()]


def _estimate():
    model, inputs = llama()
    plan = fvflops.plan_step(model, inputs, mesh={"dp": 2}, loss=lambda y: y.sum())
    return str(fvflops.estimate_step(plan, device="H100"))


def _profile(measure):
    return measure(fvflops.ProfileAnalysis(*network()))


def _meter():
    model, inputs = network()
    meter = fvflops.StepMeter(model)
    for _ in range(3):
        with meter.step():
            model(*inputs)
    return meter.summary().total.model_flops


def _load(text: str) -> Any:
    trace = fvflops.Trace.from_json(_analyse().trace().to_json())
    return dict(fvflops.FlopCountAnalysis.from_trace(trace, table=text).by_operator())


def _table():
    table = fvflops.load_table("exact")
    return [table.price(signature).flops for signature in _analyse().trace().signatures]


FUNCTIONS = {
    "totals": lambda: [_analyse().total(), dict(_analyse().by_module())],
    "activations": lambda: fvflops.ActivationCountAnalysis(*network()).total(),
    "bytes": lambda: fvflops.ByteCountAnalysis(*network()).total(),
    "fvcore's functions": lambda: [str(fvflops.flop_count(*network())), str(fvflops.activation_count(*network()))],
    "table": lambda: fvflops.flop_count_table(_analyse()),
    "tree": lambda: fvflops.flop_count_str(_analyse()),
    "parameters": lambda: [fvflops.parameter_count_table(network()[0]), str(fvflops.parameter_summary(network()[0]))],
    "training step": lambda: [_step().total(), dict(_step().by_operator())],
    "handle": _handle,
    "saved trace": partial(_load, "exact"),
    "prices": _table,
    "compare": lambda: str(fvflops.compare(*network())),
    "diff": lambda: str(fvflops.diff(_analyse(), _analyse(table="exact"))),
    "memory": lambda: str(fvflops.predict_memory(_step())),
    "memory of a forward pass": lambda: str(fvflops.predict_memory(_analyse())),
    "memory savings": lambda: str(fvflops.memory_savings(_step())),
    "roofline": lambda: str(fvflops.roofline(_analyse(), device="H100")),
    "model flops": lambda: fvflops.model_flops(fvflops.FlopCountAnalysis(*llama())),
    "utilisation": lambda: fvflops.mfu(1e12, 1.0, device="H100", dtype="bf16"),
    "cost of": lambda: str(fvflops.cost_of(nn.Linear(4, 5), lambda n: torch.rand(n, 4), vary={"n": range(1, 4)})),
    "plan": lambda: str(fvflops.plan_step(*llama(), mesh={"tp": 2}, loss=lambda y: y.sum())),
    "communication": _communicate,
    "estimate": _estimate,
    "profile": partial(_profile, lambda profile: [profile.total(), dict(profile.by_operator())]),
    "count many": lambda: [[count.model, count.flops] for count in fvflops.count_many(["zoo:lenet5"])],
    "deepspeed": lambda: fvflops.get_model_profile(network()[0], args=list(network()[1]), print_profile=False)[0],
    "meter": _meter,
    "device": lambda: str(fvflops.find_device("H100")),
}
CASES = dict(FUNCTIONS)
