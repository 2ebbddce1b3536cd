"""Programs of torch.export: their modules cost as much as the exported models' modules."""

import warnings

import pytest
import torch
from torch import nn

from fvflops import FlopCountAnalysis
from fvflops.cli import main
from fvflops.sources import SourceOptions, load_model
from fvflops.sweep.count_model import CountSettings, count_model
from fvflops.zoo import build
from tests.support.schemas.torchvision_schemas import define_torchvision_schemas

define_torchvision_schemas()

TRUSTED = SourceOptions(trust=True)
IDS = torch.ones(1, 8, dtype=torch.int64)
IMAGE = torch.randn(1, 3, 64, 64)
TEXT = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 50}


class Reuse(nn.Module):
    """One block called three times, also under another name."""

    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.again = self.block
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        for _ in range(3):
            x = self.norm(self.block(x))
        return x


def transformer():
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)


def of_transformers(name, config, **sizes):
    transformers = pytest.importorskip("transformers")
    return getattr(transformers, name)(getattr(transformers, config)(**sizes))


def of_timm(name, **options):
    return pytest.importorskip("timm").create_model(name, **options)


def t5():
    sizes = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 2, "num_heads": 4, "vocab_size": 50}
    return of_transformers("T5ForConditionalGeneration", "T5Config", **sizes, use_cache=False)


def bart():
    sides = {
        f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in (("layers", 2), ("ffn_dim", 64))
    }
    sides |= {f"{side}_attention_heads": 4 for side in ("encoder", "decoder")}
    return of_transformers("BartModel", "BartConfig", d_model=32, vocab_size=50, use_cache=False, **sides)


def llama():
    return of_transformers("LlamaForCausalLM", "LlamaConfig", num_key_value_heads=2, use_cache=False, **TEXT)


# Some releases of transformers drop a mask that masks nothing, and not while exporting: this one masks a token.
BOTH_IDS = {"input_ids": IDS, "attention_mask": (torch.arange(8) < 7)[None], "decoder_input_ids": IDS[:, :4]}
MODELS = {
    "a block that is called again": (Reuse, (torch.randn(2, 8),), {}),
    "an encoder layer, in eval mode one op": (transformer, (torch.randn(2, 5, 16),), {}),
    "a recurrent network": (lambda: nn.Sequential(nn.LSTM(4, 8)), (torch.randn(5, 1, 4),), {}),
    "transformers' T5, an encoder and a decoder": (t5, (), BOTH_IDS),
}
LONG_MODELS = {
    "the zoo's ResNet-50": (lambda: build("resnet50"), (IMAGE,), {}),
    "the zoo's ViT-B/16": (lambda: build("vit_b_16"), (torch.randn(1, 3, 224, 224),), {}),
    "the zoo's GPT-2": (lambda: build("gpt2"), (IDS,), {}),
    "timm's MobileNetV3": (lambda: of_timm("mobilenetv3_small_050"), (IMAGE,), {}),
    "timm's ResNet-18": (lambda: of_timm("resnet18"), (IMAGE,), {}),
    "timm's ViT": (lambda: of_timm("vit_tiny_patch16_224", img_size=64, depth=2), (IMAGE,), {}),
    "transformers' Llama": (llama, (), {"input_ids": IDS}),
    "transformers' BERT": (lambda: of_transformers("BertModel", "BertConfig", **TEXT), (), {"input_ids": IDS}),
    "transformers' BART": (bart, (), BOTH_IDS),
}


def export(path, model, args, kwargs, **options):
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        program = torch.export.export(model, args, kwargs, **options)
        torch.export.save(program, path)


def check(path, name, *, strict):
    make, args, kwargs = {**MODELS, **LONG_MODELS}[name]
    model = make().eval()
    export(path, model, args, kwargs, strict=strict)
    subject = load_model(str(path), TRUSTED)
    program = FlopCountAnalysis(subject.model, subject.inputs, kwargs=subject.kwargs, table="exact", warn=False)
    expected = FlopCountAnalysis(model, args, kwargs=kwargs, table="exact", warn=False)
    assert program.total() == expected.total() > 0
    assert +program.by_module() == +expected.by_module()
    assert len(+expected.by_module()) > 1
    classes = {name: info.class_name for name, info in expected.module_tree().by_name.items()}
    # A ModuleList has no call, and is left as a container of parameters.
    called = {name for name in +expected.by_module() if classes[name] not in ("ModuleList", "ModuleDict")}
    assert {name: program.module_tree().by_name[name].class_name for name in called} == {
        name: classes[name] for name in called
    }


@pytest.mark.parametrize("name", MODELS)
def test_a_program_has_the_costs_of_the_models_modules(tmp_path, name):
    check(tmp_path / "model.pt2", name, strict=False)


@pytest.mark.long
@pytest.mark.parametrize("name", LONG_MODELS)
def test_a_program_of_a_large_model_has_the_costs_of_its_modules(tmp_path, name):
    check(tmp_path / "model.pt2", name, strict=False)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in (*MODELS, *LONG_MODELS) if "one op" not in name])
def test_a_program_that_dynamo_exported_has_the_costs_of_the_models_modules(tmp_path, name):
    check(tmp_path / "model.pt2", name, strict=True)


def test_dynamo_exports_a_fused_layer_as_one_op(tmp_path):
    model, x = transformer().eval(), torch.randn(2, 5, 16)
    export(tmp_path / "model.pt2", model, (x,), {}, strict=True)
    subject = load_model(str(tmp_path / "model.pt2"), TRUSTED)
    program = FlopCountAnalysis(subject.model, subject.inputs, table="exact", warn=False)
    expected = FlopCountAnalysis(model, x, table="exact", warn=False)
    # The names of the submodules are lost; the layers' are not.
    for name in ("", "layers.0", "layers.1"):
        assert program.total(name) == expected.total(name) > 0


@pytest.fixture
def program(tmp_path):
    """Return the path of a program for batches of 2 to 16, recognised by its content, whatever its name."""
    path = tmp_path / "model.bin"
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU()).eval()
    shapes = ({0: torch.export.Dim("batch", min=2, max=16)},)
    export(tmp_path / "model.pt2", model, (torch.randn(5, 4),), {}, dynamic_shapes=shapes)
    (tmp_path / "model.pt2").rename(path)
    return str(path)


def test_commands_take_programs(program, capsys):
    for command, shown in {
        ("count", program, "--by", "operator"): "linear",
        ("count", program, "--device", "meta"): "float32[5, 4]",
        ("count", program, "--input", "16,4"): "float32[16, 4]",
        ("compare", program, "--tables", "torch"): "default",
        ("roofline", program, "--device", "H100"): "Least time",
        ("profile", program, "--repeat", "1"): "Sequential on float32[5, 4]",
        ("memory", program, "--inference"): "peak memory",
        ("memory", program): "parameter",
        ("plan", program, "--mesh", "dp=2"): "all_reduce",
        ("scale", program, "--input", "batch,4", "--vary", "batch=2..16"): "12·B",
        ("diff", program, program): "FLOPs unchanged",
    }.items():
        assert main([*command, "--trust-file"]) == 0, command
        assert shown in " ".join(capsys.readouterr().out.split()), command


def test_many_models_are_counted_with_programs_among_them(program):
    row = count_model(program, TRUSTED)
    assert (row.error, row.parameters, row.flops) == ("", 15, 5 * 4 * 3)
    assert (
        "keeps the mode in which it was exported"
        in count_model(program, TRUSTED, settings=CountSettings(train=True)).error
    )


def test_mistakes_with_programs_are_reported(program, tmp_path, capsys):
    broken = tmp_path / "broken.pt2"
    broken.write_bytes(b"PK\x05\x06 no archive")
    for command, message in {
        ("count", program, "--input", "17,4"): "(the program accepts input: float32[2..16, 4])",
        ("count", program, "--input", "5,3"): "input.size()[1] == 4",
        ("count", program, "--train"): "an exported program keeps the mode in which it was exported: omit --train",
        ("count", program, "--config", "{}"): "omit --config",
        ("count", str(broken)): "not a program of torch.export: it is not a complete zip archive",
        ("count", str(tmp_path / "none.pt2")): "there is no such file",
    }.items():
        assert main([*command, "--trust-file"]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, error


def test_a_program_moves_to_meta(program):
    subject = load_model(program, SourceOptions(device="meta", trust=True))
    assert {parameter.device.type for parameter in subject.model.parameters()} == {"meta"}
