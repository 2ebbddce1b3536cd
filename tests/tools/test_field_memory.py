"""Memory that users published: the prediction of some is near."""

from dataclasses import replace

import pytest

from tests.support.schemas.torchvision_schemas import define_torchvision_schemas
from tests.support.tools import load_tool

field = load_tool("training_runs.field_memory")
CASES = field.read_cases()


@pytest.fixture
def libraries():
    for package in ("transformers", "peft"):
        pytest.importorskip(package)
    define_torchvision_schemas()


def test_each_run_has_a_size_or_a_verdict():
    assert len(CASES) == 20
    for case in CASES:
        assert (case.gb is None) == (case.fits is not None) == bool(case.device)
        assert bool(case.other) == (case.quantity == "saved")


@pytest.mark.parametrize(("number", "error"), [(1, 0.002), (8, 0.05), (11, 0.02), (12, 0.01), (15, 0.02)])
def test_predictions_are_near(number, error, libraries):
    found = field.compare(CASES[number - 1])
    assert abs(found.error) < error
    assert "1 of 1 rows are within 5 %; 0 of 0 verdicts are right." in field.write_table([found])


def test_a_run_out_of_memory_is_said_not_to_fit_and_a_shorter_one_to_fit(libraries):
    for length, fits in ((4096, False), (3072, True)):  # batch 2 of 4K tokens ran out of memory, of 3K it ran
        found = field.compare(replace(CASES[9], tokens=(2, length)))
        assert found.fits == fits
        assert f"{int(not fits)} of 1 verdicts are right" in field.write_table([found])


def test_a_verdict_is_judged_with_the_reserve():
    for needed, right in ((80, 1), (85, 0)):
        assert f"{right} of 1 verdicts" in field.write_table([field.Compared(CASES[-1], needed)])
