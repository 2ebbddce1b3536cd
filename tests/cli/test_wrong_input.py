"""Wrong input by hand: each is one line that repeats the input and says what to do."""

import gzip
import json
import logging
import shlex
import sys

import pytest
import yaml

from fvflops.cli import main
from tests.support.checkout import ROOT
from tests.support.models.diffusers_pipelines import write_pipeline
from tests.support.reports.report_formats import run
from tests.support.schemas.torchvision_schemas import define_torchvision_schemas

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

class Routed(nn.Linear):
    def forward(self, x):
        return super().forward(x[x[:, 0] > 0])

class Raising(nn.Module):
    def forward(self, x):
        return {}["missing_key"]

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(x)

def blocks():
    return nn.Sequential(Block(), Block()), torch.ones(2, 8)

def frozen():
    return nn.Linear(8, 4).requires_grad_(False), torch.ones(2, 8)

def on_meta():
    return nn.Linear(8, 4, device="meta"), torch.ones(2, 8)

def huge():
    return nn.Linear(10**7, 10**7)

def routed():
    return Routed(4, 3), torch.ones(8, 4)

def raising():
    return Raising(), torch.ones(2)

def broken():
    raise ZeroDivisionError("in the factory\\nsecond line")

def exiting():
    raise SystemExit(0)

def returns_int():
    return number

def must_not_be_built():
    raise AssertionError("the model was built")

number = 3
"""

# Section → command line → parts of its error: what it repeats of the input, and the remedy.
MISTAKES = yaml.safe_load((ROOT / "tests" / "cli" / "mistakes.yaml").read_text(encoding="utf-8"))
LINES = {line: parts for section in MISTAKES.values() for line, parts in section.items()}


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
    (folder / "tight.yaml").write_text("models:\n  zoo:lenet5: {flops: 1}\n")
    (folder / "mine.yaml").write_text("ops: {}\n")
    (folder / "a.csv").write_text("model,top1,name\nlenet5,1,x\n")
    (folder / "other.json").write_text("{}")
    (folder / "chrome.json").write_bytes((ROOT / "tests" / "data" / "cuda_chrome_trace.json").read_bytes())
    (folder / "cut.json.gz").write_bytes(gzip.compress(b"{}")[:-4])
    assert main(["count", "zoo:lenet5", "--save-trace", str(folder / "trace.json")]) == 0
    return folder


@pytest.fixture
def libraries_are_quiet():
    """Libraries log, at their import or later, what they miss beside them: that is not what a wrong input says."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("libraries_are_quiet")
@pytest.mark.parametrize("line", LINES)
def test_a_wrong_input_is_one_line_that_says_what_to_do(line, folder, capsys, monkeypatch):
    if line in {**MISTAKES["Names of models"], **MISTAKES["Other commands"]}:  # whose hints are of all libraries
        for name in ("diffusers", "open_clip"):
            pytest.importorskip(name, reason=f"{name} is not installed")
    monkeypatch.setattr("sys.path", list(sys.path))
    monkeypatch.chdir(folder)
    before = sorted(folder.glob("[!_]*"))  # not __pycache__
    capsys.readouterr()
    code, out, err = run(capsys, *(part.replace("{tmp}", str(folder)) for part in shlex.split(line)))
    assert (code, out) == (2, "")
    assert err.startswith("fvflops: error: ") and err.count("\n") == 1, err
    for part in LINES[line]:
        assert part.replace("{tmp}", str(folder)) in err
    assert sorted(folder.glob("[!_]*")) == before


@pytest.mark.parametrize("library", ["timm", "torchvision", "transformers", "diffusers", "open_clip"])
def test_a_missing_library_names_its_extra(library, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    assert main(["count", f"{library}:name"]) == 2
    assert capsys.readouterr().err == f"fvflops: error: {library} is not installed: pip install 'fvflops[{library}]'\n"
