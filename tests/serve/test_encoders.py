"""Serving of models with an encoder and a decoder: work, bounds, memory, simulated requests and bad input."""

from dataclasses import replace

import pytest

from fvflops import find_device
from fvflops.plan.step_time.calibration import assume_network
from fvflops.serve.engine_kernels import EngineKernels
from fvflops.serve.engine_step import EngineStep
from fvflops.serve.record_serving import record_serving
from fvflops.serve.serve_model import ServingLoad, serve_model
from fvflops.serve.serve_report import launch_command
from fvflops.serve.serving_layout import ServingLayout
from fvflops.serve.serving_model import ServingError
from fvflops.serve.serving_search import search_serving
from fvflops.serve.simulation.requests import Request
from tests.support.serving.language_models import build
from tests.support.serving.model_macs import count_macs

H100 = find_device("H100")
KERNELS = EngineKernels.of(H100, assume_network(H100))
LOAD = ServingLoad(input_tokens=600, output_tokens=100)


@pytest.fixture(scope="module", params=["BartForConditionalGeneration", "T5ForConditionalGeneration"])
def model(request):
    return record_serving(build(request.param), request.param)


@pytest.fixture(scope="module")
def whisper():
    return record_serving(build("WhisperForConditionalGeneration"), "whisper")


def test_a_request_is_an_encoder_and_tokens_of_a_decoder(model):
    """The multiply-adds of the model equal recorded ones: tests/serve/test_serving_flops.py."""
    steps = EngineStep(model, ServingLayout(), KERNELS, encoded=40)
    assert steps.macs(steps.work([(40, 0)])) == model.encoder_macs(40) + count_macs(model, 1, 0, 40)
    assert steps.macs(steps.work((), 3, 3 * (40 + 7))) == 3 * count_macs(model, 1, 7, 40)


def test_bounds_are_work_and_bytes(model):
    """A long prompt takes its multiply-adds at the peak, a token alone weights and cache at the bandwidth."""
    steps = EngineStep(model, ServingLayout(), KERNELS.bound(), encoded=100_000)
    encoder = steps.by_class(steps.work([(100_000, 0)]))["encoder"]
    assert encoder == pytest.approx(2 * model.encoder_macs(100_000) / H100.peak("bf16"), rel=1e-3)
    shared = 2 * sum(count * layer.token for layer, count in _count(model.cache, "cross attention"))
    own = 2 * sum(count * layer.token for layer, count in _count(model.cache, "full"))
    weights = 2 * sum(count * item.elements for item, count in model.projections.items())
    moved = weights + 100_000 * shared + 51 * own
    assert steps.seconds([], 1, 100_050) == pytest.approx(moved / H100.bandwidth, rel=1e-6)


def _count(layers, kind):
    return [(layer, 1) for layer in layers if layer.kind == kind]


def test_estimates_exceed_their_bounds_and_grow(model):
    found = [serve_model(model, device=H100, load=replace(LOAD, input_tokens=tokens)) for tokens in (600, 6000, 60_000)]
    for estimate in found:
        assert all(phase.seconds > phase.bound_seconds for phase in (estimate.prefill, *estimate.decode))
        assert estimate.prefill.weight_bytes > estimate.decode[0].weight_bytes
    for phases in ([item.prefill for item in found], [item.decode[0] for item in found]):
        assert [phase.seconds for phase in phases] == sorted(phase.seconds for phase in phases)


def test_ranks_divide_the_encoder(model):
    one, two = (EngineStep(model, ServingLayout(tensor=ranks), KERNELS.bound(), encoded=500) for ranks in (1, 2))
    times = [steps.by_class(steps.work([(50_000, 0)])) for steps in (one, two)]
    assert times[1]["encoder"] < times[0]["encoder"]
    with pytest.raises(ServingError, match="tensor parallelism of 3 must divide"):
        serve_model(model, device=H100, layout=ServingLayout(tensor=3))


def test_cache_holds_the_prompt_in_cross_attention_and_the_output_in_the_decoder(model):
    memory = serve_model(model, device=H100, load=LOAD).memory
    expected = sum(
        2 * layer.token * (LOAD.input_tokens if layer.kind == "cross attention" else LOAD.output_tokens)
        for layer in model.cache
    )
    assert memory.sequence == expected


def test_simulated_requests_take_an_encoder_each(model):
    """A request alone takes its first token's step and one for each further token."""
    requests = (Request(0.0, 600, 5), Request(100.0, 600, 5))
    estimate = serve_model(model, device=H100, load=ServingLoad(requests=requests))
    assert estimate.settings.chunked_prefill is False
    assert estimate.requests.ttft.mean == pytest.approx(estimate.prefill.seconds, rel=1e-6)
    long = tuple(Request(0.0, tokens, 5) for tokens in (4000, 6000))
    estimate = serve_model(model, device=H100, load=ServingLoad(requests=long))
    own = 2 * sum(layer.token for layer in model.cache if layer.kind != "cross attention")
    shared = 2 * sum(layer.token for layer in model.cache if layer.kind == "cross attention")
    assert estimate.memory.sequence == 5000 * shared + estimate.load.output_tokens * own
    assert len(search_serving(model, device=H100, gpus=1, load=LOAD, precisions=[("bf16", "bf16")]).best()) == 1


def test_whisper_reads_the_same_length_of_any_request(whisper):
    estimate = serve_model(whisper, device=H100, load=ServingLoad(output_tokens=50, concurrency=2))
    assert estimate.load.input_tokens == estimate.prefill.context == whisper.encoded > 0
    assert set(estimate.requests.requests.input_tokens) == {whisper.encoded}
    assert "--max-model-len 50" in launch_command(estimate, "whisper")
    with pytest.raises(ServingError, match=f"reads {whisper.encoded} tokens of any request; got 300"):
        serve_model(whisper, device=H100, load=ServingLoad(input_tokens=300))
    load = ServingLoad(input_tokens=whisper.encoded, requests=(Request(0.0, 300, 5),))
    with pytest.raises(ServingError, match="any request; got 300"):
        serve_model(whisper, device=H100, load=load)


def test_no_prefix_of_a_prompt_is_in_a_cache(model):
    with pytest.raises(ServingError, match="no prefix is found in a cache"):
        serve_model(model, device=H100, load=replace(LOAD, hit_rate=0.5))


def test_the_heads_of_an_encoder_are_its_own_however_attention_is_computed():
    found = []
    for attention in ("eager", "sdpa"):
        model = build("T5ForConditionalGeneration")
        model.set_attn_implementation(attention)
        serving = record_serving(model)
        found.append([(layer.heads, layer.key_size, layer.value_size) for layer in serving.encoder_attention])
    assert found[0] == found[1] == [(model.config.num_heads, model.config.d_kv, model.config.d_kv)]
