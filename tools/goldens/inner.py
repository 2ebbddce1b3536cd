"""The imports that are not public names of fvflops, all of them: after a move, change them here and nowhere else."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
if sys.path[:1] != [str(ROOT)]:
    sys.path.insert(0, str(ROOT))


def check_package() -> None:
    """Raise ImportError where fvflops is not that of this checkout."""
    import fvflops

    if not Path(fvflops.__file__).resolve().is_relative_to(ROOT):
        raise ImportError(f"fvflops is imported from {fvflops.__file__}, and not from {ROOT}")


def command_line() -> Callable[[list[str]], int]:
    """Return the function that runs one command line and returns its exit code."""
    from fvflops.cli import main

    return main


def commands() -> list[str]:
    """Return the names of all commands."""
    from fvflops.cli import COMMANDS

    return list(COMMANDS)


def conventions() -> list[str]:
    """Return the names of the shipped formula tables."""
    from fvflops.formulas import shipped_tables

    return shipped_tables()


def test_models() -> Mapping[str, Callable[[], tuple[Any, tuple[Any, ...]]]]:
    """Return name → a function that builds the model and its positional inputs, of the models that tests count."""
    from tests.support.models.whole_models import MODELS

    return MODELS


def test_layers() -> Mapping[str, Callable[[], tuple[Any, tuple[Any, ...]]]]:
    """Return the same of single layers, one or more for each kind in torch.nn."""
    from tests.support.models.layers import LAYERS

    return LAYERS


# The programs that are run as they are, and the trace that tests keep: the first path that exists.
PROGRAMS = {
    "coverage": ("tools/op_coverage.py", "tools/coverage"),
    "sweep": ("tools/sweep.py", "tools/sweep"),
}
SAVED_TRACES = ("tests/data/lenet5_training_trace.json", "tests/support/data/lenet5_training_trace.json")


def find(paths: tuple[str, ...]) -> Path:
    """Return the first of some paths of the repository that exists."""
    for path in paths:
        if (ROOT / path).exists():
            return ROOT / path
    raise FileNotFoundError(f"none of {', '.join(paths)} is there: name its new path in {Path(__file__).name}")
