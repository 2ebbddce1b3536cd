"""What a PyTorch model costs, and where: FLOPs, activations and parameters, by operator and by module."""

import importlib
import os
import re
import warnings
from typing import Any

from fvflops.garbage_collector import gc_paused

__version__ = "1.0.0"


def _read_stub() -> dict[str, tuple[str, str]]:
    """Return public name → (module, name in that module), parsed from the type stub `__init__.pyi`.

    Names are imported on first use, so that `fvflops --help` does not import torch.
    """
    path = os.path.join(os.path.dirname(__file__), "__init__.pyi")
    stub = __loader__.get_data(path).decode()  # type: ignore[name-defined]
    sources = {name: (module, name) for module, name in re.findall(r"^from (\S+) import (\w+)", stub, re.MULTILINE)}
    return sources | {alias: sources[name] for alias, name in re.findall(r"^(\w+) = (\w+)$", stub, re.MULTILINE)}


_SOURCES = _read_stub()
# Deprecated public name, in the stub an alias of its new name (`old = new`) → the release that removes it.
_DEPRECATED: dict[str, str] = {}
__all__ = sorted(_SOURCES.keys() - _DEPRECATED.keys())


def __getattr__(name: str) -> Any:
    if name not in _SOURCES:
        raise AttributeError(f"module 'fvflops' has no attribute {name!r}")
    module, attribute = _SOURCES[name]
    if name in _DEPRECATED:
        warnings.warn(
            f"fvflops.{name} is deprecated and will be removed in {_DEPRECATED[name]}: use fvflops.{attribute}",
            DeprecationWarning,
            stacklevel=2,
        )
    with gc_paused():
        return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return __all__
