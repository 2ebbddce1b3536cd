"""Plans of shortened models, expanded, compared with plans of the full models."""

from dataclasses import replace

import pytest
import torch

from fvflops import FlopCountAnalysis
from fvflops.capture.model.meta_copy import copy_to_meta
from fvflops.capture.shortening.shorten import shorten
from fvflops.features.communication.compute import read_communication
from fvflops.features.memory.compute import read_memory
from fvflops.features.planning.plan import plan_rank
from fvflops.trace.expansion.comparison import are_equal_runs
from fvflops.zoo.gpt2 import GPT2, GPT2Config
from fvflops.zoo.llama import CONFIGS, Block, Llama

TOKENS = torch.ones(2, 16, dtype=torch.int64)
AdamW = torch.optim.AdamW


def make_llama():
    return Llama(replace(CONFIGS["llama_tiny"], layers=12))


def make_gpt2():
    return GPT2(GPT2Config(layers=12, width=32, heads=4, vocab_size=100, positions=64))


def make_transformers_llama():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=10, vocab_size=128, **sizes))


CASES = {
    "replicas": (make_llama, {"dp": 2}, {"optimizer": AdamW, "device": "cuda"}),
    "tensor parallel, checkpointed": (make_llama, {"tp": 2}, {"checkpoint": [Block]}),
    "sequence parallel": (make_llama, {"tp": 2}, {"sequence_parallel": True}),
    "context parallel": (make_llama, {"cp": 2}, {}),
    "hybrid": (make_llama, {"dp": 2, "fsdp": 2, "tp": 2}, {"checkpoint": [Block], "optimizer": AdamW}),
    "GPT-2, fully sharded": (make_gpt2, {"fsdp": 2}, {"optimizer": AdamW}),
    "GPT-2, tensor parallel": (make_gpt2, {"tp": 2}, {}),
    "transformers, fully sharded": (make_transformers_llama, {"fsdp": 2, "tp": 2}, {"optimizer": AdamW}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_plan_of_a_shortened_model_expands_to_that_of_the_full_one(name):
    make, mesh, options = CASES[name]
    with torch.device("meta"):
        model = make()
    full = plan_rank(model, (TOKENS,), mesh=mesh, **options).recorded
    short_model = copy_to_meta(model)
    shortened = shorten(short_model, (TOKENS,))
    expanded = shortened.expand(plan_rank(short_model, (TOKENS,), mesh=mesh, **options).recorded).trace
    assert are_equal_runs(expanded, full) and expanded.modules == full.modules
    for table in ("default", "exact"):
        counts, expected = (FlopCountAnalysis.from_trace(trace, table=table, warn=False) for trace in (expanded, full))
        assert counts.by_module_and_operator() == expected.by_module_and_operator()
        assert counts.by_phase() == expected.by_phase() and counts.total() == expected.total() > 0
    communication, expected = read_communication(expanded), read_communication(full)
    assert communication.by_collective_and_group() == expected.by_collective_and_group()
    memory, expected = read_memory(expanded), read_memory(full)
    assert memory.curve() == expected.curve() and memory.at_peak() == expected.at_peak()
