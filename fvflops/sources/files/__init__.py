"""Models from files: recognised by their content, whatever their names end in."""

from __future__ import annotations

import importlib
import os
import zipfile
from typing import Protocol

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
_GZIP = b"\x1f\x8b"
_PICKLE = b"\x80"
_HEAD = 64  # bytes that are enough to recognise a file that is no zip archive


class Loader(Protocol):
    """What the module of a kind of file contains."""

    def build(self, path: str, options: SourceOptions) -> BuiltModel:
        """Return the model in a file; one that cannot be loaded raises ValueError that names it."""


def is_file(name: str) -> bool:
    """Return whether a MODEL argument names a file, existing or missing, and not `file.py:factory`.

    >>> is_file("model.pt2"), is_file("zoo:resnet50"), is_file("net.py:build")
    (True, False, False)
    """
    return os.path.isfile(name) or name.endswith(_ENDINGS)


def load_file(path: str, options: SourceOptions) -> BuiltModel:
    """Return the model in a file; one of another kind, or a missing one, raises ValueError."""
    kind = recognise(path)
    if kind in _REFUSED:
        raise ValueError(f"{path} {_REFUSED[kind]}")
    if kind not in LOADERS:
        raise ValueError(
            f"{path} is a file of no kind that contains a model: pass a program of torch.export (.pt2), TorchScript, "
            "ONNX, a pickled module (with --unpickle) or file.py:factory"
        )
    loader: Loader = importlib.import_module(LOADERS[kind])
    return loader.build(path, options)


def recognise(path: str) -> str:
    """Return the kind of a file by its content: a key of LOADERS, "trace", "safetensors", "gguf", or "" for others."""
    if not os.path.isfile(path):
        raise ValueError(f"{path}: there is no such file")
    if zipfile.is_zipfile(path):
        return _recognise_archive(path)
    with open(path, "rb") as file:
        head = file.read(_HEAD)
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= os.path.getsize(path):
        return "safetensors"
    if head.startswith(b"GGUF"):
        return "gguf"
    if head.startswith(_PICKLE):
        return "pickle"
    if head.startswith(_GZIP) or head.lstrip()[:1] == b"{":
        return "trace"
    # A protobuf whose first field, ir_version, is a small number, followed by the producer's name or the opset.
    if head[:1] == b"\x08" and len(head) > 2 and head[2:3] in (b"\x12", b"\x1a", b"\x3a", b"\x42"):
        return "onnx"
    # Protobuf has no signature, and any other file of these names is damaged.
    return {".onnx": "onnx", ".pt2": "program", ".json": "trace"}.get(os.path.splitext(path)[1], "")


def _recognise_archive(path: str) -> str:
    with zipfile.ZipFile(path) as archive:
        # torch writes all files into one folder; early versions of torch.export did not.
        names = {name.partition("/")[2] or name for name in archive.namelist()} | set(archive.namelist())
    if "archive_format" in names or "serialized_exported_program.json" in names:
        return "program"
    if "data.pkl" not in names:
        return ""
    return "script" if any(name.startswith("code/") for name in names) else "pickle"
