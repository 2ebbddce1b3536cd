"""Commands, formats and files, by the command line's own function."""

import gzip
from functools import partial
from pathlib import Path
from typing import Any

MODEL = "zoo:lenet5"
TOY = """
import torch
from torch import nn
import torch.nn.functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 5)
    def forward(self, x):
        return self.fc(x).relu()

def build():
    return Net(), torch.ones(2, 4)

class Flex(nn.Module):
    def forward(self, q):
        from torch.nn.attention.flex_attention import flex_attention
        return flex_attention(q, q, q)

def flex():
    return Flex(), torch.ones(1, 2, 128, 16)

class Compiles(nn.Module):
    def forward(self, x):
        import torch._dynamo
        def fail(graph, inputs):
            raise AssertionError("a count compiles nothing")
        return torch.compile(lambda x: x @ x.mT, backend=fail)(x)

def compiles():
    return Compiles(), torch.ones(3, 4)
"""


def run(*lines: str) -> Any:
    """Run commands, and return their exit codes and the files that they wrote."""
    from fvflops.cli import main

    Path("toy.py").write_text(TOY)
    Path("budget.yaml").write_text("budgets:\n")
    codes = []
    for line in lines:
        try:
            codes.append(main(line.split()))
        except SystemExit as error:
            codes.append(f"exit {error.code}")
    return {"codes": codes, "files": {path.name: _read(path) for path in sorted(Path().iterdir()) if path.is_file()}}


def _read(path: Path) -> str:
    contents = path.read_bytes()
    return (gzip.decompress(contents) if path.suffix == ".gz" else contents).decode("latin-1")


LINES = {
    **{
        f"format {name}": (f"count {MODEL} --format {name} --output report.{name}",)
        for name in (
            *("text", "markdown", "csv", "json", "html", "latex", "fvcore", "tree", "paper", "svg", "dot"),
            *("model-explorer", "trace"),
        )
    },
    **{f"rows by {name}": (f"count {MODEL} --by {name}",) for name in ("operator", "both", "op", "call", "line")},
    **{
        f"table {name}": (f"count {MODEL} --table {name}",)
        for name in ("exact", "fvcore", "torch", "deepspeed", "ptflops", "thop", "calflops", "torchinfo", "torch_flops")
    },
    "training": (f"count {MODEL} --backward --train --build-on meta",),
    "timelines": (f"count {MODEL} --trace t.json --speedscope s.json --flamegraph f.txt --save-trace trace.json.gz",),
    "several models": (f"count {MODEL} zoo:llama_tiny --columns parameters,flops,memory,unsupported",),
    "file": ("count toy.py:build",),
    "flex attention": ("count toy.py:flex --strict",),
    "compiler": ("count toy.py:compiles --strict",),
    "wrong input": ("count toy.py:build --input 2,5",),
    "wrong model": ("count zoo:lenet",),
    "wrong option": ("count zoo:lenet5 --tabel exact",),
    "compare": (f"compare {MODEL} --conventions default,fvcore,exact",),
    "diff": (f"diff {MODEL} {MODEL} --arg-b classes=100",),
    "check": (f"check {MODEL} --budget budget.yaml --update", f"check {MODEL} --budget budget.yaml"),
    "plan": ("plan zoo:llama_tiny --mesh dp=2,tp=2",),
    "plan of a pipeline": ("plan zoo:llama_tiny --mesh pp=2,fsdp=2 --microbatches 4",),
    "plan with times": ("plan zoo:llama_tiny --mesh fsdp=2 --device H100 --dtype bf16",),
    "ops": ("ops linear", "ops --convention fvcore", "ops flex_attention"),
    "memory": (f"memory {MODEL} --batch 4",),
    "memory of inference": (f"memory {MODEL} --inference --device 24GB",),
    "memory with an optimizer": ("memory zoo:llama_tiny --dtype bf16 --optimizer sgd --no-savings",),
    "roofline": (f"roofline {MODEL} --device H100 --dtype bf16", f"roofline {MODEL} --device A100 --by op --top 3"),
    "sweep": (f"sweep {MODEL} zoo:llama_tiny --output counts.csv --jobs 1 --columns parameters,flops",),
    "completion": ("completion bash", "completion zsh", "completion fish"),
    "scale": (f"scale {MODEL} --vary batch=1..4",),
    "generation": ("scale zoo:llama_tiny --generate prompt=8,new=4",),
    "help": ("--help", "count --help", "--version"),
}
CASES = {name: partial(run, *lines) for name, lines in LINES.items()}
