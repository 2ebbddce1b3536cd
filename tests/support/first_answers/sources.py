"""Sources of models: files, made by another process, and libraries."""

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.support.first_answers.commands import TOY, run
from tests.support.schemas.torchvision_schemas import define_torchvision_schemas

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 64,
}


def _network():
    return nn.Sequential(nn.Conv1d(4, 5, 3), nn.BatchNorm1d(5), nn.ReLU()).eval()


def _write_program(path: str) -> None:
    torch.export.save(torch.export.export(_network(), (torch.rand(2, 4, 9),)), path)


def _write_traced(path: str) -> None:
    torch.jit.trace(_network(), torch.rand(2, 4, 9)).save(path)


def _write_pickle(path: str) -> None:
    torch.save(_network(), path)


def _write_trace(path: str) -> None:
    from fvflops import FlopCountAnalysis

    Path(path).write_text(FlopCountAnalysis(_network(), torch.rand(2, 4, 9)).trace().to_json())


def _write_folder(path: str) -> None:
    Path(path).mkdir()
    Path(path, "config.json").write_text(json.dumps(LLAMA))


def count_file(path: str, write: Callable[[str], None], line: str) -> Any:
    """Count a file that another process has written, so that nothing is imported here to write it."""
    child = os.fork()
    if not child:
        try:
            write(path)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    define_torchvision_schemas()
    answer = run(line)
    return {**answer, "files": None}  # files are zipped with dates


def count_library(*lines: str) -> Any:
    # Without the schemas torchvision is not importable, unless an earlier answer of the process has defined them.
    define_torchvision_schemas()
    return run(*lines)


FILES = {
    "program": ("x.pt2", _write_program, "count x.pt2 --unpickle"),
    "program, by operator": ("x.pt2", _write_program, "count x.pt2 --unpickle --by op"),
    "script": ("x.pt", lambda path: torch.jit.script(_network()).save(path), "count x.pt --unpickle --input 2,4,9"),
    "traced script": ("x.pt", _write_traced, "count x.pt --unpickle --input 2,4,9 --convention exact"),
    "pickle": ("x.pt", _write_pickle, "count x.pt --unpickle --input 2,4,9"),
    "pickle, refused": ("x.pt", _write_pickle, "count x.pt --input 2,4,9"),
    "weights": ("x.pt", lambda path: torch.save(_network().state_dict(), path), "count x.pt --input 2,4,9"),
    "trace": ("x.json", _write_trace, "count x.json --convention exact"),
    "no model": ("x.json", _write_folder, "count x.json"),
    "hugging face folder": ("llama", _write_folder, "count hf:llama --build-on meta --seq 8"),
    "hugging face folder, training": (
        "llama",
        _write_folder,
        "count hf:llama --build-on meta --seq 8 --backward --train",
    ),
    "hugging face folder, memory": ("llama", _write_folder, "memory hf:llama --seq 8 --no-savings"),
    "missing factory": ("net.py", lambda path: Path(path).write_text(TOY), "count net.py:nothing"),
    "missing file": ("x.pt", lambda path: None, "count x.pt"),
}
LIBRARIES = {
    "list": ("list", "list zoo", "list devices", "list conventions"),
    "zoo": ("count zoo:gpt2 --seq 16 --build-on meta",),
    "torchvision": ("count torchvision:squeezenet1_1 --build-on meta",),
    "timm": ("count timm:resnet10t --build-on meta",),
    "transformers": ("count transformers:BertModel --arg num_hidden_layers=1 --seq 8 --build-on meta",),
    "transformers, mixture": (
        "count transformers:MixtralForCausalLM --arg num_hidden_layers=1 --seq 8 --build-on meta --train",
    ),
    "diffusers": ("count diffusers:UNet2DModel --build-on meta",),
    "module": ("count torch.nn:Identity --input 2,3",),
    "factory with arguments": ("count torch.nn:Linear --arg in_features=4 --arg out_features=5 --input 2,4",),
}
CASES = {
    **{name: partial(count_file, *case) for name, case in FILES.items()},
    **{name: partial(count_library, *lines) for name, lines in LIBRARIES.items()},
}
