"""PEFT adapters on a base model: counted as the matrix products that they add."""

import json

import pytest
import torch

from fvflops import FlopCountAnalysis
from fvflops.cli import main
from fvflops.sources import SourceOptions, load_model

peft = pytest.importorskip("peft")

WIDTH, HEADS, SEQ, RANK = 32, 4, 10, 3
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}
FACTORY = """
import torch
from torch import nn


def build():
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4)), (torch.rand(7, 6),)
"""


@pytest.fixture
def base(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return f"hf:{tmp_path}"


def write_adapter(folder, config):
    config.save_pretrained(folder)
    return str(folder)


def count(name, **options):
    loaded = load_model(name, SourceOptions(**options))
    return FlopCountAnalysis(loaded.model.eval(), loaded.inputs, kwargs=loaded.kwargs, warn=False)


def test_lora_adds_two_products_of_its_rank(base, tmp_path):
    adapter = write_adapter(tmp_path / "lora", peft.LoraConfig(r=RANK, target_modules=["q_proj", "v_proj"]))
    plain, adapted = count(base, seq=SEQ), count(base, seq=SEQ, adapter=adapter)
    # q_proj: 32 → 32; v_proj: 32 → 2 heads of 8; A is (rank, 32), B is (outputs, rank)
    by_hand = 2 * SEQ * RANK * ((WIDTH + WIDTH) + (WIDTH + 2 * WIDTH // HEADS))
    assert adapted.total() - plain.total() == by_hand
    modules = adapted.by_module()
    assert modules["model.layers.0.self_attn.q_proj.lora_A.default"] == SEQ * RANK * WIDTH
    assert modules["model.layers.0.self_attn.q_proj.base_layer"] == plain.by_module()["model.layers.0.self_attn.q_proj"]


def test_an_adapter_counts_as_in_peft(base, tmp_path):
    """The same count as peft's own wrapper's, whose modules have other names."""
    config = peft.LoraConfig(r=RANK, target_modules=["up_proj", "o_proj"], use_dora=True)
    adapter = write_adapter(tmp_path / "dora", config)
    loaded = load_model(base, SourceOptions(seq=SEQ, device="cpu"))
    wrapped = peft.get_peft_model(loaded.model.eval(), config).eval()
    theirs = FlopCountAnalysis(wrapped, None, kwargs=dict(loaded.kwargs), warn=False).total()
    assert count(base, seq=SEQ, adapter=adapter).total() == theirs


def test_virtual_tokens_lengthen_the_text(base, tmp_path):
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=6)
    adapter = write_adapter(tmp_path / "prompt", config)
    assert count(base, seq=SEQ, adapter=adapter).total() == count(base, seq=SEQ + 6).total()


def test_only_the_adapter_is_trained(base, tmp_path):
    config = peft.LoraConfig(r=RANK, target_modules=["q_proj"], inference_mode=True)
    adapter = write_adapter(tmp_path / "lora", config)
    model = load_model(base, SourceOptions(adapter=adapter)).model
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert len(trained) == 4 and all("lora_" in name for name in trained)


def test_an_adapter_on_a_model_of_a_factory(tmp_path):
    (tmp_path / "base_of_adapter.py").write_text(FACTORY)
    adapter = write_adapter(tmp_path / "lora", peft.LoraConfig(r=2, target_modules=["0"]))
    name = f"{tmp_path / 'base_of_adapter.py'}:build"
    assert count(name, adapter=adapter).total() == 7 * (6 * 5 + 5 * 4) + 7 * 2 * (6 + 5)


def test_a_dtype_is_also_the_adapter_s(base, tmp_path):
    adapter = write_adapter(tmp_path / "lora", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    model = load_model(base, SourceOptions(adapter=adapter, dtype="bf16")).model
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "there is no adapter_config.json: name the folder of a PEFT adapter"),
        ({"peft_type": "LOAR", "target_modules": ["q_proj"]}, "LOAR"),
        ({"peft_type": "LORA", "target_modules": ["nowhere"]}, "nowhere"),
        ("{", "adapter_config.json"),
    ],
)
def test_an_adapter_that_cannot_be_added_is_one_line(capsys, base, tmp_path, config, message):
    folder = tmp_path / "broken"
    folder.mkdir()
    if config is not None:
        (folder / "adapter_config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    assert main(["count", base, "--adapter", str(folder)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and f"--adapter {folder}" in err and message in err
