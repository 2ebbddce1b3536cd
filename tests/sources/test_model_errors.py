"""Errors raised in a model's forward: the command line names the module, its inputs and the remedy."""

import pytest
import torch
from torch import nn

import fvflops
from fvflops.cli import format_error, main

MODELS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.ReLU())
        self.pairs = nn.Bilinear(2, 2, 2)

    def forward(self, x, scale=1):
        x = self.body(x).flatten()
        if x.numel() == 12:
            raise LookupError("no such scale")
        return self.pairs(x, x)

def build():
    return Net()
"""


@pytest.mark.parametrize("execution", ["shapes", "real"])
@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (
            "zoo:resnet50",
            ["--input", "1,1,64,64"],
            "Conv2d 'conv1' expects 3 input channels, got float32[1, 1, 64, 64]; pass --input 1,3,64,64",
        ),
        (
            "zoo:lenet5",
            ["--input", "3,28,28"],
            "Conv2d 'features.0' expects 1 input channel, got float32[3, 28, 28]; pass --input 1,28,28",
        ),
        (
            "zoo:gpt2",
            ["--input", "1,16"],
            "Embedding 'wte' expects integer indices, got float32[1, 16]; pass --input 1,16:int64",
        ),
        # The input of an inner module is not that of the model: no remedy.
        (
            "zoo:lenet5",
            ["--input", "1,1,40,40"],
            "Linear 'classifier.0' expects 400 input features, got float32[1, 1024]",
        ),
        ("{net}", ["--input", "1,4"], "Bilinear 'pairs' on float32[6], float32[6]: RuntimeError: "),
        # As forward was called, not as it rebound its argument.
        ("{net}", ["--input", "2,4"], "Net on float32[2, 4]: LookupError: no such scale (net.py:14;"),
    ],
    ids=["channels", "without a batch", "indices", "inner", "any", "own code"],
)
def test_the_module_and_its_inputs_are_named(tmp_path, capsys, model, options, message, execution):
    path = tmp_path / "net.py"
    path.write_text(MODELS)
    assert main(["count", model.replace("{net}", f"{path}:build"), *options, "--execution", execution]) == 2
    output = capsys.readouterr().err
    assert output.startswith(f"fvflops: error: {message}") and output.count("\n") == 1
    if "expects" in message:
        assert output == f"fvflops: error: {message}\n"


def test_in_python_the_models_exception_is_unchanged():
    class Net(nn.Module):
        def forward(self, x):
            raise error

    error = LookupError("mine", 2)
    with pytest.raises(LookupError) as caught:
        fvflops.FlopCountAnalysis(Net(), torch.ones(2)).total()
    assert caught.value is error and error.args == ("mine", 2)
    assert format_error(error).startswith("Net on float32[2]: LookupError: ")


def test_cuda_without_cuda_is_one_line_with_the_remedy(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert main(["count", "zoo:lenet5", "--device", "cuda"]) == 2
    has_none = f"device 'cuda': this torch ({torch.__version__}) has no CUDA: omit the device, or pass cpu or meta"
    assert capsys.readouterr().err == f"fvflops: error: {has_none}\n"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert main(["roofline", "zoo:lenet5", "--device", "H100", "--build", "cuda:0"]) == 2
    assert "device 'cuda:0': this torch" in (output := capsys.readouterr().err) and "finds no CUDA device" in output


def test_a_saved_trace_is_one_side_of_a_diff(tmp_path, capsys):
    path = tmp_path / "lenet5.json"
    assert main(["count", "zoo:lenet5", "--format", "trace", "--output", str(path)]) == 0
    assert fvflops.Trace.from_json(path.read_text()).modules.by_name
    assert main(["diff", str(path), "zoo:lenet5"]) == 0
    assert "No difference in 14 modules and 4 operators." in capsys.readouterr().out
    assert main(["count", "zoo:lenet5", "--format", "trace", "--by", "operator"]) == 2
    assert "--format trace supports --by module; got operator" in capsys.readouterr().err
