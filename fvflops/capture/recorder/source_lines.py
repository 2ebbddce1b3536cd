"""Find the source line that runs: the innermost outside torch, this package and Python's standard library."""

from __future__ import annotations

import os
import sys
import sysconfig
from types import CodeType, FrameType
from typing import NamedTuple

import torch

from fvflops.paths import PACKAGE

_PACKAGE = str(PACKAGE)
_ZOO = os.path.join(_PACKAGE, "zoo") + os.sep
# Files whose frames enclose the model's.
_OUTERMOST = frozenset(os.path.join(_PACKAGE, "capture", *name) for name in (("run.py",), ("instrument", "threads.py")))
# Packages that receive tensors: their callers' lines count.
_LIBRARIES = frozenset(
    {"cupy", "jax", "joblib", "numba", "numpy", "pandas", "scipy", "sklearn", "tensorflow", "triton"}
)
_LIBRARY = sysconfig.get_paths()["stdlib"] + os.sep
_NOT_THE_MODELS = (os.path.dirname(os.path.abspath(torch.__file__)) + os.sep, _PACKAGE + os.sep)
# Interactive input has no file; other names of this kind belong to generated code.
_TYPED = ("<stdin>", "<input>", "<console>", "<ipython-input", "<doctest")
_PATHS: dict[CodeType, str | None] = {}


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
            return SourceLine(f"{path}:{frame.f_lineno}", _name_of(frame))
        frame = frame.f_back
    return SourceLine()


def source_line_of(function: object) -> SourceLine:
    """Return the first line and the name of a Python function or method."""
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    path = path_of(code) if isinstance(code, CodeType) else None
    if code is None or path is None:
        return SourceLine()
    return SourceLine(f"{path}:{code.co_firstlineno}", _plain(getattr(function, "__qualname__", code.co_name)))


def path_of(code: CodeType) -> str | None:
    """Return a code object's path relative to its import folder, or None outside the model's source."""
    if code not in _PATHS:
        _PATHS[code] = _name_file(code.co_filename)
    return _PATHS[code]


def _name_of(frame: FrameType) -> str:
    code = frame.f_code
    name = getattr(code, "co_qualname", None)  # from Python 3.11 on
    if name is None:
        name = code.co_name
        owner = frame.f_locals.get("self") if code.co_varnames[:1] == ("self",) else None
        if owner is not None:
            name = f"{type(owner).__qualname__}.{name}"
    return _plain(name)


def _plain(qualified: str) -> str:
    """Return a qualified name without its enclosing functions.

    >>> _plain("build.<locals>.Scan.forward"), _plain("<lambda>")
    ('Scan.forward', 'lambda')
    """
    return qualified.rpartition("<locals>.")[2].replace("<", "").replace(">", "")


def _name_file(path: str) -> str | None:
    if path.startswith(_NOT_THE_MODELS) and not path.startswith(_ZOO):
        return None
    if path.startswith("<"):
        return path if path.startswith(_TYPED) else None
    if path.startswith(_LIBRARY) and "-packages" + os.sep not in path:
        return None
    folders = [os.path.abspath(folder) + os.sep for folder in sys.path]
    inside = [folder for folder in folders if path.startswith(folder)]
    return path[len(max(inside, key=len)) :] if inside else os.path.basename(path)
