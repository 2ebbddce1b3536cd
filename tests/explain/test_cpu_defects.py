"""The right finding first in real traces of the CPU with a planted defect, and none in their clean twins."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fvflops.explain.explained_trace import explain_trace
from fvflops.explain.findings.find_losses import find_losses
from tests.support.planted.cpu_defects import CPU_DEFECTS, CpuDefect, Maker, run, train

# Times decide, so that most run by `-m long` only; these lose most of the step by their defect.
_ALWAYS = ("token by token", "data loading", "filling")
_TWINS = [defect for defect in CPU_DEFECTS if defect.clean is not train]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


_TRIES = 3  # another process may hold up any op of a run, but not the same one in each run


def _runs(make: Maker, folder: Path) -> Iterator[list[str]]:
    """Yield the codes that are found in some runs."""
    for _ in range(_TRIES):
        yield [finding.code for finding in find_losses(explain_trace(run(make, folder / "trace.json")))]


def _mark(defects: list[CpuDefect], always: tuple[str, ...]) -> list[object]:
    return [
        pytest.param(defect, id=defect.name, marks=() if defect.name in always else pytest.mark.long)
        for defect in defects
    ]


@pytest.mark.parametrize("defect", _mark(CPU_DEFECTS, _ALWAYS))
def test_planted_defect_is_found_first(defect: CpuDefect, tmp_path: Path) -> None:
    assert any(found[:1] == [defect.code] for found in _runs(defect.make, tmp_path))


@pytest.mark.parametrize("defect", _mark(_TWINS, _ALWAYS))
def test_clean_twin_has_no_findings(defect: CpuDefect, tmp_path: Path) -> None:
    assert any(found == [] for found in _runs(defect.clean, tmp_path))
