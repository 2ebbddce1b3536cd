"""Module classes loaded in this process, for checking tables; nothing is imported."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from importlib.machinery import PathFinder

from fvflops.formulas.table import is_short_for
from fvflops.text import nearest


def may_exist(name: str) -> bool:
    """Return whether a table's name of a module class matches a loaded class, or may match one loaded later.

    The latter are names without a package, in `__main__`, in a package that is not imported, or in a submodule that
    exists and is not imported yet.

    >>> may_exist("torch.nn.LSTM"), may_exist("torch.nn.LSTMM"), may_exist("mine.LSTM")
    (True, False, True)
    """
    packages = name.split(".")[:-1]
    if not packages or packages[0] == "__main__":
        return True
    loaded = loaded_classes().values()
    return packages[0] not in sys.modules or _matches(name, loaded) or _may_be_imported(packages)


def suggest_class(name: str) -> str:
    """Return the name of the loaded class closest to an unknown name, "" without any.

    >>> suggest_class("torch.nn.LSTMM"), suggest_class("torch.nn.modules.rnn.LSTM")
    ('torch.nn.LSTM', 'torch.nn.LSTM')
    """
    packages, _, last = name.rpartition(".")
    loaded = loaded_classes()
    if name in loaded:
        return loaded[name]
    top = name.partition(".")[0] + "."
    candidates = [known for known in loaded.values() if known.startswith(top)] or list(loaded.values())
    near = nearest(last, sorted({known.rpartition(".")[2] for known in candidates}), cutoff=0)
    if near and _matches(f"{packages}.{near}", candidates):
        return f"{packages}.{near}"
    same = sorted(known for known in candidates if near and known.rpartition(".")[2] == near)
    return nearest(name, same, cutoff=0)


def name_class(cls: type) -> str:
    """Return the name of a class in a Trace: for a class of torch.nn its public name.

    >>> from torch import nn
    >>> name_class(nn.LSTM)
    'torch.nn.LSTM'
    """
    from torch import nn

    public = getattr(nn, cls.__name__, None) is cls
    return f"torch.nn.{cls.__name__}" if public else f"{cls.__module__}.{cls.__qualname__}"


def loaded_classes() -> dict[str, str]:
    """Return qualified name → name in a Trace, for all module classes and their bases.

    >>> loaded_classes()["torch.nn.modules.rnn.LSTM"]
    'torch.nn.LSTM'
    """
    from torch import nn

    classes = {base for cls in subclasses(nn.Module) for base in cls.__mro__}
    return {f"{cls.__module__}.{cls.__qualname__}": name_class(cls) for cls in classes}


def subclasses(cls: type) -> Iterator[type]:
    """Yield a class and all classes below it, each once."""
    seen, pending = set[type](), [cls]
    while pending:
        subclass = pending.pop()
        if subclass not in seen:
            seen.add(subclass)
            pending += type.__subclasses__(subclass)
    yield from seen


def _matches(name: str, loaded: Iterable[str]) -> bool:
    return any(name == known or is_short_for(name, known) for known in loaded)


def _may_be_imported(packages: list[str]) -> bool:
    """Return whether the innermost imported package has the next submodule as a file."""
    inner = max(count for count in range(1, len(packages) + 1) if ".".join(packages[:count]) in sys.modules)
    if inner == len(packages):
        return False
    path = getattr(sys.modules[".".join(packages[:inner])], "__path__", None)
    return path is not None and PathFinder.find_spec(".".join(packages[: inner + 1]), list(path)) is not None
