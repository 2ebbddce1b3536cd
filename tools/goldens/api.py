"""The public interface: names, signatures and docstrings, as pydoc writes them."""

from __future__ import annotations

import importlib
import pydoc

from goldens.jobs import Folder, Job

# Modules whose paths are public too.
_MODULES = (
    "fvflops",
    "fvflops.zoo",
    "fvflops.integrations.accelerate",
    "fvflops.integrations.lightning",
    "fvflops.integrations.transformers",
    "fvflops.integrations.pytest_plugin",
    "fvflops.reports.count_json",
    "fvflops.reports.html",
    "fvflops.devices.utilisation",
)


def jobs() -> list[Job]:
    return [Job("api", _write)]


def _write(folder: Folder) -> None:
    for name in _MODULES:
        try:
            text = pydoc.plain(pydoc.render_doc(importlib.import_module(name)))
        except ImportError as error:
            text = f"ImportError: {error}"
        folder.write(f"{name}.txt", text)
