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
    return layouts.read_layouts(layouts.FOLDER / "layout_study_a100.csv")


def test_rows_without_the_kernel_are_no_verdicts(rows):
    assert (len(rows), sum(not row.ran for row in rows)) == (371, 220)
    assert all(row.microbatches >= 1 for row in rows)
    runs = [row.run for row in rows]
    assert all(run.replicas * run.mesh.get("tp", 1) * run.mesh.get("pp", 1) == run.gpus for run in runs)
    assert all(sum(run.stage_layers) == run.config.layers for run in runs if run.stage_layers)


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
    best = min((row for row in rows if row.group == ("llama-13B", 2048, 32)), key=lambda row: row.run.value)
    (fits,) = layouts.judge_layouts([best])
    larger_run = replace(best.run, micro_batch=2, value=math.inf)
    (larger,) = layouts.judge_layouts([best._replace(run=larger_run)])
    assert (fits.fits, fits.is_right, larger.fits, larger.is_right) == (True, True, False, True)
    text = layouts.describe_verdicts([fits, larger._replace(fits=True)])
    assert "llama-13B" in text and "50.0%" in text and "refused: none" in text
    assert "micro batch 1, tp 1" in layouts.describe_verdicts([fits._replace(fits=False)]).partition("refused")[2]


def test_trials_are_read_with_their_layout():
    trials = layouts.read_trials(layouts.FOLDER / "measured_runs.csv")
    assert len(trials) == 14
    assert {trial.tp * trial.pp * trial.replicas for trial in trials} == {384}
    assert trials[0].config.padded_vocab_size % (128 * trials[0].tp) == 0
