"""Find the source line that is executing: the innermost outside torch, this package and the standard library."""

from __future__ import annotations

import os
import sys
import sysconfig
from functools import cache
from types import CodeType, FrameType
from typing import NamedTuple

import torch

from fvflops.paths import PACKAGE

TORCH_FOLDER = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
PACKAGE_FOLDER = str(PACKAGE) + os.sep
ZOO_FOLDER = os.path.join(PACKAGE_FOLDER, "zoo") + os.sep
# Files whose functions call the model.
_OUTERMOST = frozenset(
    os.path.join(PACKAGE_FOLDER, "capture", *name) for name in (("model_call.py",), ("instrument", "threads.py"))
)
# Packages that receive tensors: the line that calls them is reported.
_LIBRARIES = frozenset(
    {"cupy", "jax", "joblib", "numba", "numpy", "pandas", "scipy", "sklearn", "tensorflow", "triton"}
)
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_EXCLUDED_FOLDERS = (TORCH_FOLDER, PACKAGE_FOLDER)
# Names of interactive input, which has no file; other names in angle brackets belong to generated code.
_INTERACTIVE = ("<stdin>", "<input>", "<console>", "<ipython-input", "<doctest")


class SourceLine(NamedTuple):
    """A source line, "" if unknown, and the name of its function."""

    line: str = ""
    function: str = ""


def find_source_line(frame: FrameType | None) -> SourceLine:
    """Return the line of the innermost frame of the model's source, from this frame outwards.

    >>> find_source_line(None)
    SourceLine(line='', function='')
    """
    while frame is not None:
        code = frame.f_code
        if code.co_filename in _OUTERMOST:
            break
        path = path_of(code)
        if path is not None and frame.f_globals.get("__name__", "").partition(".")[0] not in _LIBRARIES:
            return SourceLine(f"{path}:{frame.f_lineno}", _function_name(frame))
        frame = frame.f_back
    return SourceLine()


def source_line_of(function: object) -> SourceLine:
    """Return the first line and the name of a Python function or method."""
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return line_of_code(code, getattr(function, "__qualname__", "")) if isinstance(code, CodeType) else SourceLine()


def line_of_code(code: CodeType, name: str) -> SourceLine:
    """Return the first line of code, and the short form of a qualified name, by default the code's."""
    if (path := path_of(code)) is None:
        return SourceLine()
    return SourceLine(f"{path}:{code.co_firstlineno}", _short_name(name or code.co_name))


@cache
def path_of(code: CodeType) -> str | None:
    """Return a code object's path relative to its import folder, or None outside the model's source."""
    path = code.co_filename
    if path.startswith(_EXCLUDED_FOLDERS) and not path.startswith(ZOO_FOLDER):
        return None
    if path.startswith("<"):
        return path if path.startswith(_INTERACTIVE) else None
    if is_standard_library(path):
        return None
    folders = [os.path.abspath(folder) + os.sep for folder in sys.path]
    matches = [folder for folder in folders if path.startswith(folder)]
    return path[len(max(matches, key=len)) :] if matches else os.path.basename(path)


def _function_name(frame: FrameType) -> str:
    code = frame.f_code
    name = getattr(code, "co_qualname", None)  # from Python 3.11 on
    if name is None:
        name = code.co_name
        owner = frame.f_locals.get("self") if code.co_varnames[:1] == ("self",) else None
        if owner is not None:
            name = f"{type(owner).__qualname__}.{name}"
    return _short_name(name)


def _short_name(qualified: str) -> str:
    """Return a qualified name without its enclosing functions.

    >>> _short_name("build.<locals>.Scan.forward"), _short_name("<lambda>")
    ('Scan.forward', 'lambda')
    """
    return qualified.rpartition("<locals>.")[2].replace("<", "").replace(">", "")


def is_standard_library(path: str) -> bool:
    return path.startswith((_STDLIB, "<frozen ")) and "-packages" + os.sep not in path
