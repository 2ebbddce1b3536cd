"""Import modules and files that a MODEL argument names."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any

from fvflops.text import describe_import_error, list_nearest


def load_function(text: str, option: str) -> Callable[..., Any]:
    """Return the function that `package.module:NAME` or `file.py:NAME` names; errors name `option`."""
    source, _, name = text.rpartition(":")
    if not source or not name:
        raise ValueError(f"{option} {text}: write package.module:function or file.py:function")
    try:
        function: Callable[..., Any] = import_attribute(source, name)
    except ValueError as error:
        raise ValueError(f"{option} {text}: {error}") from None
    if not callable(function):
        raise ValueError(f"{option} {text} must be a function; got {type(function).__name__}")
    return function


def import_attribute(source: str, name: str) -> Any:
    """Return an attribute of a module, or of a file whose name ends in .py; a missing one raises ValueError."""
    module = import_file(source) if source.endswith(".py") else import_module(source)
    value = getattr(module, name, None)
    if value is None:
        raise ValueError(describe_missing(source, name, [item for item in dir(module) if not item.startswith("_")]))
    return value


def import_module(name: str) -> ModuleType:
    """Import a module that the user names, also from the current folder; a missing one raises ValueError."""
    add_current_folder()
    try:
        return importlib.import_module(name)
    except ImportError as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is None or not f"{name}.".startswith(f"{missing}."):
            raise
        parent, _, last = missing.rpartition(".")
        if path := getattr(sys.modules.get(parent), "__path__", ()):
            names = sorted(item.name for item in pkgutil.iter_modules(path))
            raise ValueError(describe_missing(parent, last, names)) from error
        remedy = "install it, check the name, or add its parent folder by --path"
        raise ValueError(f"there is no package {missing!r} here: {remedy}") from error
    except (Exception, SystemExit) as error:
        raise _explain(name, error) from error


def _explain(name: str, error: BaseException) -> ValueError:
    """Return the error for a script that raises when it is imported."""
    from fvflops.capture.errors.model_errors import describe_error  # imports torch

    return ValueError(
        f"importing {name} raised {describe_error(error)}; importing runs all of it: put top-level code below "
        '`if __name__ == "__main__":`, or the model in a file of its own'
    )


def add_current_folder() -> None:
    """Add the current folder to `sys.path`, last: no file there replaces a module of a library."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def import_library(name: str, *, extra: str = "") -> ModuleType:
    """Import a library that an extra of fvflops installs, by default the extra of its name; else raise ValueError.

    A library that is installed but raises on import, such as one for another torch, raises ValueError too.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        library = name.partition(".")[0]
        if error.name in (name, library):
            raise ValueError(f"{library} is not installed: pip install 'fvflops[{extra or library}]'") from error
        raise
    except (ImportError, RuntimeError) as error:
        raise ValueError(f"{name} is installed, but cannot be imported: {describe_import_error(error)}") from error


@contextmanager
def offline(library: str) -> Iterator[None]:
    """Enable the hub's offline mode while a library builds a model of a local folder, which may name repositories."""
    import_library(library)
    constants: Any = importlib.import_module("huggingface_hub.constants")
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def describe_unknown_model(library: str, name: str, names: Sequence[str]) -> str:
    """Return a message: a library has no such model, the nearest five, and how to list all."""
    return f"{describe_missing(library, name, names)}; 'fvflops list {library}' lists all"


def describe_missing(source: str, name: str, names: Sequence[str]) -> str:
    """Return a message: a source has no such name, and the nearest five that it has."""
    return f"{source} has no {name!r}{list_nearest(name, names)}"


def import_file(path: str) -> ModuleType:
    """Import a Python file as a module; a missing one raises ValueError."""
    if not os.path.isfile(path):
        raise ValueError(f"there is no file {path!r}")
    state = os.stat(path)
    return _run_file(os.path.abspath(path), state.st_mtime_ns, state.st_size)


@cache
def _run_file(path: str, _mtime_ns: int, _size: int) -> ModuleType:
    """Import a file as a module, once: one that registers ops cannot be run again."""
    spec = importlib.util.spec_from_file_location(os.path.splitext(os.path.basename(path))[0], path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path!r} cannot be imported as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(spec.name, module)
    # As for `python file.py`, modules in the file's folder can be imported.
    sys.path.insert(0, os.path.dirname(path))
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        if "attempted relative import" not in str(error):
            raise
        dotted = os.path.splitext(os.path.relpath(path))[0].replace(os.sep, ".").lstrip(".")
        raise ValueError(f"{path} is part of a package, since it imports relatively: write {dotted}:FACTORY") from error
    except (Exception, SystemExit) as error:
        raise _explain(os.path.basename(path), error) from error
    return module
