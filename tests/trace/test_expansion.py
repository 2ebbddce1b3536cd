"""Traces of few layers, expanded to all of them: plans of models, compared with plans that ran all layers."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from fvflops.capture.shorten import Shortened
from fvflops.plan import rank_model
from fvflops.plan.added_optimizers import MasterWeights
from fvflops.plan.plans import plan_rank
from fvflops.trace.expansion.recorded_rows import are_equal_runs
from fvflops.zoo.gpt2 import GPT2, GPT2Config
from fvflops.zoo.llama import CONFIGS, Block, Llama
from tests.support.old_torch import needs

TOKENS = torch.ones(2, 16, dtype=torch.int64)
AdamW = torch.optim.AdamW


def make_llama():
    return Llama(replace(CONFIGS["llama_tiny"], layers=18))


def make_gpt2():
    return GPT2(GPT2Config(layers=12, width=32, heads=4, vocab_size=100, positions=64))


def make_transformers_llama():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=10, vocab_size=128, **sizes))


CASES = {
    "replicas": (make_llama, {"dp": 2}, {"optimizer": AdamW, "device": "cuda"}),
    "tensor and sequence parallel": (make_llama, {"tp": 2}, {"checkpoint": [Block], "sequence_parallel": True}),
    "context parallel": (make_llama, {"cp": 2}, {"checkpoint": ["layers.0"]}),
    "hybrid": (make_llama, {"dp": 2, "fsdp": 2, "tp": 2}, {"checkpoint": [Block], "optimizer": AdamW}),
    "stages": (make_llama, {"pp": 2, "fsdp": 2}, {"microbatches": 3, "optimizer": AdamW}),
    "GPT-2": (make_gpt2, {"fsdp": 2}, {"microbatches": 2, "reduce_each_microbatch": False}),
    "master weights": (make_gpt2, {"dp": 2}, {"precision": "bf16", "optimizer": partial(MasterWeights, make=AdamW)}),
    "transformers": (make_transformers_llama, {"fsdp": 2, "tp": 2}, {"optimizer": AdamW}),
}


def read_slices(step):
    return [(step.pass_of(action).begin, step.pass_of(action).end) for action in step.actions]


@needs("plan and sharded memory")
@pytest.mark.parametrize("name", CASES)
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
    options = {"mesh": {"dp": 2}, "checkpoint": ["layers.3", "layers.8", "layers.14"]}
    plan = plan_rank(model, TOKENS, **options)
    monkeypatch.setattr(rank_model, "shorten", lambda *arguments, **marked: None)
    assert are_equal_runs(plan.recorded, plan_rank(model, TOKENS, **options).recorded)
