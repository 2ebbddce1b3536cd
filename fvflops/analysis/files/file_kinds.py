"""Recognise a file that is named as a model, and refuse one that can run code unless the user trusts it."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Sequence

# Kinds of files that can run code when they are loaded → their description.
CODE = {"program": "a program of torch.export", "script": "TorchScript", "pickle": "a pickle"}
# Endings of data → the kind of such a file, whatever it contains: it is never loaded as code.
_DATA = {".json": "trace", ".json.gz": "trace", ".csv": "", ".parquet": "", ".onnx": "onnx"}
_GZIP = b"\x1f\x8b"
_PICKLE = b"\x80"
_ZIP = b"PK\x03\x04"
_HEAD = 64  # bytes that are enough to recognise a file that is no zip archive
_MAX_SHOWN = 3


def recognise(path: str) -> str:
    """Return a file's kind, by its content: a key of CODE, "onnx", "trace", "safetensors", "gguf", "damaged", or ""."""
    if not os.path.isfile(path):
        raise ValueError(f"{path}: there is no such file")
    for ending, kind in _DATA.items():
        if path.lower().endswith(ending):
            return kind
    with open(path, "rb") as file:
        head = file.read(_HEAD)
    # An archive after the data of another file would be one for some readers.
    if head.startswith(_ZIP) and zipfile.is_zipfile(path):
        return _recognise_archive(path)
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
    return "damaged" if path.endswith(".pt2") else ""


def _recognise_archive(path: str) -> str:
    try:
        with zipfile.ZipFile(path) as archive:
            listed = archive.namelist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError):
        return "damaged"
    # torch writes all files into one folder; early versions of torch.export did not.
    names = {name.partition("/")[2] or name for name in listed} | set(listed)
    if "archive_format" in names or "serialized_exported_program.json" in names:
        return "program"
    if "data.pkl" not in names:
        return ""
    return "script" if any(name.startswith("code/") for name in names) else "pickle"


def require_trust(path: str, kind: str, trust: bool, *, names: Sequence[str] = ()) -> None:
    """Raise ValueError for a file of a kind in CODE that the user does not trust; `names` are its imports."""
    if kind in CODE and not trust:
        listed = ", ".join(names[:_MAX_SHOWN]) + (" ..." if len(names) > _MAX_SHOWN else "")
        raise ValueError(
            f"{path} is {CODE[kind]}{f' ({listed})' if listed else ''}, and to load one can run code: "
            "if you trust the file, add --trust-file (trust=True in Python)"
        )
