"""Suggest MODEL arguments for a name without its source, such as `resnet50` or `meta-llama/Llama-3.1-8B`."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence

from fvflops.text import nearest

_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_UNOWNED = re.compile(r"\w+-[\w.-]+", re.ASCII)  # old repositories of the hub have no owner, but hyphens
# Sources whose names are looked up, in the order in which they are suggested; classes begin with a capital letter.
_LIBRARIES = ("zoo", "timm", "torchvision")
_CLASSES = ("transformers", "diffusers")


def suggest_models(name: str, list_names: Callable[[str], Sequence[str]]) -> str:
    """Return ": did you mean SOURCE:NAME?", as the end of a message; "" where no source has such a name.

    `list_names` returns the names of a source.

    >>> suggest_models("meta-llama/Llama-3.1-8B", {}.__getitem__)
    ': did you mean hf:meta-llama/Llama-3.1-8B?'
    >>> suggest_models("resnet50", lambda source: ["resnet50"] if source != "torchvision" else [])
    ': did you mean zoo:resnet50 or timm:resnet50?'
    """
    *others, last = list(_list_models(name, list_names)) or [""]
    return f": did you mean {', '.join(others)}{' or ' * bool(others)}{last}?" if last else ""


def _list_models(name: str, list_names: Callable[[str], Sequence[str]]) -> Iterator[str]:
    library, _, rest = name.partition("/")
    module, _, factory = name.rpartition(".")
    if _is_module(name):
        yield f"{name}:CLASS"
    elif _is_module(module) and factory.isidentifier():
        yield f"{module}:{factory}"
    elif os.path.isfile(os.path.join(name, "config.json")):
        yield f"hf:{name}"
    elif library.lower() in _LIBRARIES and rest:
        architecture = rest.partition(".")[0]  # timm's repositories on the hub end in the name of their weights
        yield from (f"{library.lower()}:{found}" for found in (rest, architecture)[: 1 + (rest != architecture)])
    elif _REPOSITORY.fullmatch(name):
        yield f"hf:{name}"
    else:
        classes = _list_exact(name, _CLASSES, list_names) if name[:1].isupper() else []
        yield from classes or _list_named(name, list_names)


def _is_module(name: str) -> bool:
    """Return whether a name is that of a Python file or package, without importing it."""
    path = name.replace(".", os.sep)
    files = (f"{path}.py", os.path.join(path, "__init__.py"))
    return bool(path) and any(os.path.isfile(os.path.join(entry, file)) for entry in ("", *sys.path) for file in files)


def _list_exact(name: str, sources: Sequence[str], list_names: Callable[[str], Sequence[str]]) -> list[str]:
    return [f"{source}:{name}" for source in sources if name in _names_of(source, list_names)]


def _list_named(name: str, list_names: Callable[[str], Sequence[str]]) -> list[str]:
    if exact := _list_exact(name.lower(), _LIBRARIES, list_names):
        return exact
    near = ((source, nearest(name.lower(), _names_of(source, list_names), cutoff=0.85)) for source in _LIBRARIES)
    return [f"{source}:{match}" for source, match in near if match] or [f"hf:{name}"] * bool(_UNOWNED.fullmatch(name))


def _names_of(source: str, list_names: Callable[[str], Sequence[str]]) -> Sequence[str]:
    try:
        return list_names(source)
    except (ValueError, ImportError, RuntimeError):  # not installed, or not for this torch: nothing of it can be named
        return ()
