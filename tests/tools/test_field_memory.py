"""Memory that users published: each row has a case, and the prediction of some is near."""

from dataclasses import replace

import pytest

from tests.support.schemas.torchvision_schemas import define_torchvision_schemas
from tests.support.tools import load_tool

field = load_tool("training_runs.field_memory")


def test_each_row_has_a_case():
    rows = field.read_rows()
    assert len(rows) == len(field.CASES) == 20
    for row, case in zip(rows, field.CASES, strict=True):
        assert (row["unit"] in ("fits", "GB at least")) == (case.quantity == "fits")
        assert (case.other is not None) == ("saved" in row["unit"])


@pytest.mark.parametrize(("number", "error"), [(1, 0.002), (8, 0.05), (11, 0.02), (12, 0.01), (15, 0.02)])
def test_predictions_are_near(number, error):
    for package in ("transformers", "peft"):
        pytest.importorskip(package)
    define_torchvision_schemas()
    found = field.compare(field.read_rows()[number - 1], field.CASES[number - 1])
    assert abs(found.error) < error
    table = field.write_table(iter([found]))
    assert "1 of 1 rows are within 5 %; 0 of 0 verdicts are right." in table


def test_a_run_out_of_memory_is_said_not_to_fit_and_a_shorter_one_to_fit():
    for package in ("transformers", "peft"):
        pytest.importorskip(package)
    define_torchvision_schemas()
    row, case = field.read_rows()[9], field.CASES[9]
    for length, fits in ((4096, 0.0), (3072, 1.0)):  # batch 2 of 4K tokens ran out of memory, of 3K it ran
        found = field.compare(row, replace(case, tokens=(2, length)))
        assert "1 of 1 verdicts are right" in field.write_table(iter([found._replace(published=fits)]))


def test_a_verdict_is_judged_with_the_reserve():
    row, case = field.read_rows()[-1], field.CASES[-1]
    for needed, right in ((80e9, 1), (85e9, 0)):
        assert f"{right} of 1 verdicts" in field.write_table(iter([field.Compared(row, case, needed, 1.0)]))
