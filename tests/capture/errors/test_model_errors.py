"""Errors raised in a model's forward: the command line names the module, its inputs and the remedy."""

from functools import partial

import pytest
import torch
from torch import nn

import fvflops
from fvflops.capture.errors.expected_inputs import find_mismatch
from fvflops.capture.errors.model_errors import describe_error
from fvflops.cli import format_error, main
from fvflops.sources import SourceOptions
from fvflops.sources.load import load_from_factory

MODELS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.ReLU())
        self.split = nn.Unflatten(0, (4, 2))

    def forward(self, x, scale=1):
        x = self.body(x).flatten()
        if x.numel() == 12:
            raise LookupError("no such scale")
        return self.split(x)

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
            ["--input", "1,16", "--arg", "layers=1"],
            "Embedding 'wte' expects integer indices, got float32[1, 16]; pass --input 1,16:int64",
        ),
        # The input of an inner module is not the model's: no shape to pass.
        (
            "zoo:lenet5",
            ["--input", "1,1,40,40"],
            "Linear 'classifier.0' expects 400 input features, got float32[1, 1024]; the model's inputs are "
            "float32[1, 1, 40, 40]: try others by --input",
        ),
        ("{net}", ["--input", "1,4"], "Unflatten 'split' on float32[6]: RuntimeError: "),
        # The inputs of the call, not the tensor that forward assigns to the same name.
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
    assert main(["count", "zoo:lenet5", "--build-on", "cuda"]) == 2
    has_none = f"device 'cuda': this torch ({torch.__version__}) has no CUDA: omit the device, or pass cpu or meta"
    assert capsys.readouterr().err == f"fvflops: error: argument --build-on: {has_none}\n"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert main(["roofline", "zoo:lenet5", "--device", "H100", "--build", "cuda:0"]) == 2
    assert "device 'cuda:0': this torch" in (output := capsys.readouterr().err) and "finds no CUDA device" in output


def test_a_saved_trace_is_compared_with_a_model(tmp_path, capsys):
    path = tmp_path / "lenet5.json"
    assert main(["count", "zoo:lenet5", "--format", "trace", "--output", str(path)]) == 0
    assert fvflops.Trace.from_json(path.read_text()).modules.by_name
    assert main(["diff", str(path), "zoo:lenet5"]) == 0
    assert "No difference in 14 modules and 4 operators." in capsys.readouterr().out
    assert main(["count", "zoo:lenet5", "--format", "trace", "--by", "operator"]) == 2
    assert "--format trace supports --by module; got operator" in capsys.readouterr().err


LAYERS = """
import torch
from torch import nn

def layer(name, *sizes, **options):
    return nn.Sequential(getattr(nn, name)(*sizes, **options))

def conv(): return layer("Conv2d", 3, 4, 5)
def pool(): return layer("MaxPool2d", 7)
def linear(): return layer("Linear", 4, 2)
def flat(): return nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
def embedding(): return layer("Embedding", 4, 2)
def bag(): return layer("EmbeddingBag", 4, 2)
def batch_norm(): return layer("BatchNorm2d", 3)
def instance_norm(): return layer("InstanceNorm2d", 3, affine=True)
def group_norm(): return layer("GroupNorm", 2, 4)
def layer_norm(): return layer("LayerNorm", (4, 8))
def rms_norm(): return layer("RMSNorm", 8)
def lstm(): return layer("LSTM", 4, 5, batch_first=True)
def gru_cell(): return layer("GRUCell", 4, 5)
def encoder(): return nn.TransformerEncoderLayer(8, 2, batch_first=True)
def out_of_range(): return embedding(), torch.tensor([[1, 9]])
def huge(): return nn.Linear(10**7, 10**7)

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, query, key):
        return self.attend(query, key, key)

class Product(nn.Module):
    def forward(self, left, right):
        return left @ right
"""


@pytest.mark.parametrize("execution", ["shapes", "real"])
@pytest.mark.parametrize(
    ("name", "inputs", "message"),
    [
        ("conv", "1,1,8,8", "Conv2d '0' expects 3 input channels, got float32[1, 1, 8, 8]; pass --input 1,3,8,8"),
        ("conv", "1,3,2,9", "height and width of at least 5 x 5, got float32[1, 3, 2, 9]; pass --input 1,3,5,9"),
        ("conv", "3,3", "expects a tensor of 3 or 4 dimensions (batch, channels, height, width) with 3 input channels"),
        ("conv", "1,3,8,8:int64", "expects float32, as its weights are, got int64[1, 3, 8, 8]; pass --input 1,3,8,8"),
        ("pool", "1,3,5,9", "MaxPool2d '0' expects height and width of at least 7 x 7"),
        ("linear", "2,5", "Linear '0' expects 4 input features, got float32[2, 5]; pass --input 2,4"),
        ("flat", "2,5,5", "Linear '1' expects 4 input features, got float32[2, 25]; the model's inputs are"),
        ("embedding", "2,5", "Embedding '0' expects integer indices, got float32[2, 5]; pass --input 2,5:int64"),
        ("bag", "2,5", "EmbeddingBag '0' expects integer indices, got float32[2, 5]; pass --input 2,5:int64"),
        ("batch_norm", "1,4,5,5", "BatchNorm2d '0' expects 3 channels, got float32[1, 4, 5, 5]; pass --input 1,3,5,5"),
        ("batch_norm", "3,5,5", "BatchNorm2d '0' expects a tensor of 4 dimensions (batch, channels, ...)"),
        ("group_norm", "3,5,5", "GroupNorm '0' expects 4 channels, got float32[3, 5, 5]; pass --input 3,4,5"),
        ("flat", "3,5,5", "try others by --input (a batch of one image: --input 1,3,5,5)"),
        (
            "instance_norm",
            "1,4,5,5",
            "InstanceNorm2d '0' expects 3 channels, got float32[1, 4, 5, 5]; pass --input 1,3,",
        ),
        ("group_norm", "1,3,5", "GroupNorm '0' expects 4 channels, got float32[1, 3, 5]; pass --input 1,4,5"),
        ("layer_norm", "1,3,5", "LayerNorm '0' expects last dimensions 4 x 8, got float32[1, 3, 5]; pass --input 1,4"),
        ("rms_norm", "1,3,5", "RMSNorm '0' expects a last dimension of 8, got float32[1, 3, 5]; pass --input 1,3,8"),
        ("lstm", "1,5,7", "LSTM '0' expects 4 input features, got float32[1, 5, 7]; pass --input 1,5,4"),
        ("lstm", "1,1,5,4", "LSTM '0' expects a tensor of 2 or 3 dimensions (batch, length, features) with 4 input"),
        ("gru_cell", "1,5", "GRUCell '0' expects 4 input features, got float32[1, 5]; pass --input 1,4"),
        ("encoder", "1,3,5", "MultiheadAttention 'self_attn' expects 8 query features, got float32[1, 3, 5]; pass"),
        ("Attention", "1,5,8 1,5,7", "MultiheadAttention 'attend' expects 8 key features, got float32[1, 5, 7]; the"),
        ("Product", "2,3 4,5", "the model's inputs are float32[2, 3], float32[4, 5]: try others by --input (lay"),
        ("Product", "2,3", "Product.forward(left, right) needs right: pass --input right=SHAPE"),
        ("Product", "left=2,3 rihgt=3,2", "Product.forward(left, right) has no input 'rihgt': the nearest is 'right'"),
        ("Product", "2,3 3,2 2,2", "Product.forward(left, right) takes 3 positional arguments but 4 were given: pass"),
        ("huge", "1,3", "not enough memory: tried to allocate 400000000000000 bytes; build the model without weights"),
    ],
)
def test_wrong_inputs_name_what_is_expected_and_the_remedy(tmp_path, capsys, name, inputs, message, execution):
    path = tmp_path / "layers.py"
    path.write_text(LAYERS)
    options = [part for text in inputs.split() for part in ("--input", text)]
    assert main(["count", f"{path}:{name}", *options, "--execution", execution]) == 2
    output = capsys.readouterr().err
    assert message in output and output.count("\n") == 1


def test_inputs_by_name_of_a_model_without_weights_are_named(tmp_path, capsys):
    path = tmp_path / "layers.py"
    path.write_text(LAYERS)
    inputs = ["--input", "query=1,5,8", "--input", "key=1,5,7"]
    assert main(["count", f"{path}:Attention", *inputs, "--build-on", "meta"]) == 2
    assert "inputs are query=float32[1, 5, 8], key=float32[1, 5, 7]: try others" in capsys.readouterr().err


def test_an_index_out_of_range_is_named_in_real_execution(tmp_path, capsys):
    path = tmp_path / "layers.py"
    path.write_text(LAYERS)
    assert main(["count", f"{path}:out_of_range", "--execution", "real"]) == 2
    assert "Embedding '0' expects indices from 0 to 3 (one is 9), got int64[1, 2]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "inputs"),
    [
        (nn.Conv1d(2, 3, 3, padding=1), [(1, 2, 1)]),
        (nn.Conv2d(2, 3, 3, padding="same"), [(2, 1, 1)]),
        (nn.ConvTranspose2d(2, 3, 3), [(1, 2, 1, 1)]),
        (nn.MaxPool1d(2), [(1, 3, 2)]),
        (nn.BatchNorm1d(3), [(5, 3)]),
        (nn.InstanceNorm1d(9), [(2, 3, 4)]),  # without parameters it accepts other sizes
        (nn.LayerNorm(4), [(4,)]),
        (nn.GRU(4, 5), [(3, 4)]),
        (nn.Bilinear(2, 3, 4), [(1, 2), (1, 3)]),
        (nn.MultiheadAttention(8, 2, kdim=4, vdim=6), [(3, 8), (5, 4), (5, 6)]),
    ],
)
def test_inputs_that_a_layer_accepts_are_no_mismatch(module, inputs):
    tensors = [torch.randn(shape) for shape in inputs]
    module(*tensors)
    assert find_mismatch(module, tensors) is None


def test_a_model_without_a_forward_names_its_parts():
    factory = partial(nn.ModuleList, [nn.Linear(2, 2), nn.Linear(2, 2), nn.ReLU()])
    with pytest.raises(ValueError, match=r"^ModuleList has no forward: count one of its parts \(Linear, ReLU\)$"):
        load_from_factory(factory, "nets:make", SourceOptions(inputs=("1,2",)))


def test_the_cause_of_an_import_error_is_named():
    """Transformers raises one that hides its cause, such as a torchvision built for another torch."""
    try:
        try:
            raise RuntimeError("operator torchvision::nms does not exist")
        except RuntimeError as error:
            raise ModuleNotFoundError("Could not import module 'Qwen3ForCausalLM'.") from error
    except ModuleNotFoundError as error:
        text = describe_error(error)
    assert "'Qwen3ForCausalLM': RuntimeError: operator torchvision::nms does not exist; torchvision was" in text
