"""Memory that users published: the prediction of some is near, and runs under ZeRO-1 did or did not fit a GPU."""

import math
from dataclasses import replace

import pytest
import torch

from fvflops import plan_rank
from fvflops.zoo import build
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


LARGER_LORA = pytest.param(12, 0.01, marks=pytest.mark.long)  # 9 has a smaller model


@pytest.mark.parametrize(("number", "error"), [(1, 0.002), (8, 0.05), (9, 0.02), (11, 0.02), (15, 0.02), LARGER_LORA])
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


layouts = load_tool("training_runs.layout_memory")


@pytest.fixture(scope="module")
def rows():
    return layouts.read_layouts()


def test_layouts_ran_or_did_not_fit(rows):
    assert (len(rows), sum(not layouts.has_run(row) for row in rows)) == (371, 220)


def test_zero_1_divides_the_optimizer_and_nothing_else():
    tokens = torch.ones(1, 16, dtype=torch.int64)
    model = build("llama_tiny", device="meta")
    timeline = plan_rank(model, tokens, mesh={"dp": 1}, optimizer=torch.optim.AdamW).memory(granularity=1)
    whole, divided = timeline.at_peak(), layouts.shard_optimizer(timeline, 4)
    last = len(timeline.trace.events) - 1
    before, after = timeline.at(last).by_kind, divided.at(last).by_kind
    assert after["gradient"] == before["gradient"] > 0
    assert after["parameter"] == before["parameter"] > 0
    assert after["optimizer state"] == pytest.approx(before["optimizer state"] / 4, rel=1e-3)
    assert divided.peak < whole.nbytes


def test_the_best_layout_of_13b_on_32_gpus_fits_and_twice_its_batch_does_not(rows):
    group = [row for row in rows if (row.name, row.sequence, row.gpus) == ("llama-13B", 2048, 32)]
    best = min(group, key=lambda row: row.seconds)
    (fits,) = layouts.judge_layouts([best])
    (larger,) = layouts.judge_layouts([replace(best, micro_batch=2, microbatches=32, seconds=math.inf)])
    assert (fits.fits, fits.is_right, larger.fits, larger.is_right) == (True, True, False, True)
    text = layouts.describe_verdicts([fits, larger._replace(fits=True)])
    assert "llama-13B" in text and "50.0%" in text and "refused: none" in text
    assert "micro batch 1, tp 1" in layouts.describe_verdicts([fits._replace(fits=False)]).partition("refused")[2]
