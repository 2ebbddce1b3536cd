"""Measured training runs: what they share, how far estimates are off, and that a fit finds what it is fitted to."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from fvflops import find_efficiency
from fvflops.devices.kernel_models.figures import find_figures
from fvflops.zoo import megatron_gpt
from tests.support.tools import load_tool

prepared = load_tool("training_runs.prepared")
fitting = load_tool("training_runs.fitting")
Batch, device_of = (getattr(load_tool("training_runs.batch"), name) for name in ("Batch", "device_of"))
read_runs = load_tool("training_runs.rows").read_runs
predict_shipped = fitting.predict_shipped
NODE = "vTrain single node"


DEVICE = "A100 SXM 80GB"
EXPECTED = {name: item.expected for name, item in fitting.PARAMETERS.items()}


def small_mpts():
    """Return three models of two layers."""
    names = ("mpt 350m", "mpt 1b", "mpt 3b")
    return [prepared.prepare(small("MPT", name=name, device=DEVICE), {}) for name in names]


def small(source, **wanted):
    """Return the first run with these fields, with two layers for each stage."""
    wanted["source"] = source
    run = next(run for run in read_runs() if all(getattr(run, name) == value for name, value in wanted.items()))
    return replace(run, config=replace(run.config, layers=2 * run.mesh.get("pp", 1)))


@pytest.mark.parametrize("mesh", [{"dp": 4}, {"pp": 2, "dp": 2, "tp": 2}], ids=str)
def test_runs_that_share_a_plan_have_the_time_of_their_own(mesh, monkeypatch):
    run = small(NODE, mesh=mesh)
    run = replace(run, microbatches=5)
    shared = prepared.prepare(run, {})
    monkeypatch.setattr(prepared, "_recorded", lambda run: run)
    own = prepared.prepare(run, {})
    assert shared.step.ranks[0] != () and len(shared.step.programs) <= len(own.step.programs)
    assert predict_shipped(shared) == pytest.approx(predict_shipped(own), rel=1e-9)


def test_estimates_of_whole_runs_are_near_what_was_measured():
    gpt = next(run for run in read_runs() if run.mesh == {"pp": 2, "dp": 2, "tp": 2})
    mpt = next(run for run in read_runs() if run.name == "mpt 350m")
    for run in (gpt, mpt):
        item = prepared.prepare(run, {})
        assert predict_shipped(item) == pytest.approx(run.seconds, rel=0.15)


def test_a_fit_finds_the_figures_that_made_the_times():
    items = small_mpts()
    (seconds,) = Batch(items).predict([fitting.point_of({**EXPECTED, "matmul": 0.7, "bandwidth": 0.9})])
    timed = Batch(
        [replace(item, run=replace(item.run, seconds=value)) for item, value in zip(items, seconds, strict=True)]
    )
    found = fitting.fit(timed)
    after, before = timed.predict([fitting.point_of(found), fitting.point_of(EXPECTED)]) / seconds - 1
    assert abs(after).max() < 0.04 < abs(before).max()


def test_a_batch_takes_as_long_as_the_package_simulates():
    gpt = small(NODE, mesh={"pp": 2, "dp": 2, "tp": 2})
    interleaved = replace(gpt, virtual_stages=2, microbatches=4)
    mpt = small("MPT", name="mpt 1b")
    # With several microbatches FSDP2 adds gradients on the stream of their reduction.
    accumulated = replace(mpt, memory_bandwidth=1e12, microbatches=3)
    runs = [gpt, interleaved, accumulated, small(NODE, mesh={"tp": 8})]
    items = [prepared.prepare(replace(run, device=DEVICE), {}) for run in runs]
    # The host or the device is late.
    points = [fitting.point_of({**EXPECTED, "launch": launch}) for launch in (1e-6, 3e-4)]
    expected = [
        [
            fitting.predict_seconds(
                item,
                replace(efficiency, kernels=find_figures(device_of(item.run))),
                network(device_of(item.run), item.run.gpus_per_node, item.run.node_gbps),
            )
            for item in items
        ]
        for efficiency, network in points
    ]
    assert Batch(items).predict(points) == pytest.approx(np.array(expected), rel=1e-9)


def test_a_source_is_predicted_by_a_fit_that_has_not_seen_it(monkeypatch):
    pairs = zip(small_mpts(), ["A 1", "A 2", "B"], strict=True)
    items = [replace(item, run=replace(item.run, source=source)) for item, source in pairs]
    fits = []

    def fit(batch, chosen):
        fits.append(chosen)
        return {**EXPECTED, "step": 1000.0 * len(fits)}

    monkeypatch.setattr(fitting, "fit", fit)
    predicted = fitting.hold_out(Batch(items))
    # Each run has the time of the fit to the others, between whose steps are thousands of seconds.
    assert fits == [[2], [0, 1]] and (predicted // 1000).tolist() == [1, 1, 2]
    assert np.isnan(fitting.hold_out(Batch(items[:2]))).all()


def test_a_skipped_step_copies_and_unscales_gradients():
    item = prepared.prepare(small(NODE, mesh={"pp": 2, "dp": 2, "tp": 2}), {})
    (program,) = {index for action, index in item.step.ranks[0] if action.kind == "optimizer"}
    (run,) = item.step.programs[program].items
    known = item.step.programs[program].launches
    nbytes = Counter()
    for index in run.items:
        nbytes[known[index].op] += known[index].kernel.nbytes
    copied, unscaled = nbytes["aten::_to_copy"], nbytes["aten::_foreach_mul_"]
    # 2 bytes are read and 4 written of each gradient, then 4 read and 4 written; and a scale is read.
    assert 0 < copied * 8 == (unscaled - 4) * 6
    assert sum(nbytes.values()) < 1.001 * (copied + unscaled) and item.host_waits


def test_a_softmax_without_a_kernel_takes_longer():
    run = small(NODE, mesh={"tp": 8}, micro_batch=1)
    assert not megatron_gpt.has_softmax_kernel(run.sequence, run.micro_batch * run.config.heads // 8)
    slow, fast = (prepared.prepare(replace(run, micro_batch=size, microbatches=2), {}) for size in (run.micro_batch, 2))
    efficiency = find_efficiency(run.device)
    seconds = [fitting.predict_seconds(item, efficiency, fitting.shipped_network(item.run)) for item in (slow, fast)]
    assert seconds[0] > seconds[1]  # although it has half of the tokens
