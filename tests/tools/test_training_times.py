"""Measured training runs: what they share, how far estimates are off, and that a fit finds what it is fitted to."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fvflops import find_efficiency
from fvflops.zoo import megatron_gpt
from tests.support.tools import load_tool

prepared = load_tool("training_runs.prepared")
fitting = load_tool("training_runs.fitting")
read_runs = load_tool("training_runs.rows").read_runs
shipped = fitting.shipped
NODE = "single node"


def small(dataset, **wanted):
    """Return the first run with these fields, with three layers for each stage."""
    run = next(run for run in read_runs(dataset) if all(getattr(run, name) == value for name, value in wanted.items()))
    return replace(run, config=replace(run.config, layers=3 * run.mesh.get("pp", 1)))


@pytest.mark.parametrize("mesh", [{"dp": 4}, {"pp": 2, "dp": 2, "tp": 2}], ids=str)
def test_runs_that_share_a_plan_have_the_time_of_their_own(mesh, monkeypatch):
    run = small(NODE, mesh=mesh)
    run = replace(run, local_batch=5 * run.micro_batch)
    shared = prepared.prepare(run, {})
    monkeypatch.setattr(prepared, "_recorded", lambda run: run)
    own = prepared.prepare(run, {})
    assert shared.step.ranks[0] != () and len(shared.step.programs) <= len(own.step.programs)
    assert shipped(shared).predict([shared])[0] == pytest.approx(shipped(own).predict([own])[0], rel=1e-9)


def test_estimates_of_whole_runs_are_near_what_was_measured():
    gpt = next(run for run in read_runs(NODE) if run.mesh == {"pp": 2, "dp": 2, "tp": 2})
    mpt = next(run for run in read_runs("mpt") if run.name == "mpt 350m")
    for run in (gpt, mpt):
        item = prepared.prepare(run, {})
        assert shipped(item).predict([item])[0] == pytest.approx(run.step_seconds, rel=0.15)


def test_a_fit_finds_the_figures_that_made_the_times():
    items = [
        prepared.prepare(small("mpt", name=name, device="A100 SXM 80GB"), {})
        for name in ("mpt 350m", "mpt 1b", "mpt 3b")
    ]
    values = {name: item.expected for name, item in {**fitting.DEVICE, **fitting.NETWORK}.items()}
    made = fitting.Fit("A100 SXM 80GB", {**values, "matmul": 0.7, "bandwidth": 0.9})
    timed = [
        replace(item, run=replace(item.run, device=made.device, quantity="step seconds", value=seconds))
        for item, seconds in zip(items, made.predict(items), strict=True)
    ]
    found = fitting.fit(made.device, timed)
    errors = found.predict(timed) / np.array([item.run.step_seconds for item in timed]) - 1
    before = fitting.Fit(made.device, values).predict(timed) / made.predict(timed) - 1
    assert abs(errors).max() < 0.04 < abs(before).max()


def test_a_softmax_without_a_kernel_takes_longer():
    run = small(NODE, mesh={"tp": 8}, micro_batch=1)
    assert not megatron_gpt.has_softmax_kernel(run.sequence, run.micro_batch * run.config.heads // 8)
    slow, fast = (
        prepared.prepare(replace(run, micro_batch=size, local_batch=2 * size), {}) for size in (run.micro_batch, 2)
    )
    efficiency = find_efficiency(run.device)
    seconds = [fitting.predict_seconds(item, efficiency, shipped(item).network) for item in (slow, fast)]
    assert seconds[0] > seconds[1]  # although it has half of the tokens
