"""Import the library of an integration, with a hint where it is missing."""

from __future__ import annotations

import importlib
from typing import Any


def import_library(module: str, install: str) -> Any:
    """Import a module of another library; if that is not installed, the ImportError names the packages to `install`."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # it is installed, and a dependency of it is missing
        raise ImportError(f"{module} is not installed, which this integration needs: pip install {install}") from None
