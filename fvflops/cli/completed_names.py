"""Names that completion scripts ask for: models, conventions, devices; those of libraries from a cache."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module, metadata

from fvflops import __version__, paths

# Source of models → the distribution whose version its names belong to.
DISTRIBUTIONS: Mapping[str, str] = {
    "zoo": "",
    "timm": "timm",
    "torchvision": "torchvision",
    "transformers": "transformers",
    "diffusers": "diffusers",
    "open_clip": "open_clip_torch",
}
_LIMIT = 10_000_000  # characters of a file of names
# Sources whose names are folders or functions of the user.
_OTHERS = ("hf:", "torchhub:")
_FIXED: Mapping[str, Sequence[str]] = {
    "torch-device": ("cpu", "cuda", "meta"),
    "dtype": ("fp32", "tf32", "fp16", "bf16", "fp64"),
}


def list_names(kind: str, prefix: str = "", environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the names of a kind that start with a prefix; of models without a colon, the sources.

    >>> list_names("model", "t"), list_names("dtype", "b")
    (['timm:', 'torchvision:', 'transformers:', 'torchhub:'], ['bf16'])
    """
    if kind == "model" and ":" not in prefix:
        names: Sequence[str] = [*(f"{source}:" for source in DISTRIBUTIONS), *_OTHERS]
    elif kind == "model":
        source = prefix.partition(":")[0]
        names = [f"{source}:{name}" for name in _list_source(source, environment)]
    else:
        names = _FIXED.get(kind) or _KINDS[kind](environment)
    return [name for name in names if name.startswith(prefix)]


def _list_source(source: str, environment: Mapping[str, str]) -> Sequence[str]:
    if source not in DISTRIBUTIONS:
        return ()
    try:
        version = metadata.version(DISTRIBUTIONS[source]) if DISTRIBUTIONS[source] else __version__
    except metadata.PackageNotFoundError:
        return ()

    def list_all() -> Sequence[str]:
        names: Sequence[str] = import_module("fvflops.sources.load").load_source(source).list_names()
        return names

    return _cached(source, version, list_all, environment)


def _list_kind(kind: str, environment: Mapping[str, str]) -> Sequence[str]:
    """Return what `fvflops list` lists."""
    return _cached(kind, __version__, lambda: import_module("fvflops.cli.commands.list").LISTS[kind](), environment)


_KINDS: Mapping[str, Callable[[Mapping[str, str]], Sequence[str]]] = {
    "table": lambda environment: _list_kind("conventions", environment),
    "device": lambda environment: _list_kind("devices", environment),
    "list": lambda environment: [*DISTRIBUTIONS, "hf", "devices", "conventions", "formats"],
}


# What `list_names` lists.
KINDS = ("model", *_KINDS, *_FIXED)


def _cached(
    name: str, version: str, list_all: Callable[[], Sequence[str]], environment: Mapping[str, str]
) -> Sequence[str]:
    """Return the names from the user's cache, or list them, which may import a library, and write them there."""
    folder = os.path.join(find_cache(environment), "names")
    path = os.path.join(folder, f"{name}-{version}.txt")
    try:
        text = paths.read_text(path, _LIMIT) if os.path.isfile(path) else None
    except (OSError, ValueError):
        text = None
    if text is not None:
        return text.splitlines()
    names = list(list_all())
    try:
        os.makedirs(folder, exist_ok=True)
        paths.write_text(path, "".join(f"{line}\n" for line in names))
    except (OSError, ValueError):  # completion works without a cache, slower
        pass
    return names


def find_cache(environment: Mapping[str, str]) -> str:
    """Return the folder of the user's cache of this program.

    >>> find_cache({"XDG_CACHE_HOME": os.path.join("home", "cache")}) == os.path.join("home", "cache", "fvflops")
    True
    """
    base = environment.get("XDG_CACHE_HOME") or environment.get("LOCALAPPDATA")
    return os.path.join(base or os.path.join(os.path.expanduser("~"), ".cache"), "fvflops")
