"""Check TorchScript before it is loaded: its code may call nothing that does input or output.

TorchScript runs while it is loaded (`__setstate__`), so the source in the file is read, not the loaded module.
"""

from __future__ import annotations

import re

from fvflops.analysis.files.archive_records import read_records
from fvflops.analysis.files.io_ops import io_words

# Namespaces of the native classes that torch itself saves: packed weights.
_CLASSES = ("quantized", "sparse", "xnnpack", "mkldnn", "mkldnn_prepacked", "rnn")
_CLASS = re.compile(rb"torch\.classes\.(\w+)")
_WORD = re.compile(r"\w+")
# A name that `getattr` is given with escapes could be any.
_ESCAPED = re.compile(r"\\[^nt\"'\\]")
_LEGACY = "model.json"


def check_script(path: str) -> None:
    """Raise ValueError for TorchScript that could do input or output; its code is not run."""
    read = read_records(path)
    if _LEGACY in read.names:
        raise ValueError(f"{path} is TorchScript of a version before 1.4: save it again by torch.jit.save")
    for name in read.names:
        if not name.endswith((".py", ".pkl")):
            continue
        data = read.data(name)
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
