"""Keep libraries from the hub while a model of a local folder is built."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fvflops.sources.imports import import_library


@contextmanager
def offline(library: str) -> Iterator[None]:
    """Enable the hub's offline mode: configurations may name repositories. `library` is the one that builds."""
    import_library(library)
    constants: Any = importlib.import_module("huggingface_hub.constants")
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
