"""Wrong input by hand: each is one line that repeats the input and says what to do."""

import json
import logging
import sys

import pytest

from fvflops.cli import main
from tests.support.models.diffusers_pipelines import write_pipeline
from tests.support.torchvision_schemas import define_torchvision_schemas

define_torchvision_schemas()

NETS = """
import torch
from torch import nn

def build(width, depth=2):
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)])

def image():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))

def text():
    return nn.Sequential(nn.Embedding(100, 8))

def weights():
    return open("no/weights.pt")

class Reader(nn.Module):
    def forward(self, x):
        return open("no/rows.txt")

class Ids(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 8)

    def forward(self, x, ids, style=None):
        return x + self.embedding(ids) + self.embedding(ids if style is None else style)

class Rows(nn.Module):
    def forward(self, x, rows):
        return x[rows]

def huge():
    return nn.Linear(10**7, 10**7)

number = 3
"""

# Command line → what it repeats of the input, and the remedy. {tmp} is a folder with nets.py, a pipeline and others.
CASES = {
    # Names of models
    "resnet50": ("'resnet50'", "did you mean zoo:resnet50, timm:resnet50"),
    "ResNet50": ("'ResNet50'", "did you mean zoo:resnet50, timm:resnet50 or torchvision:resnet50?"),
    "llama3_8B": ("'llama3_8B'", "did you mean zoo:llama3_8b?"),
    "BertModel": ("'BertModel'", "did you mean transformers:BertModel?"),
    "meta-llama/Llama-3.1-8B": ("names no model", "did you mean hf:meta-llama/Llama-3.1-8B?"),
    "bert-base-uncased": ("names no model", "did you mean hf:bert-base-uncased?"),
    "timm/resnet50.a1_in1k": ("names no model", "did you mean timm:resnet50.a1_in1k or timm:resnet50?"),
    "torchvision/resnet50": ("names no model", "did you mean torchvision:resnet50?"),
    "xyz": ("'xyz' names no model", "write zoo:resnet50, timm:NAME"),
    "zoo:resnet18": ("no model 'resnet18' in the zoo", "use one of lenet5, resnet50,"),
    "zoo:resnet5": ("'resnet5'", "did you mean 'resnet50'?"),
    "zoo:": ("zoo:", "write zoo:NAME with one of lenet5"),
    "hf:": ("'hf:'", "write hf:FOLDER or hf:ORG/NAME; 'fvflops list hf' lists the names"),
    "timm:": ("'timm:'", "'fvflops list timm' lists the names"),
    "timm:resnet5o": ("'resnet5o'", "the nearest are 'resnet50'"),
    "torchvision:resnet51": ("'resnet51'", "the nearest are 'resnet5"),
    "transformers:BertModle": ("'BertModle'", "the nearest are 'BertModel'"),
    "open_clip:ViT-B-33": ("'ViT-B-33'", "the nearest are 'ViT-B-32'"),
    "diffusers:UNet2DModle": ("'UNet2DModle'", "the nearest are 'UNet2DModel'"),
    "diffusers:{tmp}/no": ("{tmp}/no", "name the one that contains model_index.json, or a class"),
    "diffusers:{tmp}": ("{tmp}", "this folder has no model_index.json"),
    "diffusers:{tmp}/broken": ("StableDifusionPipeline", "the nearest are 'StableDiffusionPipeline'"),
    "torchhub:{tmp}/no:net": ("{tmp}/no/hubconf.py", "only local folders are loaded"),
    "torchhub:{tmp}:nett": ("'nett'", "the nearest is 'net'"),
    # Modules, files and factories
    "{tmp}/nets.py": ("{tmp}/nets.py", "nets.py:FACTORY"),
    "sub.net --path {tmp}": ("'sub.net'", "did you mean sub.net:CLASS?"),
    "sub.net.Net --path {tmp}": ("'sub.net.Net'", "did you mean sub.net:Net?"),
    "torch.nn": ("'torch.nn'", "did you mean torch.nn:CLASS?"),
    "timmm:resnet50": ("'timmm'", "did you mean 'timm:'?"),
    "TorchVision:resnet50": ("'TorchVision'", "did you mean 'torchvision:'?"),
    "torchvision:vit_b_16 --image-size 100": ("--image-size 100", "indivisible by patch size"),
    "torchvision:maxvit_t --image-size 100x90": ("--image-size 100x90", "is not divisible by partition size 7"),
    "torchvision:vit_b_16 --image-size 64 --arg image_size=32": ("--arg image_size", "omit one"),
    "fvflops.zooo:build": ("'zooo'", "the nearest is 'zoo'"),
    "no.such.package:model": ("'no'", "install it, check the name, or add its parent folder by --path"),
    "{tmp}/nest.py:build": ("{tmp}/nest.py", "there is no file"),
    "{tmp}/nets.py:biuld": ("'biuld'", "the nearest is 'build'"),
    "{tmp}/nets.py:weights": (
        "nets.py:weights",
        "cannot open 'no/weights.pt': No such file or directory",
    ),
    "{tmp}/nets.py:Reader --input 1,3": ("'no/rows.txt'", "--debug shows the traceback)"),
    "{tmp}/nets.py:number": ("number is int", "name a function that returns a torch.nn.Module, or a class"),
    "{tmp}/nets.py:build": ("nets.py:build(width, depth=2)", "pass --arg width=VALUE"),
    "{tmp}/nets.py:build --arg widht=8": ("--arg widht", "did you mean 'width'?"),
    "{tmp}/nets.py:build --arg 8": ("--arg 8", "write NAME=VALUE, such as width=64"),
    "{tmp}/nets.py:build --arg width=8": ("nets.py:build", "pass --input SHAPE, such as --input 1,3,224,224"),
    "nets:build --path {tmp}/no": ("--path {tmp}/no", "there is no such folder"),
    "zoo:lenet5 --arg width=8": ("zoo:lenet5(*, classes=10)", "--arg width"),
    "zoo:llama_tiny --arg layer=8": ("--arg layer", "did you mean 'layers'?"),
    "zoo:llama_tiny --arg heads=3": ("--arg heads=3", "must be an even multiple of heads"),
    "transformers:BertModel --arg num_hiden_layers=2": ("'num_hiden_layers'", "the nearest are 'num_hidden_layers'"),
    'transformers:BertModel --config {"num_hiden_layers":2}': ("'num_hiden_layers'", "nearest are 'num_hidden_layers'"),
    "hf:{tmp}/bert --arg num_hiden_layers=2": ("'num_hiden_layers'", "the nearest are 'num_hidden_layers'"),
    "hf:{tmp}/bert --guidance": ("hf:{tmp}/bert", "omit --guidance"),
    "hf:{tmp}/bert --task foo": ("--task foo", "use one of any-to-any, audio-classification"),
    "hf:{tmp}/bert --task text-clasification": ("text-clasification", "the nearest are 'text-classification'"),
    "hf:{tmp}/broken --task fill-mask": ("hf:{tmp}/broken", "omit --task"),
    "hf:{tmp}/broken --config {}": ("{tmp}/broken", "omit it"),
    "timm:resnet18 --arg pretrained=True": ("--arg pretrained", "omit it"),
    # Configurations
    "transformers:BertModel --config {": ("--config {", ":"),
    "transformers:BertModel --config []": ("--config []", "a configuration is a JSON object"),
    "transformers:AutoModel": ("transformers:AutoModel", "add --config FOLDER"),
    "zoo:lenet5 --config {}": ("'zoo:lenet5'", "omit --config"),
    "transformers:BertModel --config {tmp}/no.json": ("{tmp}/no.json", "No such file"),
    "diffusers:UNet2DModel --config {tmp}/list.json": ("{tmp}/list.json", "a configuration is a JSON object, such as"),
    "diffusers:UNet2DModel --denoising-steps 2": ("diffusers:UNet2DModel", "omit --denoising-steps"),
    "zoo:lenet5 --denoising-steps 0": ("'0'", "must be an integer of at least 1"),
    # Inputs
    "zoo:lenet5 --input 1,a": ("--input 1,a", "write it like 1,3,224,224"),
    "zoo:lenet5 --input 0y=1": ("'0y'", "is not an argument name"),
    "zoo:vit_b_16 --image-size 100 --device meta": ("default inputs", "float32[1, 3, 100, 100]; pass"),
    "zoo:lenet5 --input 1,1:floot": ("'floot'", "such as float32, bfloat16, int64 or bool"),
    "zoo:lenet5 --input 1,3,28,28": ("float32[1, 3, 28, 28]", "pass --input 1,1,28,28"),
    "zoo:gpt2 --device meta --input 1,8": ("float32[1, 8]", "pass --input 1,8:int64"),
    "zoo:lenet5 --input y=1,1,28,28": ("'y'", "LeNet5.forward(x) has no input 'y'"),
    "{tmp}/nets.py:image --input 1,3,2,2": ("float32[1, 3, 2, 2]", "pass --input 1,3,3,3"),
    "{tmp}/nets.py:Ids --input 2,8 --input 2": (
        "float32[2]",
        "got float32[2]; pass --input 2:int64 for ids",
    ),
    "{tmp}/nets.py:Ids --input 8 --input 8": ("float32[8]", "pass --input 8:int64 for ids"),
    "{tmp}/nets.py:Ids --input 8 --input ids=8:int64 --input style=1": ("float32[1]", "pass --input 1:int64 for style"),
    "{tmp}/nets.py:Rows --input 4,8 --input 2": ("float32[2]", "IndexError: tensors used as indices must be long, int"),
    "{tmp}/nets.py:text --input 1,8": ("float32[1, 8]", "pass --input 1,8:int64"),
    "{tmp}/nets.py:build --arg width=8 --input 2,9": ("float32[2, 9]", "pass --input 2,8"),
    # Devices and memory
    "zoo:lenet5 --build-on H100": ("'H100'", "is not a device of torch: pass cpu, cuda or meta"),
    "zoo:lenet5 --build-on xla": ("'xla'", "pass cpu, cuda or meta"),
    "zoo:lenet5 --device cdua": ("'cdua'", "pass cpu, cuda or an accelerator"),
    "zoo:lenet5 --device GPU": ("'GPU'", "write cuda, or its name, such as H100"),
    "zoo:lenet5 --device 80": ("'80'", "did you mean 'H100 80GB'?"),
    "zoo:lenet5 --device M1": ("kernels of M1", "omit it, or pass cuda"),
    "zoo:lenet5 --device H100 --execution real": ("--device H100 is simulated", "omit it, or --execution real"),
    "zoo:lenet5 --convention torsh": ("'torsh'", "did you mean 'torch'?"),
    "zoo:lenet5 --convention own.yaml": ("'own.yaml'", "a file is for --table own.yaml"),
    "zoo:lenet5 --convention torch --table t.yaml": ("--table", "not allowed with argument --convention"),
    "{tmp}/nets.py:huge --input 1,1": ("400000000000000 bytes", "on the meta device: --build-on meta"),
    # Reports
    "zoo:lenet5 --table defualt": ("'defualt'", "did you mean 'default'?"),
    "zoo:lenet5 --format txet": ("'txet'", "did you mean 'text'?"),
    "zoo:lenet5 --format xml": ("'xml'", "(fvflops count --help"),
    "zoo:lenet5 --top x": ("'x'", "must be an integer of at least 1"),
    "zoo:lenet5 --lora 8": ("--lora 8", "did you mean '--adapter'?"),
    "zoo:lenet5 --seqlen 8": ("--seqlen 8", "did you mean '--seq'?"),
    "zoo:lenet5 --sort flosp": ("'flosp'", "did you mean 'flops'?"),
    "zoo:lenet5 --output {tmp}/no/a.txt": ("{tmp}/no/a.txt", "create it, or choose another path"),
    "zoo:lenet5 --output /dev/null/a.txt": ("/dev/null/a.txt", "choose another path"),
    "zoo:lenet5 --trace -": ("--trace -", "choose a path"),
    "zoo:lenet5 --format png": ("--format png", "add --output model.png"),
}
# The same of the commands that open a model too, and of `list`.
COMMANDS = {
    "diff zoo:lenet5 zoo:lenet6": ("'lenet6'", "did you mean 'lenet5'?"),
    "diff zoo:lenet5 {tmp}/nets.py:build": ("nets.py:build(width, depth=2)", "pass --arg width=VALUE"),
    "diff diffusers:UNet2DModle zoo:lenet5": ("'UNet2DModle'", "the nearest are 'UNet2DModel'"),
    "check timm:resnet5o --budget {tmp}/budget.yaml": ("'resnet5o'", "the nearest are 'resnet50'"),
    "check zoo:lenet5 --budget {tmp}/no.yaml": ("{tmp}/no.yaml", "--update creates it"),
    "compare zoo:lenet5 zoo:resnet50": ("zoo:resnet50", "'fvflops diff A B' compares two models"),
    "compare open_clip:ViT-B-33": ("'ViT-B-33'", "the nearest are 'ViT-B-32'"),
    "plan zoo:lenet6 --mesh dp=2": ("'lenet6'", "did you mean 'lenet5'?"),
    "memory zoo:lenet5 --device gpu": ("'gpu'", "write cuda, or its name, such as H100"),
    "memory zoo:lenet5 --device 80": ("--device 80", "write 80GB for the memory of a GPU, or its name, such as H100"),
    "plan zoo:lenet5 --mesh dp=2 --device 80": ("'80'", "did you mean 'H100 80GB'?"),
    "peak --device gpu": ("'gpu'", "did you mean 'cuda'?"),
    "memory torchhub:{tmp}:nett": ("'nett'", "the nearest is 'net'"),
    "scale {tmp}/nets.py:build --vary depth=1..3": ("nets.py:build(width, depth=2)", "pass --arg width=VALUE"),
    "list zooo": ("'zooo'", "the nearest is 'zoo'"),
    "list zoo resnet5": ("'resnet5'", "the nearest are 'resnet50'"),
    "list devices xyz": ("'xyz'", "'fvflops list devices' lists all"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wrong")
    (folder / "nets.py").write_text(NETS)
    (folder / "hubconf.py").write_text("from nets import build\n\ndef net():\n    return build(4)\n")
    (folder / "sub").mkdir()
    (folder / "sub" / "net.py").write_text(NETS)
    (folder / "list.json").write_text("[]")
    (folder / "budget.yaml").write_text("models:\n  timm:resnet5o: {flops: 1}\n")
    (folder / "bert").mkdir()
    (folder / "bert" / "config.json").write_text('{"model_type": "bert", "num_hidden_layers": 1}')
    broken = write_pipeline(folder / "broken", "StableDiffusionPipeline") / "model_index.json"
    index = json.loads(broken.read_text())
    broken.write_text(json.dumps({**index, "_class_name": "StableDifusionPipeline"}))
    return folder


@pytest.fixture
def libraries_are_quiet():
    """Libraries log, at their import or later, what they miss beside them: that is not what a wrong input says."""
    for name in ("diffusers", "open_clip"):
        pytest.importorskip(name, reason=f"{name} is not installed")
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("libraries_are_quiet")
@pytest.mark.parametrize("line", [*(f"count {line}" for line in CASES), *COMMANDS])
def test_a_wrong_input_is_one_line_that_says_what_to_do(line, folder, capsys, monkeypatch):
    monkeypatch.setattr("sys.path", list(sys.path))
    repeated, remedy = {**{f"count {key}": value for key, value in CASES.items()}, **COMMANDS}[line]
    capsys.readouterr()
    arguments = [part.replace("{tmp}", str(folder)) for part in line.split()]
    try:
        code = main(arguments)
    except SystemExit as exit:  # of the parser
        code = exit.code
    output = capsys.readouterr()
    assert (code, output.out) == (2, "")
    assert output.err.startswith("fvflops: error: ") and output.err.count("\n") == 1, output.err
    assert repeated.replace("{tmp}", str(folder)) in output.err
    assert remedy in output.err


@pytest.mark.parametrize("library", ["timm", "torchvision", "transformers", "diffusers", "open_clip"])
def test_a_missing_library_names_its_extra(library, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    assert main(["count", f"{library}:name"]) == 2
    assert capsys.readouterr().err == f"fvflops: error: {library} is not installed: pip install 'fvflops[{library}]'\n"
