"""Models of a `quantization_config`: their weights are packed, and every command counts them so."""

import json

import pytest
import torch
from torch import nn

from fvflops import FlopCountAnalysis, parameter_summary, predict_memory, record_call
from fvflops.cli import main
from fvflops.counting.count_trace import find_dtype
from fvflops.sources.load import load_model
from fvflops.sources.options import SourceOptions
from fvflops.sources.weights.packed_weight import PackedWeight, bits_of
from fvflops.sources.weights.quantise import Scheme, read_scheme
from fvflops.trace import Status, Symbol

transformers = pytest.importorskip("transformers")

HIDDEN, INNER, HEADS, VOCABULARY = 256, 512, 4, 1000
SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "dtype": "bfloat16",
}
# Of a layer: queries and outputs, keys and values, and the MLP.
LINEAR = 2 * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * HIDDEN // 2 + 3 * HIDDEN * INNER)
OTHER = 2 * VOCABULARY * HIDDEN + 5 * HIDDEN  # embedding, output layer, norms
NF4 = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
}


def int4(strategy="group", **more):
    weights = {"num_bits": 4, "type": "int", "strategy": strategy, "group_size": 128, "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"a": {"targets": ["Linear"], "weights": weights, **more}},
    }


W8A8 = {"num_bits": 8, "type": "float"}
FP8 = {
    "quant_method": "compressed-tensors",
    "config_groups": {
        "a": {"targets": ["Linear"], "weights": {**W8A8, "strategy": "channel"}, "input_activations": W8A8}
    },
    "ignore": ["lm_head"],
}
# Name → config, dtype of a weight, its bits with scales (hand count), and the dtype of products.
FORMATS = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "int4", 4 + 16 / 128 + 4 / 128, "bfloat16"),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 64}, "int4", 4 + 16 / 64 + 4 / 64, "bfloat16"),
    "gptq 3": ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "int3", None, "bfloat16"),
    "nf4": (NF4, "nf4", 4 + 8 / 64 + 32 / (64 * 256), "bfloat16"),
    "int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "int8", None, "int8"),
    "fp8": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        "float8_e4m3fn",
        8 + 32 / 128**2,
        "float8_e4m3fn",
    ),
    "int4 of compressed-tensors": (int4(), "int4", 4 + 16 / 128, "bfloat16"),
    "fp8 of compressed-tensors": (FP8, "float8_e4m3fn", None, "float8_e4m3fn"),
    "torchao": ({"quant_method": "torchao", "quant_type": "int8_weight_only"}, "int8", None, "bfloat16"),
    "quanto": ({"quant_method": "quanto", "weights": "int8"}, "int8", None, "bfloat16"),
    "hqq": (
        {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64}}},
        "int4",
        4 + 16 / 64 + 8 / 64,
        "bfloat16",
    ),
    "bitnet": ({"quant_method": "bitnet"}, "int2", None, "int8"),
    "eetq": ({"quant_method": "eetq", "weights": "int8"}, "int8", None, "bfloat16"),
    "fp_quant": (
        {"quant_method": "fp_quant", "forward_dtype": "mxfp4"},
        "float4_e2m1fn",
        4 + 8 / 32,
        "float4_e2m1fn_x2",
    ),
}


def folder(path, settings, config=None, **sizes):
    """Write a config.json with a `quantization_config`; return the name of the model."""
    config = transformers.LlamaConfig(**{**SIZES, **sizes}) if config is None else config
    values = {**config.to_dict(), "architectures": [type(config).__name__.replace("Config", "ForCausalLM")]}
    if settings is not None:
        values["quantization_config"] = settings
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(values))
    return f"hf:{path}"


def count(name):
    subject = load_model(name, SourceOptions(device="meta"))
    return subject, FlopCountAnalysis(subject.model.eval(), subject.inputs, kwargs=subject.kwargs, warn=False)


@pytest.mark.parametrize("name", FORMATS)
def test_a_folder_with_a_quantization_config(name, tmp_path):
    settings, dtype, bits, compute = FORMATS[name]
    if not hasattr(torch, compute):
        with pytest.raises(ValueError, match=f"has no {compute}"):
            load_model(folder(tmp_path, settings), SourceOptions(device="meta"))
        return
    subject, analysis = count(folder(tmp_path / "packed", settings))
    _, plain = count(folder(tmp_path / "plain", None))
    by_dtype = parameter_summary(subject.model)[""].by_dtype
    assert by_dtype["bfloat16"] == (OTHER, 2 * OTHER)
    assert by_dtype[dtype].elements == LINEAR
    width = bits or bits_of(dtype)
    assert width <= by_dtype[dtype].bits < width + 0.5
    if bits is not None:
        assert by_dtype[dtype].bits == pytest.approx(bits, rel=2e-3)
    assert analysis.by_operator() == plain.by_operator()
    products = 128 * LINEAR
    dtypes = analysis.by_dtype()
    assert dtypes[compute] == (plain.by_dtype()[compute] if compute == "bfloat16" else products)
    assert not analysis.counts().ledger()[Status.UNSUPPORTED]
    weights = by_dtype[dtype].nbytes + 2 * OTHER
    memory = predict_memory(analysis).at_peak().by_kind["parameter"]
    assert memory == weights


@pytest.mark.parametrize(
    "settings",
    [
        {"quant_method": "aqlm"},
        {"quant_method": "vptq"},
        {"quant_method": "gptq", "bits": "four"},
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf5"},
        {"quant_method": "quanto", "weights": "int3"},
        {"quant_method": "torchao", "quant_type": "float8_semi_sparse"},
        {**int4(), "config_groups": {**int4()["config_groups"], "b": FP8["config_groups"]["a"]}},
        {},
    ],
)
def test_what_is_not_known_is_said_in_one_line(settings, tmp_path, caplog):
    subject = load_model(folder(tmp_path / "model", settings or {"bits": 4}), SourceOptions(device="meta"))
    assert set(parameter_summary(subject.model)[""].by_dtype) == {"bfloat16"}
    (record,) = [record for record in caplog.records if "quantization_config" in record.getMessage()]
    assert "is not applied, weights are bfloat16" in record.getMessage() and "\n" not in record.getMessage()


def test_modules_that_the_settings_leave_out(tmp_path):
    settings = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 64,
        "modules_to_not_convert": ["down_proj", "model.layers.0"],
    }
    subject, _ = count(folder(tmp_path / "model", settings))
    packed = {name for name, item in subject.model.named_parameters() if isinstance(item, PackedWeight)}
    assert {name.split(".")[-2] for name in packed} == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"}
    assert all(".layers.1." in name for name in packed)


@pytest.mark.parametrize("kind", ["GptOss", "Qwen3Moe"])
def test_experts(kind, tmp_path):
    """gpt-oss has experts alone in MXFP4; of DeepSeek's FP8 linear layers and experts, and the router is kept."""
    sizes = {**SIZES, "head_dim": 64, "num_experts_per_tok": 2}
    if kind == "GptOss":
        config = transformers.GptOssConfig(**sizes, num_local_experts=4)
        settings, dtype, elements = {"quant_method": "mxfp4"}, "float4_e2m1fn", 2 * 4 * 3 * HIDDEN * INNER
    else:
        config = transformers.Qwen3MoeConfig(**sizes, num_experts=4, moe_intermediate_size=128)
        settings, dtype = {"quant_method": "fp8", "weight_block_size": [128, 128]}, "float8_e4m3fn"
        elements = 2 * (4 * 3 * HIDDEN * 128 + 3 * HIDDEN * HIDDEN)
    subject, analysis = count(folder(tmp_path / "packed", settings, config))
    _, plain = count(folder(tmp_path / "plain", None, config))
    assert parameter_summary(subject.model)[""].by_dtype[dtype].elements == elements
    assert analysis.by_operator() == plain.by_operator()
    assert not analysis.counts().ledger()[Status.UNSUPPORTED]


def test_qlora_in_one_command(tmp_path, capsys):
    """A 4-bit base with LoRA: gradients and state are the adapter's alone, and the base is read packed."""
    name = folder(tmp_path / "base", NF4)
    adapter = tmp_path / "lora"
    adapter.mkdir()
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    options = ["--adapter", str(adapter), "--optimizer", "paged_adamw_32bit", "--device", "cuda", "--no-savings"]
    assert main(["memory", name, *options, "--format", "json"]) == 0
    highest = {row["kind"]: row["highest"] for row in json.loads(capsys.readouterr().out)["tables"]["kinds"]["rows"]}
    lora = 2 * 8 * (HIDDEN + HIDDEN + HIDDEN + HIDDEN // 2)
    packed = LINEAR * (4 + 8 / 64 + 32 / (64 * 256)) / 8
    rounding = 512 * 200
    assert packed + 2 * OTHER + 2 * lora <= highest["parameter"] <= packed + 2 * OTHER + 4 * lora + rounding
    assert 2 * lora <= highest["gradient"] <= 4 * lora + rounding


def test_a_plan_says_that_shards_are_not_packed(tmp_path, capsys):
    name = folder(tmp_path / "base", FORMATS["gptq"][0])
    assert main(["plan", name, "--mesh", "dp=2"]) == 0
    whole = capsys.readouterr().out
    assert "packed weights" not in whole
    stored = load_model(name, SourceOptions(device="meta")).model
    assert f"{parameter_summary(stored)[''].nbytes:,}" in whole
    assert main(["plan", name, "--mesh", "fsdp=2"]) == 0
    assert "Not included: packed weights" in capsys.readouterr().out


@pytest.mark.parametrize("format", ["int3", "int4", "int8", "nf4", "float4_e2m1fn", "float8_e4m3fn"])
def test_products_are_those_of_the_unpacked_weight(format):
    """Codes drawn at random: the kernels, the gradient and every other op agree with the weight itself."""
    scheme = Scheme(format, torch.float32, (1, 16), offset_bits=8 if format == "int8" else 0)
    packed = scheme.pack(torch.zeros(24, 40))
    if packed.codes.dtype.is_floating_point:
        packed.codes.copy_(torch.randn(24, 40))
    else:
        packed.codes.random_(0, 100)
    packed.scale.uniform_(0.5, 2.0)
    dense = packed.unpack()
    assert dense.shape == (24, 40) and dense.abs().max() > 0 and len(dense.unique()) >= 8
    layer = nn.Linear(40, 24)
    layer._parameters["weight"] = nn.Parameter(packed, requires_grad=False)
    x = torch.randn(5, 40, requires_grad=True)
    expected = x @ dense.T + layer.bias
    torch.testing.assert_close(layer(x), expected)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), expected)
    (gradient,) = torch.autograd.grad(layer(x).sum(), x)
    torch.testing.assert_close(gradient, dense.sum(0).expand(5, 40))
    torch.testing.assert_close(packed.mT @ torch.ones(24), dense.T @ torch.ones(24))
    torch.testing.assert_close(packed + 1, dense + 1)


def test_an_expert_of_a_stack_stays_packed():
    packed = Scheme("int4", torch.float32, (1, 16)).pack(torch.zeros(3, 8, 32))
    packed.codes.random_(0, 255)
    packed.scale.uniform_(0.5, 2.0)
    assert isinstance(packed[1], PackedWeight)
    torch.testing.assert_close(packed[1].unpack(), packed.unpack()[1])
    torch.testing.assert_close(packed[1:], packed.unpack()[1:])


@pytest.mark.parametrize("execution", ["shapes", "real"])
def test_a_packed_layer_in_every_execution(execution):
    layer = nn.Linear(64, 32)
    layer._parameters["weight"] = nn.Parameter(Scheme("int4", block=(1, 32)).pack(layer.weight.detach()), False)
    model = nn.Sequential(nn.Linear(64, 64), layer)
    x = torch.randn(4, 64)
    assert FlopCountAnalysis(model, x, execution=execution).total() == 4 * 64 * (64 + 32)
    trace = record_call(model, (x,), loss=torch.sum, execution=execution)
    step = FlopCountAnalysis.from_trace(trace)
    assert step.total() == 4 * 64 * (2 * 64 + 2 * 32)  # neither the input nor the packed weight needs a gradient
    assert parameter_summary(trace)[""].by_dtype["int4"].elements == 64 * 32


def test_the_dtype_of_products():
    arguments = ("input", "compute"), (torch.zeros(1), Symbol("dtype", "int8"))
    assert find_dtype("fvflops::packed_linear", arguments[0], (None, arguments[1][1]), ()) == "int8"
    assert read_scheme({"quant_method": "mxfp4"}) == Scheme("float4_e2m1fn", torch.uint8, (1, 32))
