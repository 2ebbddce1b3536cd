"""tools/training_runs/layout_memory.py: runs under ZeRO-1 that did or did not fit a GPU."""

import math
from dataclasses import replace

import pytest
import torch

from fvflops import plan_rank
from fvflops.zoo import build
from tests.support.tools import load_tool

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
