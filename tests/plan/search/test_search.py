"""Searches for layouts: bounds that hold, the same answer as planning every layout, and figures of plans."""

import dataclasses
import itertools
import json
import math
import subprocess
import sys

import pytest
import torch
from torch import nn

from fvflops import estimate_step, find_device, plan_step
from fvflops.plan.memory.cuda_allocator import reserved_memory
from fvflops.plan.plan_options import PlanError, PlanOptions
from fvflops.plan.search import layout_search
from fvflops.plan.search.candidates import Candidate, LayoutResult, Space
from fvflops.plan.search.evaluate import MicrobatchCost, Workload, least_seconds, resize_inputs
from fvflops.plan.search.layout_search import ADAMW, needs_more, search_layouts
from fvflops.plan.step_time.calibration import PEAK, Timing, resolve_timing
from fvflops.zoo import build
from tests.support.checkout import ROOT

TOKENS = torch.ones(1, 32, dtype=torch.int64)
# torch's allocator reserves 2 MB at least: only the memory of long sequences differs.
LONG = torch.ones(1, 4096, dtype=torch.int64)
H100 = find_device("H100")
FEW = {"tp": [1, 2], "pp": [1, 2], "dp": [1], "micro-batch": [1, 2], "checkpoint": ["none"]}
SMALL = {"tp": [1], "pp": [1, 2], "dp": [1], "micro-batch": [1], "checkpoint": ["none", "full"]}
OPTIONS = {"gpus": 4, "global_batch": 8, "precision": "bf16-mixed", "choices": FEW}


def search(device=H100, tokens=TOKENS, **options):
    return search_layouts(build("llama_tiny", device="meta"), tokens, device=device, **{**OPTIONS, **options})


@pytest.fixture(scope="module")
def exhaustive():
    return search(best=10_000)


@pytest.fixture(scope="module")
def small():
    """A search of few layouts, with and without checkpointing."""
    return search(tokens=LONG, choices=SMALL, best=10_000)


def test_every_candidate_divides_the_gpus_and_the_batch():
    candidates = Space(48, 8, 96, layers=12).list_candidates()
    assert len(candidates) == len({str(dataclasses.asdict(candidate)) for candidate in candidates}) > 100
    for candidate in candidates:
        assert math.prod(candidate.mesh.values()) == 48
        replicas = candidate.size("dp") * candidate.size("fsdp")
        assert replicas * candidate.micro_batch * candidate.microbatches == 96
        assert candidate.size("pp") * candidate.stages_per_rank <= 12 or candidate.size("pp") == 1
        assert candidate.size("tp") <= 8
    # All samples of a replica may be one microbatch: a small model is fastest so.
    assert {c.micro_batch for c in candidates if c.mesh == {"fsdp": 48}} == {1, 2}
    assert {c.micro_batch for c in candidates if c.mesh == {"fsdp": 6, "tp": 8}} == {1, 2, 4, 8, 16}


def test_no_layout_is_faster_or_smaller_than_its_bounds(exhaustive):
    assert len(exhaustive.fitting()) == len(exhaustive.results) > 10
    for result in exhaustive.results:
        assert 0 < result.least_seconds <= result.seconds, result
        assert 0 < result.least_peak <= result.peak, result


def test_the_bounds_hold_for_fused_modules(small):
    few = {**SMALL, "pp": [1], "checkpoint": ["none"]}
    fused = search(tokens=LONG, choices=few, best=10_000, fused=["fvflops.zoo.llama.Block"])
    assert all(result.least_seconds <= result.seconds for result in fused.results)
    plain = {repr(result.candidate): result.least_seconds for result in small.results}
    assert all(result.least_seconds < plain[repr(result.candidate)] for result in fused.results)


def test_the_bounds_hold_for_replicas_that_reduce_buckets():
    few = {**SMALL, "dp": [2, 4], "checkpoint": ["none"]}
    beside, after = (search(choices=few, best=10_000, bucket_cap_mb=cap) for cap in (0.02, 0))
    assert all(0 < item.least_seconds <= item.seconds for item in (*beside.results, *after.results))
    seconds = {repr(item.candidate): item.seconds for item in after.results}
    changed = [item.candidate.mesh for item in beside.results if item.seconds != seconds[repr(item.candidate)]]
    assert {"dp": 4} in changed and {"pp": 2, "dp": 2} in changed
    assert not any("fsdp" in mesh for mesh in changed)
    assert "DDP reduces buckets of 0.02 MiB during the backward pass" in " ".join(str(beside).split())


def test_the_best_are_those_of_planning_every_layout(exhaustive):
    found = search(best=3)
    assert [item.candidate for item in found.best()] == [item.candidate for item in exhaustive.best(3)]
    assert [item.seconds for item in found.best()] == [item.seconds for item in exhaustive.best(3)]
    limit = found.best()[-1].seconds
    slower = [item for item in found.results if item.status == "slower"]
    assert slower and all((item.seconds or item.least_seconds) >= limit for item in slower)


def test_few_recordings_suffice_to_find_the_best_of_many_layouts(monkeypatch):
    recorded, planned = [], []
    costs = {"none": 1.0, "selective": 1.1, "full": 1.3}

    def measure(self, layout):
        recorded.append(layout)
        tp, size = layout.size("tp"), layout.micro_batch
        seconds = costs[layout.checkpoint] * (0.01 + size * (1 + 0.1 * tp) / tp)
        return MicrobatchCost(
            *(seconds, 0.0, seconds / 2, 0.0),
            gathered=0,
            reduced=0,
            states=10**9,
            optimizer=0,
            kept=1.0,
            moments=((10**9, 0, 0),),
        )

    def plan(self, candidate, limit=None):
        planned.append(candidate)
        seconds = 1.01 * least_seconds(candidate, measure(self, candidate), self.layers, self.timing)
        recorded.pop()
        return LayoutResult(candidate=candidate, status="fits", seconds=seconds, peak=1)

    monkeypatch.setattr(Workload, "measure", measure)
    monkeypatch.setattr(Workload, "evaluate", plan)
    found = search(gpus=64, global_batch=1024, choices={}, best=5)
    workload = found_workload()
    times = sorted(plan(workload, item.candidate).seconds for item in found.results)
    assert [item.seconds for item in found.best()] == times[:5]
    ways = {repr(item.candidate.measured_on(64)) for item in found.results}
    assert len(recorded) < len(ways) / 3 and len(found.results) > 500 > 10 * (len(planned) - len(found.results))


def found_workload():
    timing = resolve_timing(H100, None, None, 64, fused=(), bucket_cap_mb=None)
    return Workload(build("llama_tiny", device="meta"), ((TOKENS,), {}), PlanOptions(mesh={}), timing)


def test_the_times_of_a_larger_microbatch_are_bounded_by_smaller_ones():
    workload = Workload(
        build("llama_tiny", device="meta"),
        ((LONG,), {}),
        PlanOptions(mesh={}, optimizer=ADAMW, device="cuda"),
        found_workload().timing,
    )
    one, two, eight = (workload.measure(Candidate({"fsdp": 4}, size, 1)) for size in (1, 2, 8))
    bound = two.extrapolate(one, 1, 2, 8)
    for name in ("seconds", "first", "layer", "last"):
        assert getattr(two, name) < getattr(bound, name) <= getattr(eight, name), name


def test_the_figures_are_those_of_a_plan_of_the_layout(exhaustive):
    result = next(
        item for item in exhaustive.results if item.candidate.schedule == "interleaved" or item.candidate.schedule
    )
    tokens = torch.ones(result.candidate.micro_batch, TOKENS.shape[1], dtype=torch.int64)
    step = plan_step(
        build("llama_tiny", device="meta"),
        tokens,
        optimizer=ADAMW,
        precision="bf16-mixed",
        device="cuda",
        **result.candidate.plan_options(),
    )
    estimate = estimate_step(step, device=H100)
    assert (result.seconds, result.mfu, result.bubble_share) == (estimate.seconds, estimate.mfu, estimate.bubble_share)
    reserved = (reserved_memory(plan.memory(), expandable_segments=True) for plan in step.ranks)
    assert result.peak == max(item.peak for item in reserved)


def test_what_does_not_fit_has_a_reason_that_planning_it_confirms(small):
    needs = {repr(item.candidate): item.peak + H100.reserve(item.candidate.mesh) for item in small.results}
    memory = sorted(needs.values())[1]
    found = search(dataclasses.replace(H100, memory=memory), LONG, choices=SMALL, best=10_000)
    without = [item for item in found.results if item.status == "does not fit"]
    assert len(without) == sum(needed > memory for needed in needs.values()) > 2
    assert all(needs[repr(item.candidate)] > memory and " of " in item.reason for item in without)
    assert not search(dataclasses.replace(H100, memory=1000), choices=SMALL).best()


def test_larger_microbatches_and_fewer_recomputed_activations_need_more_memory(exhaustive, small):
    for results in (exhaustive.results, small.results):
        pairs = [
            (larger, smaller)
            for larger, smaller in itertools.permutations(results, 2)
            if needs_more(larger.candidate, smaller.candidate)
        ]
        assert pairs and all(larger.peak >= smaller.peak for larger, smaller in pairs)


PROCESSES = """
import json, torch
from tests.plan.search.test_search import LONG, SMALL, search
found = search(tokens=LONG, choices={**SMALL, "pp": [1], "checkpoint": ["none"]}, jobs=2, best=10_000)
print(json.dumps([[repr(item.candidate), item.seconds, item.peak] for item in found.results]))
"""


def test_processes_find_the_same(small):
    """In a program of their own: of one whose autograd has threads no fork can run a backward pass."""
    command = [sys.executable, "-c", PROCESSES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert len(found := json.loads(done.stdout)) > 1
    expected = [[repr(item.candidate), item.seconds, item.peak] for item in small.results]
    assert all(result in expected for result in found)


def cannot_differentiate():
    return False


def test_where_forks_cannot_differentiate_one_process_searches(small, monkeypatch):
    monkeypatch.setattr(layout_search, "_can_differentiate", cannot_differentiate)
    few = {**SMALL, "pp": [1], "checkpoint": ["none"]}
    with pytest.warns(UserWarning, match="the search runs in one process, not in 2"):
        found = search(choices=few, jobs=2)
    assert found.best()[0].candidate in [item.candidate for item in small.results]


def test_the_pareto_front_has_what_nothing_beats(exhaustive):
    front = exhaustive.pareto_front()
    assert len(front) > 1
    for result in exhaustive.results:
        smaller = [item for item in exhaustive.results if item.seconds <= result.seconds and item.peak < result.peak]
        assert any(item.seconds <= result.seconds and item.peak <= result.peak for item in front)
        assert not (smaller and result in front)


def test_a_layout_that_the_model_cannot_have_is_named_with_its_reason():
    found = search(gpus=8, choices={**FEW, "tp": [2, 8], "pp": [1], "micro-batch": [1]})
    failed = [item for item in found.results if item.status == "failed"]
    assert failed and all("tp=8 must divide the numbers of heads" in item.reason for item in failed)
    assert found.best()


def test_experts_and_sequences_are_divided_where_asked_for():
    found = search_layouts(
        build("mixtral_tiny", device="meta"),
        TOKENS,
        device=H100,
        gpus=4,
        global_batch=4,
        choices={"tp": [1], "pp": [1], "dp": [1], "ep": [1, 2], "micro-batch": [1], "checkpoint": ["none"]},
    )
    assert {item.candidate.size("ep") for item in found.fitting()} == {1, 2}
    assert [tensor.shape for tensor in resize_inputs((TOKENS, TOKENS), batch=3, ranks=2)] == [(3, 16), (3, 16)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"best": 0}, "best must be an integer >= 1, not 0"),
        ({"jobs": -1}, "jobs must be an integer >= 1, not -1"),
        ({"gpus": 0}, "gpus must be at least 1; got 0"),
        ({"global_batch": 3, "choices": {"tp": [1], "pp": [1]}}, "no layout has a global batch of 3 on 4 GPUs"),
        ({"choices": {"pq": [1]}}, r"no choice 'pq'.*a search chooses tp, pp"),
        ({"choices": {"tp": ["two"]}}, r"tp must be some numbers of at least 1; got \['two'\]"),
        ({"choices": {"schedule": ["2f2b"]}}, "no schedule '2f2b'"),
        ({"choices": {**FEW, "checkpoint": ["some"]}}, "no layout can be planned.*no checkpoint policy 'some'"),
        ({"choices": {**FEW, "cp": [5]}, "gpus": 5, "global_batch": 5}, "cp=5 must divide the sequence of 32 tokens"),
    ],
)
def test_wrong_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        search(**options)


def test_inputs_without_a_common_batch_are_an_error():
    with pytest.raises(PlanError, match=r"the first dimension of all inputs; got \(1, 32\), \(2, 4\)"):
        resize_inputs((TOKENS, torch.ones(2, 4)), batch=2)


def test_a_model_without_known_stages_has_no_pipeline():
    workload = Workload(nn.Linear(4, 4), ((), {}), PlanOptions(mesh={}), Timing(H100, None, PEAK))
    assert (workload.blocks, workload.layers) == ("", 0)
