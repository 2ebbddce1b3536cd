"""Recognise a file that is named as a model, and refuse one that can run code unless the user trusts it."""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any


def read_records(path: str) -> tuple[tuple[str, ...], Callable[[str], bytes]]:
    """Return an archive's entries and a function that reads one; a damaged or ambiguous archive raises ValueError."""
    from fvflops.torch_internals import ArchiveReader

    try:
        with zipfile.ZipFile(path) as archive:
            listed = archive.namelist()
        reader = ArchiveReader(path)
        names = tuple(reader.get_all_records())
    except (RuntimeError, ValueError, zipfile.BadZipFile, NotImplementedError) as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), "").strip()
        raise ValueError(f"{path} is a damaged archive: {reason[:200]}") from error
    folders = {name.partition("/")[0] for name in listed}
    if len(set(listed)) != len(listed) or len(folders) != 1 or len(names) != len(listed):
        raise ValueError(f"{path} is an archive with several entries of one name, or outside of its folder: refused")
    return names, lambda name: bytes(reader.get_record(name))


# Ops with input or output that their schema does not show.
_NAMED = frozenset(
    ("aten::_print", "debugprims::load_tensor", "prim::Print", "prim::rpc_async", "prim::rpc_remote", "prim::rpc_sync")
)
_PATHS = ("filename", "file_name", "file", "path", "file_path", "filepath", "uri", "url", "src_path", "dst_path")


def is_io_op(schema: Any) -> bool:
    """Return whether the op of a schema takes a path, or is known to do input or output.

    >>> import torch
    >>> is_io_op(torch.ops.aten.from_file.default._schema), is_io_op(torch.ops.aten.mm.default._schema)
    (True, False)
    """
    takes_path = any(item.name in _PATHS and str(item.type) in ("str", "Optional[str]") for item in schema.arguments)
    return takes_path or schema.name in _NAMED


@cache
def io_words() -> frozenset[str]:
    """Return the names, without namespaces, by which TorchScript calls the registered ops that do input or output."""
    from fvflops.torch_internals import all_schemas

    names = {schema.name for schema in all_schemas() if is_io_op(schema)} | _NAMED
    return frozenset({name.partition("::")[2] for name in names} | {"print"})


# Namespaces of the native classes that torch itself saves: packed weights.
_CLASSES = ("quantized", "sparse", "xnnpack", "mkldnn", "mkldnn_prepacked", "rnn")
_CLASS = re.compile(rb"torch\.classes\.(\w+)")
_WORD = re.compile(r"\w+")
# A name that `getattr` is given with escapes could be any.
_ESCAPED = re.compile(r"\\[^nt\"'\\]")
_LEGACY = "model.json"


def check_script(path: str) -> None:
    """Raise ValueError for TorchScript that could do input or output; its code is not run."""
    names, read = read_records(path)
    if _LEGACY in names:
        raise ValueError(f"{path} is TorchScript of a version before 1.4: save it again by torch.jit.save")
    for name in names:
        if not name.endswith((".py", ".pkl")):
            continue
        data = read(name)
        for found in _CLASS.findall(data):
            if found.decode() not in _CLASSES:
                raise ValueError(f"{path} contains an object of torch.classes.{found.decode()}, which is refused")
        if name.endswith(".py"):
            _check_code(path, data.decode("utf-8", errors="backslashreplace"))


def _check_code(path: str, text: str) -> None:
    words = set(_WORD.findall(text))
    if called := sorted(words & io_words()):
        raise ValueError(
            f"{path} is TorchScript that names {called[0]!r}, an op that reads or writes files, prints or uses a "
            "network: it is refused, whether the file is trusted or not"
        )
    if "getattr" in words and _ESCAPED.search(text):
        raise ValueError(f"{path} is TorchScript that writes names with escapes: it is refused")


# Kinds of files that can run code when they are loaded → their description.
CODE = {"program": "a program of torch.export", "script": "TorchScript", "pickle": "a pickle"}
# Endings of data → the kind of such a file, whatever it contains: it is never loaded as code.
_DATA = {".json": "trace", ".json.gz": "trace", ".csv": "", ".parquet": "", ".onnx": "onnx"}
_GZIP, _PICKLE, _ZIP = b"\x1f\x8b", b"\x80", b"PK\x03\x04"
_MAX_SHOWN = 3


def recognise(path: str) -> str:
    """Return a file's kind, by its content: a key of CODE, "onnx", "trace", "safetensors", "gguf", "damaged", or ""."""
    if not os.path.isfile(path):
        raise ValueError(f"{path}: there is no such file")
    for ending, kind in _DATA.items():
        if path.lower().endswith(ending):
            return kind
    with open(path, "rb") as file:
        head = file.read(64)
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
