"""Saved traces across versions, the walk over a trace's events, and traces of few layers expanded to all."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from fvflops import FlopCountAnalysis, Trace, record
from fvflops.capture.shorten import Shortened
from fvflops.plan import rank_model
from fvflops.plan.added_optimizers import MasterWeights
from fvflops.plan.plans import plan_rank
from fvflops.trace import Event, ModuleInfo, ModuleTree, Region, RegionSignature, Signature, TraceError
from fvflops.trace.codec import SCHEMA
from fvflops.trace.expansion.recorded_rows import are_equal_runs
from fvflops.trace.trace import walk_events
from fvflops.zoo.gpt2 import GPT2, GPT2Config
from fvflops.zoo.llama import CONFIGS, Block, Llama
from tests.support.checkout import DATA
from tests.support.old_torch import needs
from tests.support.random_cases import long_except

# Written by fvflops 0.1.0, with schema 1: LeNet-5's training step of batch 1024.
SAVED = (DATA / "lenet5_training_trace.json").read_text()


def with_fields(**fields):
    return json.dumps({**json.loads(SAVED), **fields})


def test_a_trace_of_an_earlier_release_loads_and_counts_the_same():
    trace = Trace.from_json(SAVED)
    assert json.loads(SAVED)["schema"] == 1
    analysis = FlopCountAnalysis.from_trace(trace, warn=False)
    # Forward, and backward twice as much, but for the gradient of the images, which conv1 need not compute.
    assert analysis.total() == 1024 * (3 * 416_520 - 117_600)
    assert Trace.from_json(trace.to_json()) == trace


@pytest.mark.parametrize("schema", [SCHEMA + 1, 99, 0, -1, True, "1", None, 1.0])
def test_another_schema_is_refused_in_one_line(schema):
    with pytest.raises(TraceError) as caught:
        Trace.from_json(with_fields(schema=schema))
    message = f"this trace has schema {schema!r}, but this version of fvflops reads up to {SCHEMA}: update fvflops"
    assert str(caught.value) == message


def test_a_newer_schema_is_refused_before_its_fields_are_read():
    with pytest.raises(TraceError, match="update fvflops"):
        Trace.from_json(json.dumps({"format": "fvflops.trace", "schema": SCHEMA + 1, "calls": {"of": "another form"}}))


def test_a_key_that_a_later_release_adds_is_ignored():
    assert Trace.from_json(with_fields(colour="red")) == Trace.from_json(SAVED)


def test_an_unknown_column_of_events_is_refused():
    events = json.loads(SAVED)["events"]
    with pytest.raises(TraceError, match="events have unknown columns: \\['colour'\\]"):
        Trace.from_json(with_fields(events={**events, "colour": [0] * events["length"]}))


TOKENS = torch.ones(2, 16, dtype=torch.int64)
AdamW = torch.optim.AdamW


def make_llama(layers=10):
    return Llama(replace(CONFIGS["llama_tiny"], layers=layers))


def make_gpt2():
    return GPT2(GPT2Config(layers=8, width=32, heads=4, vocab_size=100, positions=64))


def make_transformers_llama():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=8, vocab_size=128, **sizes))


CASES = {
    "replicas": (make_llama, {"dp": 2}, {"optimizer": AdamW, "device": "cuda"}),
    "context parallel": (make_llama, {"cp": 2}, {"checkpoint": ["layers.0"]}),
    "hybrid": (
        make_llama,
        {"dp": 2, "fsdp": 2, "tp": 2},
        {"checkpoint": [Block], "sequence_parallel": True, "optimizer": AdamW},
    ),
    "stages": (partial(make_llama, 18), {"pp": 2, "fsdp": 2}, {"microbatches": 3, "optimizer": AdamW}),
    "GPT-2": (make_gpt2, {"fsdp": 2}, {"microbatches": 2, "reduce_each_microbatch": False}),
    "master weights": (make_gpt2, {"dp": 2}, {"precision": "bf16", "optimizer": partial(MasterWeights, make=AdamW)}),
    "tensor and sequence parallel": (make_llama, {"tp": 2}, {"checkpoint": [Block], "sequence_parallel": True}),
    "transformers": (make_transformers_llama, {"fsdp": 2, "tp": 2}, {"optimizer": AdamW}),
}


def read_slices(step):
    return [(step.pass_of(action).begin, step.pass_of(action).end) for action in step.actions]


@needs("plan and sharded memory")
@pytest.mark.parametrize("name", long_except(list(CASES)[:6], CASES))
def test_a_plan_of_few_layers_is_that_of_all(name, monkeypatch):
    make, mesh, options = CASES[name]
    with torch.device("meta"):
        model = make()
    if "pp" in mesh:  # a tensor that torch creates once in a program is recorded in its first step
        plan_rank(model, TOKENS, mesh=mesh, **options)
    expansions = []

    def watch(shortened, trace, **where):
        expansions.append(expand(shortened, trace, **where))
        return expansions[-1]

    expand = Shortened.expand
    monkeypatch.setattr(Shortened, "expand", watch)
    plan = plan_rank(model, TOKENS, mesh=mesh, **options)
    assert expansions and None not in expansions
    monkeypatch.setattr(rank_model, "shorten", lambda *arguments, **marked: None)
    full = plan_rank(model, TOKENS, mesh=mesh, **options)
    assert are_equal_runs(plan.recorded, full.recorded) and plan.recorded.modules == full.recorded.modules
    assert read_slices(plan.step) == read_slices(full.step)
    assert (plan.parameters, plan.parameter_bytes) == (full.parameters, full.parameter_bytes)
    for table in ("default", "exact"):
        counts, expected = plan.flops(table), full.flops(table)
        assert counts.by_module_and_operator() == expected.by_module_and_operator()
        assert counts.by_phase() == expected.by_phase() and counts.total() == expected.total() > 0
    assert plan.communication().by_collective_and_group() == full.communication().by_collective_and_group()
    memory, expected = plan.memory(), full.memory()
    assert memory.curve() == expected.curve() and memory.at_peak() == expected.at_peak()


@needs("plan and sharded memory")
def test_layers_that_are_checkpointed_irregularly_are_all_recorded(monkeypatch):
    with torch.device("meta"):
        model = make_llama()
    options = {"mesh": {"dp": 2}, "checkpoint": ["layers.2", "layers.5", "layers.9"]}
    plan = plan_rank(model, TOKENS, **options)
    monkeypatch.setattr(rank_model, "shorten", lambda *arguments, **marked: None)
    assert are_equal_runs(plan.recorded, plan_rank(model, TOKENS, **options).recorded)


NAMES = ("", "a", "b")


def trace_of(*events):
    modules = ModuleTree({name: ModuleInfo(name, name, "Module") for name in NAMES})
    regions = tuple(Region("module", name) for name in NAMES)
    ends = [RegionSignature(index, (), ()) for index in range(len(NAMES))]
    signatures = (Signature("aten::relu", ("self",), (None,), (None,)),)
    return Trace(modules, regions, ((),), signatures, ends, {}, {}, events=events)


def visits(trace):
    return [(kind, NAMES[call.region], call.depth) for kind, _, call, _ in walk_events(trace) if call is not None]


def enter(region, thread=0):
    return Event("enter", region, thread=thread)


def leave(region, thread=0):
    return Event("exit", region, thread=thread)


def test_calls_nest_and_each_thread_by_itself():
    trace = trace_of(enter(0), enter(1, 1), Event("op", 0), Event("op", 0, thread=1), leave(1, 1), leave(0))
    assert visits(trace) == [
        ("enter", "", 0),
        ("enter", "a", 0),
        ("op", "", 0),
        ("op", "a", 0),
        ("exit", "a", 0),
        ("exit", "", 0),
    ]


def test_a_region_that_was_left_without_an_exit_is_unfinished():
    trace = trace_of(enter(0), enter(1), enter(2), leave(1), enter(2))
    assert visits(trace)[3:] == [
        ("unfinished", "b", 2),
        ("exit", "a", 1),
        ("enter", "b", 1),
        ("unfinished", "b", 1),
        ("unfinished", "", 0),
    ]


def test_an_exit_without_an_enter_is_visited_as_both():
    assert visits(trace_of(enter(0), leave(2), leave(0))) == [
        ("enter", "", 0),
        ("enter", "b", 1),
        ("exit", "b", 1),
        ("exit", "", 0),
    ]


def test_a_trace_without_order_has_no_visits_and_what_runs_outside_no_call():
    assert list(walk_events(trace_of().aggregate())) == []
    assert [visit.call for visit in walk_events(trace_of(Event("op", 0)))] == [None]


def test_every_call_of_a_recording_is_left_once():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    with record(model) as run:
        model(torch.ones(2, 3)).sum().backward()
    begun, ended = [], []
    for kind, _, call, _ in walk_events(run.trace()):
        if kind == "enter":
            begun.append(call)
        elif kind in ("exit", "unfinished"):
            ended.append(call)
            assert all(outer not in ended for outer in call.enclosing())
    assert set(begun) == set(ended) and len(begun) == len(ended) == 3
