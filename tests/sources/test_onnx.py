"""ONNX files: converted to torch by onnx2torch, with the names of the modules that PyTorch's exporters wrote."""

import builtins
import warnings

import pytest
import torch
from torch import nn

from fvflops import FlopCountAnalysis
from fvflops.analysis.files.archive_checks import recognise
from fvflops.cli import main
from fvflops.sources import SourceOptions, load_model
from tests.support.models.parts import Parts
from tests.support.schemas.torchvision_schemas import define_torchvision_schemas

define_torchvision_schemas()
onnx = pytest.importorskip("onnx")
pytest.importorskip("onnx2torch")


class Block(Parts):
    def forward(self, x):
        return self.act(self.fc(x)) + x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.blocks = nn.Sequential(Block(fc=nn.Linear(8, 8), act=nn.GELU()), Block(fc=nn.Linear(8, 8), act=nn.GELU()))
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(self.blocks(self.pool(self.stem(x)).flatten(1)))


X = torch.randn(1, 3, 16, 16)
# stem: 16 * 16 positions, 8 * 3 * 9 multiply-adds each; a block: 8 * 8.
MACS = {"": 16 * 16 * 8 * 27 + 2 * 64, "stem": 16 * 16 * 8 * 27, "blocks": 2 * 64, "blocks.1.fc": 64}


def export(path, model, args, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model.eval(), args, str(path), **options)


def analyse(path, **options):
    subject = load_model(str(path), SourceOptions(**options))
    return FlopCountAnalysis(subject.model, subject.inputs, kwargs=subject.kwargs, warn=False)


@pytest.mark.parametrize("opset", [13, 17, 20])
def test_a_traced_export_has_the_names_of_the_modules(tmp_path, opset):
    model = Net() if opset > 16 else nn.Sequential(Net().stem, nn.ReLU())
    path = tmp_path / "model.onnx"
    export(path, model, (X,), dynamo=False, opset_version=opset)
    analysis = analyse(path)
    if opset > 16:
        assert {name: analysis.macs(name) for name in MACS} == MACS
    else:
        assert analysis.macs("0") == MACS["stem"]
    # GELU is an op of its own from opset 20 on.
    expected = FlopCountAnalysis(model, X, warn=False).by_operator()
    expected.pop("adaptive_avg_pool2d", None)  # to one position: ONNX has a mean instead
    assert analysis.by_operator() == expected
    assert ("aten::gelu" in analysis.unsupported_ops()) == (opset == 20)


def test_an_export_by_dynamo_has_the_names_and_the_classes_of_the_modules(tmp_path):
    pytest.importorskip("onnxscript")
    path = tmp_path / "model.onnx"
    export(path, Net(), (X,), dynamo=True, verbose=False)
    analysis = analyse(path)
    assert {name: analysis.macs(name) for name in MACS} == MACS
    tree = analysis.module_tree().by_name
    assert tree["blocks.1.fc"].class_name == "Linear" and tree["blocks.0"].class_name == "Block"


def product(*shape, name="", op="MatMul"):
    """Return a model of one product, x @ weight, of a weight of 4 rows and 3 columns."""
    weight = onnx.helper.make_tensor("weight", onnx.TensorProto.FLOAT, [4, 3], [0.0] * 12)
    tensors = [
        onnx.helper.make_tensor_value_info(label, onnx.TensorProto.FLOAT, item)
        for label, item in (("x", shape), ("y", [*shape[:-1], 3]))
    ]
    node = onnx.helper.make_node(op, ["x", "weight"], ["y"], name=name)
    graph = onnx.helper.make_graph([node], "product", tensors[:1], tensors[1:], [weight])
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 13)], ir_version=8)


def test_an_op_without_names_is_a_module_of_the_root(tmp_path):
    path = tmp_path / "model.bin"  # recognised by its content
    onnx.save(product(5, 4), path)
    assert recognise(str(path)) == "onnx"
    analysis = analyse(path)
    assert +analysis.by_module() == {"": 60, "MatMul": 60}
    onnx.save(product(5, 4, name="/a/b.c/MatMul"), path)
    assert +analyse(path).by_module() == {"": 60, "a": 60, "a.b": 60, "a.b.c": 60, "a.b.c.MatMul": 60}


def test_a_dynamic_batch_is_1_and_other_dynamic_sizes_must_be_given(tmp_path, capsys):
    path = tmp_path / "model.onnx"
    model = product(5, 4)
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "batch"
    onnx.save(model, path)
    assert analyse(path).trace().info.inputs == "float32[1, 4]"
    assert main(["count", str(path), "--input", "x=7,4"]) == 0
    assert "float32[7, 4]" in capsys.readouterr().out
    assert analyse(path, inputs=("x=7,4",)).macs() == 7 * 12
    model = product(2, 5, 4)
    for dimension in model.graph.input[0].type.tensor_type.shape.dim[:2]:
        dimension.dim_param = "length"
    onnx.save(model, path)
    assert main(["count", str(path)]) == 2
    assert "has no default input shapes: pass --input" in capsys.readouterr().err


def test_mistakes_are_reported_in_one_line(tmp_path, capsys, monkeypatch):
    unknown, damaged, good = (tmp_path / f"{name}.onnx" for name in ("unknown", "damaged", "good"))
    onnx.save(product(5, 4, op="Mystery"), unknown)
    damaged.write_bytes(b"no protobuf")
    onnx.save(product(5, 4), good)
    for path, message in {
        unknown: "onnx2torch cannot convert it: Converter is not implemented",
        damaged: "is not an ONNX model: DecodeError",
    }.items():
        assert main(["count", str(path)]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, error
    find = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.partition(".")[0] == "onnx2torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return find(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    assert main(["count", str(good)]) == 2
    assert 'needs onnx2torch: install it with pip install "fvflops[onnx]"' in capsys.readouterr().err
