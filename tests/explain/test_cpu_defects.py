"""The right finding first in real traces of the CPU with a planted defect, and none in their clean twins."""

import pytest

from fvflops.explain.explained_trace import explain_trace
from fvflops.explain.findings.find_losses import find_losses
from tests.support.planted.cpu_defects import CPU_DEFECTS, run, train
from tests.support.processes.explained_worker import CASES
from tests.support.processes.start import run_ranks

# Times decide, so that most run by `-m long` only; these lose most of the step by their defect.
_ALWAYS = ("token by token", "data loading", "recompilation", "filling", "late rank")
_TWINS = {defect.name: defect for defect in CPU_DEFECTS if defect.clean is not train}


pytestmark = pytest.mark.usefixtures("one_thread")


_TRIES = 3  # another process may hold up any op of a run, but not the same one in each run


def _runs(make, folder, *, with_stack):
    """Yield the codes that are found in some runs."""
    for _ in range(_TRIES):
        path = run(make, folder / "trace.json", with_stack=with_stack)
        yield [finding.code for finding in find_losses(explain_trace(path))]


def _mark(cases, always):
    return [
        pytest.param(case, id=name, marks=() if name in always else pytest.mark.long) for name, case in cases.items()
    ]


@pytest.mark.parametrize("defect", _mark({defect.name: defect for defect in CPU_DEFECTS}, _ALWAYS))
def test_planted_defect_is_found_first(defect, tmp_path):
    assert any(found[:1] == [defect.code] for found in _runs(defect.make, tmp_path, with_stack=defect.with_stack))


@pytest.mark.parametrize("defect", _mark(_TWINS, _ALWAYS))
def test_clean_twin_has_no_findings(defect, tmp_path):
    assert any(found == [] for found in _runs(defect.clean, tmp_path, with_stack=defect.with_stack))


def _find_in_ranks(case, folder):
    run_ranks("explained_worker", 2, folder, case)
    return find_losses(explain_trace([folder / f"rank{rank}.json" for rank in range(2)]))


@pytest.mark.parametrize("case", _mark({case: case for case, (code, _) in CASES.items() if code}, _ALWAYS))
def test_planted_defect_of_two_processes_is_found_first(case, tmp_path):
    found = _find_in_ranks(case, tmp_path)
    assert found[0].code == CASES[case][0]
    assert case != "late rank" or "of which rank 1 joins last" in found[0].text


@pytest.mark.long
def test_two_clean_processes_have_no_exposed_collectives(tmp_path):
    # Processes that share cores are late by themselves.
    assert not [finding.code for finding in _find_in_ranks("clean", tmp_path) if finding.code != "straggler"]
