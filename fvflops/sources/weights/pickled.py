"""Load whole modules that torch.save pickled, which runs code that the file names."""

from __future__ import annotations

import os
import pickletools
import zipfile
from collections.abc import Iterator
from typing import IO, Any

import torch
from torch import nn

from fvflops.analysis.files.archive_checks import require_trust
from fvflops.sources.imports import add_current_folder
from fvflops.sources.loaded_model import BuiltModel
from fvflops.sources.options import SourceOptions

# Contents of pickled weights: tensors in containers.
_WEIGHTS = ("collections.", "torch._utils.", "torch.storage.", "torch._tensor.", "torch.nn.parameter.", "numpy.")
# Errors that a damaged file raises.
_DAMAGES = (ValueError, IndexError, UnicodeDecodeError, zipfile.BadZipFile)


def build(path: str, options: SourceOptions) -> BuiltModel:
    """Return the pickled module of a file that the user trusts; weights and other objects raise ValueError."""
    names = read_globals(path)
    classes = [name for name in names if not _belongs_to_weights(name)]
    if not classes:
        remedy = "name the model, such as timm:NAME or file.py:factory"
        raise ValueError(f"{path} has weights (a state_dict) and no architecture: {remedy}")
    require_trust(path, "pickle", options.trusts_file, names=classes)
    return BuiltModel(_find_module(path, _unpickle(path, options)))


def read_globals(path: str) -> list[str]:
    """Return the names a pickle imports, each once, in order, without running it; ValueError if it is not a pickle."""
    try:
        with open(path, "rb") as file:
            return list(dict.fromkeys(_read_file(file)))
    except _DAMAGES as error:
        raise ValueError(f"{path} is a damaged pickle: {error}") from error


def _read_file(file: IO[bytes]) -> Iterator[str]:
    """Yield the names that the pickles in a file of torch.save import."""
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            for name in archive.namelist():
                if name.endswith("data.pkl"):
                    with archive.open(name) as inner:
                        yield from _read_globals(inner)
        return
    # torch's format before 1.6 is several pickles: two numbers, a dict, then the object.
    file.seek(0)
    while file.read(1) == b"\x80":
        file.seek(-1, os.SEEK_CUR)
        yield from _read_globals(file)


def _read_globals(file: IO[bytes]) -> Iterator[str]:
    """Yield the names that one pickle imports."""
    texts: list[str] = []  # STACK_GLOBAL takes the two texts before it
    memo: dict[int, str] = {}
    for opcode, value, _ in pickletools.genops(file):
        if opcode.name == "GLOBAL":
            # Names before protocol 3 are Python 2's.
            yield str(value).replace(" ", ".").replace("__builtin__.", "builtins.")
        elif opcode.name == "STACK_GLOBAL":
            yield ".".join(texts[-2:])
        elif opcode.name == "MEMOIZE":
            memo[len(memo)] = texts[-1] if texts else ""
        elif opcode.name in ("BINGET", "LONG_BINGET") and value in memo:
            texts.append(memo[value])
        elif isinstance(value, str):
            texts.append(value)


def _belongs_to_weights(name: str) -> bool:
    module, _, attribute = name.rpartition(".")
    is_class = isinstance(getattr(torch, attribute, None), type) and not attribute.endswith("Storage")
    is_torch_value = module == "torch" and not is_class
    return name.startswith(_WEIGHTS) or is_torch_value or name in ("torch.Size", "torch.Tensor")


def _unpickle(path: str, options: SourceOptions) -> Any:
    add_current_folder()  # as for package.module:factory
    try:
        return torch.load(path, map_location=options.device or "cpu", weights_only=False)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{path}: a class of the pickle cannot be imported: {error}: run where that works") from error


def _find_module(path: str, value: Any) -> nn.Module:
    """Return a pickled module, or the only one in a pickled dict, such as a checkpoint; else raise ValueError."""
    if isinstance(value, nn.Module):
        return value
    found = {key: item for key, item in value.items() if isinstance(item, nn.Module)} if isinstance(value, dict) else {}
    if len(found) == 1:
        return next(iter(found.values()))
    what = f"{len(found)} modules ({', '.join(map(str, found))})" if found else f"a {type(value).__name__}"
    raise ValueError(f"{path} contains {what}, not one torch.nn.Module: write a factory that returns the model")
