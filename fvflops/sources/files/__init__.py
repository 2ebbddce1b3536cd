"""Models from files, recognised by their content."""

from __future__ import annotations

import importlib
import os
from typing import Protocol

from fvflops.analysis.files.file_kinds import recognise
from fvflops.sources.loaded_model import BuiltModel
from fvflops.sources.options import SourceOptions

# Kind of file → the module that loads it; it is imported when such a file is named.
LOADERS = {
    "program": "fvflops.sources.files.exported_program",
    "script": "fvflops.sources.files.torchscript",
    "onnx": "fvflops.sources.files.onnx",
    "pickle": "fvflops.sources.files.pickled",
}
# What other files are, and what to do.
_REFUSED = {
    "trace": "is a saved Trace, and this command runs the model: name the model",
    "safetensors": "has weights (safetensors) and no architecture: name the model, such as transformers:CLASS",
    "gguf": "has weights (GGUF) and no architecture: name the model, such as transformers:CLASS",
    "damaged": "is not a program of torch.export: it is not a complete zip archive",
}
# Endings that belong to files: a name with one that does not exist is a missing file.
_ENDINGS = (
    ".pt2",
    ".pt",
    ".pth",
    ".ts",
    ".onnx",
    ".bin",
    ".ckpt",
    ".pkl",
    ".safetensors",
    ".gguf",
    ".json",
    ".json.gz",
)


class Loader(Protocol):
    """What the module of a kind of file contains."""

    def build(self, path: str, options: SourceOptions) -> BuiltModel:
        """Return the model in a file; one that cannot be loaded raises ValueError that names it.

        A file that can run code is loaded by way of `require_trust`.
        """


def is_file(name: str) -> bool:
    """Return whether a MODEL argument names a file, existing or missing, and not `file.py:factory`.

    >>> is_file("model.pt2"), is_file("zoo:resnet50"), is_file("net.py:build")
    (True, False, False)
    """
    return os.path.isfile(name) or name.endswith(_ENDINGS)


def load_file(path: str, options: SourceOptions) -> BuiltModel:
    """Return the model in a file; one of another kind, a missing one, and code that is not trusted raise ValueError."""
    kind = recognise(path)
    if kind in _REFUSED:
        raise ValueError(f"{path} {_REFUSED[kind]}")
    if kind not in LOADERS:
        raise ValueError(
            f"{path} is a file of no kind that contains a model: pass a program of torch.export (.pt2), TorchScript, "
            "ONNX, a pickled module or file.py:factory"
        )
    loader: Loader = importlib.import_module(LOADERS[kind])
    return loader.build(path, options)
