"""Requests through a simulated engine: against a slow engine, closed forms, conservation and a measured run."""

import csv
from dataclasses import dataclass, replace
from random import Random

import pytest

from fvflops.serve.simulation.engine_settings import EngineSettings, Speculation, engine_settings
from fvflops.serve.simulation.request_simulation import Disaggregation, LatencyLimits, simulate
from fvflops.serve.simulation.requests import (
    ClosedLoop,
    Lengths,
    Request,
    client_requests,
    poisson_requests,
    read_requests,
)
from tests.support.checkout import ROOT
from tests.support.naive_engine import naive_times


@dataclass(frozen=True)
class LinearStepTimes:
    """Step times of five figures in seconds, for each step, new token of a prompt, cached token and pair of tokens."""

    step: float
    prompt_token: float
    cached_token: float
    mixed_cached_token: float
    attention: float

    def seconds(self, chunks, decoding, cached, all_new=None):
        if not chunks:
            return self.step + self.cached_token * cached
        tokens = sum(new for new, _ in chunks)
        pairs = sum(new * (before + new / 2) for new, before in chunks)
        # One attention kernel for prompts and decoding reads more slowly.
        read = self.mixed_cached_token * cached
        return self.step + self.prompt_token * tokens + self.attention * pairs + read

    def decode_seconds(self, decoding, cached, all_new=None):
        return [tokens * self.cached_token + self.step for tokens in cached]


TIMES = LinearStepTimes(0.010, prompt_token=5e-5, cached_token=1e-7, mixed_cached_token=2e-7, attention=1e-9)
FLAT = LinearStepTimes(0.010, prompt_token=1e-4, cached_token=0, mixed_cached_token=0, attention=0)
LENGTHS = Lengths((20, 900), (1, 120))
SMALL = EngineSettings(pages=200, max_sequences=24, max_batched_tokens=512, prefix_caching=False)


class Observed:
    """Step times that note what the steps are asked to do."""

    def __init__(self, times):
        self.times, self.prompt_tokens, self.decoded, self.largest = times, 0, 0, 0

    def seconds(self, chunks, decoding, cached, all_new):
        new = sum(new for new, _ in chunks)
        self.prompt_tokens += new
        self.decoded += decoding
        self.largest = max(self.largest, new + decoding)
        return self.times.seconds(chunks, decoding, cached)

    def decode_seconds(self, decoding, cached, all_new):
        if len(cached) == 1:
            self.decoded += decoding
        return self.times.decode_seconds(decoding, cached)


def columns(result):
    times = result.requests
    return [list(column) for column in (times.queued, times.scheduled, times.first_token, times.last_token)]


@pytest.mark.parametrize("steps_ahead", [0, 1])
@pytest.mark.parametrize("seed", range(6))
def test_an_engine_equals_one_that_goes_through_every_sequence(seed, steps_ahead):
    random = Random(seed)
    requests = list(poisson_requests(random.choice([2, 8, 50]), 60, LENGTHS, seed=seed))
    tokens, page_size = random.choice([1120, 1920, 6400]), random.choice([1, 16])
    settings = replace(SMALL, pages=tokens // page_size, page_size=page_size, steps_ahead=steps_ahead)
    result = simulate(requests, settings, TIMES)
    rows, preemptions, peak = naive_times(requests, settings, TIMES)
    assert columns(result) == rows
    assert (result.preemptions, result.peak_pages) == (preemptions, peak)


def test_the_comparison_with_the_slow_engine_covers_preemption():
    requests = list(poisson_requests(50, 60, LENGTHS, seed=1))
    assert simulate(requests, replace(SMALL, pages=70), TIMES).preemptions > 5


LOADS = {
    "poisson": lambda: poisson_requests(9, 150, LENGTHS, seed=3),
    "overload": lambda: poisson_requests(200, 150, LENGTHS, seed=4),
    "closed": lambda: ClosedLoop(40, client_requests(150, LENGTHS, seed=5)),
}
ENGINES = {
    "vllm": engine_settings("vllm", 3200, max_sequences=32, max_batched_tokens=512),
    "sglang": engine_settings("sglang", 3200, max_sequences=32, max_batched_tokens=1024),
    "sglang, mixed": engine_settings("sglang", 3200, max_sequences=32, max_batched_tokens=512, mixed=True),
    "trtllm": engine_settings("trtllm", 3200, max_sequences=32, max_batched_tokens=1024),
    "not ahead": replace(SMALL, steps_ahead=0, prefix_caching=True, watermark=0.05),
    "speculative": replace(SMALL, speculation=Speculation(3, 0.6)),
    "replicas": replace(SMALL, replicas=3),
}


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("engine", ENGINES)
def test_runs_of_steps_equal_single_steps(engine, load):
    fast = simulate(LOADS[load](), ENGINES[engine], TIMES)
    slow = simulate(LOADS[load](), ENGINES[engine], TIMES, longest_run=0)
    assert columns(fast) == columns(slow)
    for name in ("steps", "preemptions", "peak_pages", "idle_seconds"):
        assert getattr(fast, name) == getattr(slow, name)
    assert fast.running == pytest.approx(slow.running, rel=1e-9)
    assert fast.preemptions == 0 or engine != "trtllm"


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("engine", ENGINES)
def test_what_goes_in_comes_out(engine, load):
    settings, observed = ENGINES[engine], Observed(TIMES)
    result = simulate(LOADS[load](), settings, observed, longest_run=0)
    times = result.requests
    assert len(times) == 150
    for arrival, queued, scheduled, first, last in zip(times.arrival, *columns(result), strict=True):
        assert arrival <= queued <= scheduled < first <= last
    assert 0 < result.peak_pages <= settings.pages
    assert 0 < result.utilisation <= 1
    if not result.preemptions and settings.replicas == 1 and not settings.speculation:
        assert observed.prompt_tokens == sum(times.input_tokens)
        assert observed.decoded == sum(times.output_tokens) - len(times)
    assert observed.largest <= settings.max_batched_tokens
    most_tokens = settings.max_sequences * settings.replicas * settings.decode_tokens
    assert result.output_tokens_per_second <= most_tokens / TIMES.step


def test_disaggregated_runs_equal_single_steps():
    stage = Disaggregation(2, 3, SMALL, TIMES, 0.01, 1e-6)
    for load in LOADS.values():
        results = [simulate(load(), SMALL, TIMES, disaggregation=stage, longest_run=run) for run in (0, 1024)]
        assert columns(results[0]) == columns(results[1])
        assert len(results[0].requests) == 150


def test_a_static_batch_is_one_prefill_and_equal_decode_steps():
    result = simulate([Request(0.0, 100, 50)] * 8, engine_settings("vllm", 100_000), TIMES)
    prefill = TIMES.seconds([(100, 0)] * 8, 0, 0)
    end = prefill
    for step in range(49):
        end += TIMES.seconds([], 8, 8 * (100 + step))
    assert set(result.requests.first_token) == {prefill}
    assert list(result.requests.last_token) == pytest.approx([end] * 8, rel=1e-12)
    assert result.tpot.p99 == pytest.approx((end - prefill) / 49)
    assert result.utilisation == pytest.approx(1)


def test_littles_law_holds():
    settings = engine_settings("vllm", 200_000, steps_ahead=0)
    result = simulate(poisson_requests(12, 4000, Lengths((100, 900), (20, 200)), seed=1), settings, TIMES)
    times = result.requests
    stay = sum(last - begin for begin, last in zip(times.scheduled, times.last_token, strict=True)) / len(times)
    assert result.preemptions == 0
    assert result.running == pytest.approx(result.requests_per_second * stay, rel=0.01)
    assert result.requests_per_second == pytest.approx(12, rel=0.05)


def test_a_seed_decides_everything():
    settings = replace(SMALL, speculation=Speculation(3, 0.6))
    results = [columns(simulate(LOADS["poisson"](), settings, TIMES, seed=seed)) for seed in (1, 1, 2)]
    assert results[0] == results[1] != results[2]


def test_the_step_after_the_running_one_is_planned_already():
    # The second request arrives in the first step: the next one decodes, and only that after it sees the request.
    requests = [Request(0.0, 100, 10), Request(0.015, 100, 2)]
    ahead = simulate(requests, engine_settings("vllm", 10_000), FLAT).requests
    waits = simulate(requests, engine_settings("vllm", 10_000, steps_ahead=0), FLAT).requests
    assert list(ahead.scheduled) == pytest.approx([0, 0.020])
    assert list(ahead.first_token) == pytest.approx([0.020, 0.050])
    assert list(waits.first_token) == pytest.approx([0.020, 0.040])


def test_engines_order_prompts_and_decoding_differently():
    requests = [Request(0.0, 100, 10), Request(0.0, 3000, 2)]
    first = {}
    for engine in ("vllm", "sglang", "trtllm"):
        settings = engine_settings(engine, 10_000, max_batched_tokens=2048, max_sequences=16)
        first[engine] = list(simulate(requests, settings, FLAT).requests.first_token)
    # The budget splits the long prompt; 1,948 tokens of it go with the first one.
    assert first["vllm"] == pytest.approx([0.01 + 0.2048, 0.02 + 0.2048 + 0.1052])
    assert first["sglang"] == pytest.approx(first["vllm"])
    # Without chunks it waits for a step without another prompt, and then exceeds the budget by itself.
    assert first["trtllm"] == pytest.approx([0.02, 0.02 + 0.01 + 0.3])
    waiting = {}
    for engine in ("vllm", "sglang"):
        settings = engine_settings(engine, 10_000, max_batched_tokens=1024, max_sequences=16)
        times = simulate([Request(0.0, 100, 4), Request(0.0, 4000, 1)], settings, FLAT).requests
        waiting[engine] = times.last_token[0] - times.first_token[0]
    # SGLang decodes nothing while a prompt is in chunks.
    assert waiting["sglang"] > 0.3 + waiting["vllm"] - 0.35 > 0
    assert waiting["sglang"] > waiting["vllm"]


def test_trtllm_admits_only_what_can_finish():
    settings = engine_settings("trtllm", 1024, max_sequences=8, max_batched_tokens=1024)
    result = simulate([Request(0.0, 100, 400)] * 6, settings, FLAT)
    assert result.preemptions == 0
    assert len(set(result.requests.scheduled)) == 3
    assert simulate([Request(0.0, 100, 400)] * 6, replace(settings, reserve_own=0, reserve_running=0), FLAT).preemptions


def test_replicas_wait_for_the_slowest():
    settings = replace(SMALL, replicas=2, max_batched_tokens=2048)
    times = simulate([Request(0.0, 100, 3), Request(0.0, 1000, 3)], settings, FLAT).requests
    assert times.first_token[0] == times.first_token[1] == pytest.approx(0.11)
    assert list(times.last_token) == pytest.approx([0.13, 0.13])


def test_stages_of_a_pipeline_hold_batches_that_do_not_wait_for_each_other():
    """A batch in each stage is as an engine with its part of the sequences and pages."""
    requests = [Request(0.0, 64, 50)] * 8
    settings = replace(SMALL, pages=400, max_sequences=8)
    alone = simulate(requests[:2], replace(settings, pages=100, max_sequences=2), TIMES)
    both = simulate(requests, replace(settings, stages=4), TIMES)
    assert both.seconds == alone.seconds < simulate(requests, settings, TIMES).seconds
    assert both.peak_pages == alone.peak_pages and both.engines == 4
    split = Disaggregation(1, 1, replace(settings, stages=2), TIMES)
    assert simulate(requests, replace(settings, stages=2), TIMES, disaggregation=split).engines == 4


def test_disaggregation_adds_the_transfer_between_first_and_second_token():
    stage = Disaggregation(1, 1, SMALL, FLAT, latency=0.5, seconds_per_token=1e-3)
    result = simulate([Request(0.0, 100, 11), Request(0.0, 100, 1)], SMALL, FLAT, disaggregation=stage)
    assert list(result.requests.first_token) == pytest.approx([0.03, 0.03])
    assert list(result.requests.last_token) == pytest.approx([0.03 + 0.5 + 0.1 + 0.1, 0.03])
    assert result.engines == 2


def test_speculation_yields_what_its_acceptance_promises():
    settings = engine_settings("vllm", 100_000, speculation=Speculation(3, 0.5))
    result = simulate([Request(0.0, 100, 2001)], settings, FLAT)
    assert result.steps - 1 == pytest.approx(2000 / (1 + 0.5 + 0.25 + 0.125), rel=0.05)
    perfect = replace(settings, speculation=Speculation(3, 1.0))
    assert simulate([Request(0.0, 100, 2001)], perfect, FLAT).steps == 501


def test_a_prefix_that_is_cached_is_not_computed():
    request = Request(0.0, 1000, 1, prefix_tokens=400)
    result = simulate([request], engine_settings("vllm", 10_000), FLAT)
    assert result.ttft.mean == pytest.approx(0.01 + 600e-4)


def test_preempted_requests_find_their_pages_again():
    settings = replace(SMALL, pages=70)
    found, lost = (
        simulate(LOADS["overload"](), replace(settings, prefix_caching=caching), TIMES) for caching in (True, False)
    )
    assert found.preemptions and lost.preemptions
    assert found.seconds < lost.seconds


def test_clients_have_one_request_each_at_a_time():
    result = simulate(ClosedLoop(7, client_requests(100, LENGTHS)), SMALL, TIMES)
    times = result.requests
    events = sorted([(time, 1) for time in times.arrival] + [(time, -1) for time in times.last_token])
    present = most = 0
    for _, change in events:
        present += change
        most = max(most, present)
    assert most == 7
    alone = simulate(ClosedLoop(1, [Request(0.0, 100, 11)] * 5), SMALL, FLAT)
    assert alone.seconds == pytest.approx(5 * (0.02 + 10 * 0.01))
    assert alone.steady_tokens_per_second() == pytest.approx(11 / 0.12, rel=0.05)


def test_limits_are_met_where_the_percentiles_meet_them():
    limits = LatencyLimits(ttft=0.5, tpot=0.03, at="p90")
    slow, fast = (
        simulate(poisson_requests(rate, 300, Lengths((500, 900), (50, 90))), engine_settings("vllm", 50_000), TIMES)
        for rate in (60, 2)
    )
    assert limits.are_met(fast)
    assert fast.ttft.p90 <= 0.5 and fast.tpot.p90 <= 0.03
    assert not limits.are_met(slow)
    assert slow.ttft.p90 > 0.5 or slow.tpot.p90 > 0.03


def test_mistakes_are_named(tmp_path):
    with pytest.raises(ValueError, match="needs 63 pages of the cache, which has 10"):
        simulate([Request(0.0, 1000, 1)], replace(SMALL, pages=10), FLAT)
    with pytest.raises(ValueError, match="the load is empty"):
        simulate([], SMALL, FLAT)
    with pytest.raises(ValueError, match="in order of arrival"):
        simulate([Request(1.0, 10, 1), Request(0.0, 10, 1)], SMALL, FLAT)
    with pytest.raises(ValueError, match="did you mean 'sglang'"):
        engine_settings("sg-lang", 1000)
    with pytest.raises(ValueError, match="below the 512"):
        engine_settings("vllm", 1000, max_batched_tokens=256, speculation=Speculation(1, 0.5))
    (tmp_path / "requests.csv").write_text("arrival,input_tokens\n0,1\n")
    with pytest.raises(ValueError, match="no column output_tokens"):
        read_requests(tmp_path / "requests.csv")


def test_requests_are_read_from_a_file(tmp_path):
    file = tmp_path / "requests.csv"
    file.write_text("arrival,input_tokens,output_tokens,prefix_tokens\n0.5,10,2,\n0.25,20,3,16\n")
    assert read_requests(file) == [Request(0.25, 20, 3, 16), Request(0.5, 10, 2)]


def test_first_tokens_of_a_measured_run_are_reproduced():
    # The first 60 of 300 requests through vLLM 0.19.0 on an RTX PRO 6000: Llama-3.1-8B in bf16, 128 sequences and 2,048
    # tokens a step at most, from the examples of LLMServingSim (MIT). The step times are fitted to the first half.
    with open(ROOT / "tests/data/serving/llama_8b_requests.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    requests = [Request(float(row["queued_s"]), int(row["input_tokens"]), int(row["output_tokens"])) for row in rows]
    times = LinearStepTimes(0.01276, 3.85e-5, 1.028e-7, 1.501e-7, 6.2e-10)
    result = simulate(requests, engine_settings("vllm", 500_000, max_sequences=128), times)
    measured = [float(row["first_token_s"]) - float(row["queued_s"]) for row in rows]
    queued, _, first_token, _ = columns(result)
    simulated = [first - time for first, time in zip(first_token, queued, strict=True)]
    # The first request runs on a cold device.
    ratios = [ttft / real for ttft, real in zip(simulated, measured, strict=True)][1:]
    assert sorted(abs(ratio - 1) for ratio in ratios)[len(ratios) // 2] < 0.05
    assert sum(abs(ratio - 1) for ratio in ratios) / len(ratios) < 0.10
