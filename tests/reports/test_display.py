"""What `repr`, `print` and IPython show of everything that users are given.

`repr` is one line of fewer than 120 characters, and neither runs nor counts anything. `print` of a result writes a
table of at most 80 columns; of a record, such as a row of a table, that line.
"""

import math
import re
from collections import OrderedDict
from fractions import Fraction
from functools import partial

import pytest
import torch
from torch import nn

import fvflops
from fvflops.analysis.steps import StepCount
from fvflops.comparison.budget_file import Budget, Limit
from fvflops.comparison.cost_functions import Axis, CostExpression, GenerationCost
from fvflops.comparison.model_budget import check_budget
from fvflops.comparison.polynomial import Polynomial
from fvflops.measure.step_meter.step_figures import MeterSummary
from fvflops.plan.trace_changes import Ranks
from fvflops.reports.display import WIDTH
from fvflops.text import record_repr
from fvflops.trace.calls import OpGraph
from fvflops.zoo import build

LONGEST = 119
# A default repr, or a value that has none of its own.
ADDRESS = re.compile(r" at 0x[0-9a-f]+|object at|<function|<built-in")
ESCAPE = "line\nbreak" + "x" * 200


class Hostile(nn.Sequential):
    """A model whose class, modules and ops have long names and line breaks."""


Hostile.__name__ = Hostile.__qualname__ = "Hostile" + ESCAPE


def linear_cost(name):
    axes = (Axis(name, 1, 99),)
    return CostExpression("flops", axes, Polynomial.of((name,), {(1,): 8}), axes)


def make_net():
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(12)]
    return nn.Sequential(*blocks, nn.Linear(8, 4))


@pytest.fixture(scope="module")
def shown():
    """Return name → object, for every public class and for what every public function returns."""
    torch.manual_seed(0)
    net, x = make_net(), torch.ones(4, 8)
    flops = fvflops.FlopCountAnalysis(net, x, warn=False)
    step = fvflops.TrainingStepAnalysis(net, x, loss=torch.sum, optimizer=torch.optim.SGD, warn=False)
    with fvflops.record(net, warn=False) as run:
        for rows in (1, 2):
            net(torch.ones(rows, 8)).sum().backward()
            run.step()
    meter = fvflops.StepMeter(net, device=fvflops.Device("mine", matrix={"fp32": 10**12}))
    for _ in range(3):
        with meter.step():
            net(x).sum().backward()
    plain = fvflops.ModelAnalysis(net, x)
    memory = fvflops.predict_memory(step)
    profile = fvflops.ProfileAnalysis(net, x, repeat=2)
    llama, ids = build("llama_tiny", device="meta"), torch.ones(8, 128, dtype=torch.int64)
    plan = fvflops.plan_rank(llama, (ids,), mesh={"tp": 2})
    pipeline = fvflops.plan_step(llama, ids, mesh={"pp": 2}, microbatches=2)
    estimate = fvflops.estimate_step(pipeline, device="H100")
    choices = {"tp": [1], "pp": [1], "micro-batch": [1], "checkpoint": ["none"]}
    search = fvflops.search_layouts(llama, ids[:1, :16], gpus=2, global_batch=2, device="H100", choices=choices)
    with fvflops.KernelProfile(net) as kernels:
        net(x)
    kernels.count(partial(net, x))
    roof = fvflops.roofline(flops, device="H100")
    cost = fvflops.cost_of(net, lambda batch: torch.ones(batch, 8), vary={"batch": (1, 64)})
    parts = linear_cost("prompt"), linear_cost("cache")
    generation = GenerationCost("flops", 1, 9, 5, *parts, None, 99, counted_up_to=9)
    difference = fvflops.diff(net, make_net()[2:], x)
    comparison = fvflops.compare(net, x)
    summary = meter.summary()
    hostile = fvflops.FlopCountAnalysis(Hostile(OrderedDict({ESCAPE: nn.Linear(8, 8)})), x, warn=False)
    counts = flops.counts()
    savings = fvflops.memory_savings(step)
    budget = Budget("net", {"flops": Limit("flops", 20, tolerance=Fraction(1, 100))})
    tables = {
        "serving": fvflops.serve_model(llama, device="H100"),
        "serving search": fvflops.search_serving(llama, device="H100", gpus=1, precisions=[("bf16", "bf16")]),
        "flops": flops,
        "activations": fvflops.ActivationCountAnalysis(net, x, warn=False),
        "bytes": fvflops.ByteCountAnalysis(net, x, warn=False),
        "handles": plain,
        "step": step,
        "record": run,
        "trace": flops.trace(),
        "counts": counts,
        "summary": fvflops.summarise(flops),
        "memory": memory,
        "savings": savings,
        "profile": profile,
        "measured": profile.measured(),
        "times": profile.times(),
        "roofline": roof,
        "plan": plan,
        "step plan": pipeline,
        "communication": plan.communication(),
        "estimate": estimate,
        "search": search,
        "difference": difference,
        "comparison": comparison,
        "generation": generation,
        "budget": check_budget(flops, budget),
        "kernels": kernels,
        "kernel averages": kernels.key_averages(),
        "parameters": fvflops.parameter_summary(flops),
        "device": fvflops.find_device("H100"),
        "table": fvflops.load_table("default"),
        "hostile": hostile,
        "hostile trace": hostile.trace(),
        "hostile memory": fvflops.predict_memory(hostile),
        "hostile summary": fvflops.summarise(hostile),
        "ranks": Ranks({0: flops.trace(), 1: flops.trace()}),
    }
    row = next(fvflops.count_many([("net", lambda: (net, x)), ESCAPE]))
    lines = {
        "meter": meter,
        "meter summary": summary,
        "figures": meter.last,
        "per step": run.per_step(),
        "step count": run.per_step().each[0],
        "empty step count": StepCount({}, {}),
        "unknown figures": MeterSummary(1, fvflops.StepFigures(1, 0.1, mfu=math.nan), ()),
        "moment": memory.at_peak(),
        "block": memory.blocks[0],
        "saving": savings.changes[0] if savings.changes else savings,
        "model count": row,
        "failed model count": next(iter(fvflops.count_many([ESCAPE]))),
        "load": roof.total(),
        "bounded": roof.entries[0],
        "module change": difference.by_module()[0],
        "operator change": difference.by_operator()[0],
        "total change": difference.total(),
        "side": difference.before,
        "convention": comparison.totals["default"],
        "reason": comparison.between("default", "exact")[0],
        "profile row": profile.measured().total(),
        "kernel row": kernels.key_averages()[0],
        "kernel match": kernels.match(),
        "cost expression": cost,
        "polynomial": Polynomial.of([f"size_{index}" for index in range(40)], {(1,) * 40: 3}),
        "parameter count": fvflops.parameter_summary(flops)[""],
        "source options": fvflops.SourceOptions(inputs=("1,3,224,224",) * 20, dtype="bf16"),
        "stops": flops.trace().stops_at,
        "call": fvflops.Call("aten::relu", {"self": flops.trace().signatures[0].inputs[0]}, ()),
        "cost": fvflops.Cost(macs=10**18, flops=10**18, activations=10**18),
        "entry": counts.entries[0],
        "op call": flops.op_calls()[0],
        "module call": flops.module_calls()[0],
        "graph": OpGraph(flops.op_calls(), flops.module_tree()),
        "module tree": flops.module_tree(),
        "profiler": fvflops.FlopsProfiler(net),
        "transfer": plan.communication().transfers[0],
        "rank step": plan.step,
        "action": plan.step.actions[0],
        "pass": plan.step.pass_of(plan.step.actions[0]),
        "layout": search.best()[0],
        "candidate": search.best()[0].candidate,
        "efficiency": estimate.efficiency,
        "network": estimate.network,
        "link": estimate.network.between,
        "serving layout": fvflops.ServingLayout(),
        "serving load": fvflops.ServingLoad(),
        "latency limits": fvflops.LatencyLimits(),
        "planned step": fvflops.expect_step(estimate),
        "finding": fvflops.Finding("copies", "take 2 ms", 0.002, ("aten::copy_: 3 calls",), "remove them", "measured"),
        "op estimate": fvflops.estimate_op("mm", [(4, 8), (8, 4)], device="H100"),
        "training cost": estimate.cost_to_train(15e12, price=2.5, watts=700),
        "master weights": fvflops.MasterWeights(net.parameters(), torch.optim.AdamW),
    }
    return tables, lines


def test_repr_is_one_short_line_of_everything(shown):
    tables, lines = shown
    for name, value in {**tables, **lines}.items():
        text = repr(value)
        assert len(text) <= LONGEST and text.isprintable(), f"{name}: {len(text)} characters: {text}"
        assert not ADDRESS.search(text), f"{name}: {text}"
        assert type(value).__name__.lstrip("_")[:40] in text or name == "cost expression", f"{name}: {text}"


def test_print_of_a_result_is_a_table_of_80_columns(shown):
    for name, value in shown[0].items():
        text = str(value)
        wide = [line for line in text.splitlines() if len(line) > WIDTH]
        if name not in ("kernels", "kernel averages", "parameters"):  # with the columns of torch.profiler and fvcore
            assert not wide, f"{name}: {wide}"
        assert re.search(r"^\W*-{2,}", text, re.MULTILINE), f"{name} has no table:\n{text}"
        assert not ADDRESS.search(text) and len(text.splitlines()) <= 120, f"{name}:\n{text}"


def test_ipython_shows_the_table(shown):
    for name, value in shown[0].items():
        bundle = getattr(value, "_repr_mimebundle_", None)
        assert bundle is None or bundle(include=None, exclude=None) == {"text/plain": str(value)}, name


def test_every_public_class_is_shown(shown):
    tables, lines = shown
    kinds = {kind for value in [*tables.values(), *lines.values()] for kind in type(value).__mro__}
    named = {name: getattr(fvflops, name) for name in fvflops.__all__}
    classes = {name for name, value in named.items() if isinstance(value, type) and not issubclass(value, Exception)}
    missing = {name for name in classes if named[name] not in kinds}
    # Results from files are in tests/measure/test_kernels_annotation.py and tests/explain/test_explain_trace.py.
    assert missing == {"AnnotatedTrace", "ExplainedTrace"}


def test_repr_runs_and_counts_nothing():
    calls = []

    class Net(nn.Module):
        def forward(self, x):
            calls.append(x)
            return x * 2

    analyses = [
        fvflops.FlopCountAnalysis(Net(), torch.ones(2)),
        fvflops.ModelAnalysis(Net()),
        fvflops.TrainingStepAnalysis(Net(), torch.ones(2)),
        fvflops.ProfileAnalysis(Net(), torch.ones(2)),
        fvflops.record(Net()),
        fvflops.KernelProfile(Net()),
        fvflops.StepMeter(Net()),
    ]
    assert all("Net" in repr(analysis) for analysis in analyses) and not calls
    assert "not run yet" in repr(analyses[0])
    analyses[0].trace()
    assert "1 op call recorded" in repr(analyses[0]) and analyses[0]._counts is None
    assert str(analyses[4]) == repr(analyses[4]) == "<record of Net: not entered yet>"
    assert str(analyses[6]) == "no step yet"


def test_repr_of_states_of_a_recording():
    net = nn.Linear(2, 2)
    run = fvflops.record(net)
    with run:
        net(torch.ones(1, 2))
        assert repr(run) == "<record of Linear: recording, 0 steps>"
    assert repr(run) == "<record of Linear>"
    assert run.total() == 4 and repr(run) == "<record of Linear: 4 FLOPs>"


def test_what_fails_in_a_comparison_of_reprs_is_seen():
    assert ADDRESS.search(repr(object()))
    assert len(record_repr(fvflops.SourceOptions(inputs=("x" * 500,)))) <= LONGEST
    assert record_repr(fvflops.SourceOptions()) == "SourceOptions()"
