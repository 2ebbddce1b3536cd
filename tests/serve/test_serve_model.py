"""Estimates of serving: memory, bounds, relations between layouts and loads, and bad input."""

import json
import re
from dataclasses import replace

import pytest

from fvflops import find_device
from fvflops.plan.step_time.calibration import assume_network
from fvflops.reports.formats import write_document
from fvflops.serve.cache_size import CacheLayer
from fvflops.serve.engine_kernels import EngineKernels
from fvflops.serve.engine_step import EngineStep, Work
from fvflops.serve.record_serving import record_serving
from fvflops.serve.serve_model import ServingLoad, serve_model
from fvflops.serve.serve_report import launch_command, serve_report
from fvflops.serve.serving_layout import ServingLayout
from fvflops.serve.serving_model import ServingError
from fvflops.serve.serving_search import search_serving
from fvflops.serve.serving_search_report import serving_search_report
from fvflops.serve.simulation.engine_settings import Speculation
from fvflops.serve.simulation.request_simulation import LatencyLimits
from fvflops.serve.simulation.requests import Request
from fvflops.zoo import build

H100 = find_device("H100")


@pytest.fixture(scope="module")
def llama():
    return record_serving(build("llama3_8b", device="meta"), "llama3_8b")


@pytest.fixture(scope="module")
def mixture():
    return record_serving(build("mixtral_8x7b", device="meta"), "mixtral_8x7b")


def steps(model, layout=None, *, bound=False):
    kernels = EngineKernels.of(H100, assume_network(H100))
    return EngineStep(model, layout or ServingLayout(), kernels.bound() if bound else kernels)


def test_structure_of_llama(llama):
    # Meta's model card: 8.03B parameters; 2 x 8 heads x 128 x 32 layers of bf16 are 131,072 bytes a token.
    assert (llama.layers, llama.hidden, llama.vocabulary, llama.parameters) == (32, 4096, 128256, 8030261248)
    assert sum(layer.token for layer in llama.cache) * 2 == 131072
    assert {(layer.heads, layer.cache.heads, layer.key_size) for layer in llama.attention} == {(32, 8, 128)}
    assert llama.reductions == 64


def test_structure_of_mixtral(mixture):
    ((layer, count),) = mixture.experts.items()
    assert (layer.experts, layer.topk, layer.hidden, layer.inner, layer.gated, count) == (8, 2, 4096, 14336, True, 32)
    # Mistral AI: 12.9B of 46.7B parameters are used for a token.
    idle = count * layer.elements * (layer.experts - layer.topk) // layer.experts
    assert (round(mixture.parameters / 1e9, 1), round((mixture.parameters - idle) / 1e9, 1)) == (46.7, 12.9)


def test_one_token_alone_is_bound_by_its_bytes(llama):
    """At the peaks a decoded token takes (weights + cache) / bandwidth; norms' weights are below a ten-thousandth."""
    context = 1000
    layout = ServingLayout()
    unread = llama.vocabulary * llama.hidden * 2  # embeddings: one row is read
    moved = layout.weight_bytes(llama) - unread + (context + 1) * 131072
    seconds = steps(llama, bound=True).seconds((), 1, context)
    assert seconds == pytest.approx(moved / H100.bandwidth, rel=1e-4)


@pytest.mark.parametrize(
    "work", [Work((), 1, 1000), Work((), 64, 64_000), Work(((2048, 0),)), Work(((512, 4096),), 16, 9000)]
)
def test_no_step_is_faster_than_its_bound(llama, mixture, work):
    for model in (llama, mixture):
        for layout in (ServingLayout(), ServingLayout(tensor=4), ServingLayout(weights="fp8", cache="fp8")):
            assert steps(model, layout).seconds(*work[:3]) >= 0.98 * steps(model, layout, bound=True).seconds(*work[:3])


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "all_to_all"])
@pytest.mark.parametrize("ranks", [2, 8, 16, 64])
def test_no_collective_is_faster_than_its_bound(kind, ranks):
    """Inside a node and between nodes, whose adapters work at once."""
    kernels = EngineKernels.of(H100, assume_network(H100))
    for nbytes in (1e5, 1e7, 1e9):
        assert kernels.collective(kind, ranks, nbytes) >= 0.99 * kernels.bound().collective(kind, ranks, nbytes) > 0


def test_more_work_takes_longer(llama):
    """In batch, context and prompt, apart from steps of tiles."""
    engine = steps(llama)
    for series in (
        [engine.seconds((), batch, batch * 1000) for batch in (1, 8, 64, 256)],
        [engine.seconds((), 32, 32 * context) for context in (100, 1000, 10_000)],
        [engine.seconds(((tokens, 0),), 0, 0) for tokens in (128, 512, 2048, 8192)],
        [engine.seconds(((512, cached),), 0, 0) for cached in (0, 8192, 65_536)],
    ):
        assert series == sorted(series)


def test_runs_of_decoding_are_interpolated_closely(llama):
    engine = steps(llama)
    cached = range(64 * 900, 64 * 1500, 64)
    exact = [engine.seconds((), 64, tokens) for tokens in cached[::100]]
    assert engine.decode_seconds(64, cached)[::100] == pytest.approx(exact, rel=5e-3)


def test_memory_adds_up(llama):
    memory = serve_model(llama, device=H100, load=ServingLoad(longest=8192)).memory
    assert memory.usable == pytest.approx(0.9 * H100.memory)
    parts = memory.weights + memory.activations + memory.graphs + memory.reserve + memory.cache
    assert parts == pytest.approx(memory.usable)
    assert memory.weights == 2 * llama.parameters
    assert memory.tokens == pytest.approx(memory.cache / 131072, rel=1e-6)


def test_ranks_divide_weights_and_cache(llama):
    one, four = (serve_model(llama, device=H100, layout=ServingLayout(tensor=ranks)).memory for ranks in (1, 4))
    assert four.weights == pytest.approx(one.weights / 4)
    assert four.token == one.token / 4
    # More ranks than heads of keys hold copies of them.
    sixteen = ServingLayout(tensor=16)
    assert serve_model(llama, device=H100, layout=sixteen).memory.token == one.token / 8


def test_weights_that_layers_share_are_kept_once_and_read_by_each(llama):
    shared = replace(llama, parameters=llama.parameters // 2)
    estimate = serve_model(shared, device=H100)
    assert estimate.memory.weights == pytest.approx(llama.parameters, rel=1e-6)
    assert estimate.decode[0].weight_bytes == serve_model(llama, device=H100).decode[0].weight_bytes


def test_a_decoded_token_reads_no_table_of_embeddings(llama):
    embeddings = 2 * llama.vocabulary * llama.hidden
    estimate = serve_model(llama, device=H100)
    assert estimate.decode[0].weight_bytes == pytest.approx(estimate.memory.weights - embeddings, rel=1e-4)


def test_a_cache_in_fp8_holds_twice_the_tokens(llama):
    tokens = [
        serve_model(llama, device=H100, layout=ServingLayout(cache=name)).memory.tokens for name in ("bf16", "fp8")
    ]
    assert tokens[1] == pytest.approx(2 * tokens[0], rel=1e-4)


def test_decoding_of_a_small_context_turns_compute_bound(llama):
    short = serve_model(llama, device=H100, load=ServingLoad(input_tokens=16, output_tokens=2)).compute_bound
    # 2 FLOPs and 2 bytes a parameter: at about peak / bandwidth sequences.
    assert short == pytest.approx(H100.peak("bf16") / H100.bandwidth, rel=0.15)
    assert serve_model(llama, device=H100, load=ServingLoad(input_tokens=8192)).compute_bound is None


def test_fewer_bytes_and_faster_products_are_compute_bound_later(llama):
    """In fp8 both change by two, so the batch is the same; int4 is multiplied in bf16, from a quarter of the bytes."""
    load = ServingLoad(input_tokens=16, output_tokens=2)
    found = {
        name: serve_model(llama, device=H100, load=load, layout=ServingLayout(weights=name)).compute_bound
        for name in ("bf16", "fp8", "int4")
    }
    assert found["fp8"] == pytest.approx(found["bf16"], rel=0.1) and found["int4"] < 0.4 * found["bf16"]


def test_the_longest_sequence_does_not_change_how_many_shorter_ones_fit():
    """Layers with a window keep fewer bytes of a token the longer a sequence is."""
    cache = tuple(CacheLayer("sliding window", 2048, 8, 1024) for _ in range(32))
    model = replace(record_serving(build("llama3_8b", device="meta")), cache=cache)
    short, long = (
        serve_model(model, device=H100, load=ServingLoad(concurrency=2, longest=longest)) for longest in (None, 131072)
    )
    assert long.settings.pages == short.settings.pages
    assert [phase.batch for phase in long.decode] == [phase.batch for phase in short.decode]
    assert long.memory.tokens > 10 * short.memory.tokens


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_many_drafted_tokens_leave_room_for_fewer_sequences(llama, engine):
    load = ServingLoad(concurrency=2, speculation=Speculation(31, 0.5))
    settings = serve_model(llama, device=H100, load=load, engine=engine).settings
    assert settings.max_sequences * 32 == settings.max_batched_tokens


def test_a_prompt_that_just_fits_is_simulated(llama):
    tokens = serve_model(llama, device=H100).memory.tokens
    load = ServingLoad(input_tokens=tokens - 300, concurrency=1)
    result = serve_model(llama, device=H100, load=load).requests
    assert max(result.requests.input_tokens) <= tokens


def test_the_longest_request_of_a_file_is_a_sequence_of_the_engine(llama):
    requests = (Request(0.0, 100, 10), Request(1.0, 6000, 500))
    estimate = serve_model(llama, device=H100, load=ServingLoad(requests=requests))
    assert estimate.memory.length == 6500 and "--max-model-len 6500" in launch_command(estimate, "NAME")
    with pytest.raises(ServingError, match="a prompt of 6000 tokens and 500 tokens of output are longer"):
        ServingLoad(requests=requests, longest=6000)


def test_launched_engines_have_the_cache_of_the_estimate(llama):
    """Of SGLang's part of the memory weights are subtracted; TensorRT-LLM's is of the memory beside all else."""
    for engine, used in (("sglang", lambda memory: memory.weights), ("trtllm", lambda memory: 0.0)):
        estimate = serve_model(llama, device=H100, engine=engine)
        memory, command = estimate.memory, launch_command(estimate, "NAME")
        part = float(re.search(r"(?:static|fraction) ([0-9.]+)", command)[1])
        free = memory.weights + memory.activations + memory.graphs + memory.reserve if engine == "trtllm" else 0.0
        assert part * (memory.total - free) - used(memory) == pytest.approx(memory.cache, rel=2e-3)


def test_more_clients_serve_more_and_each_waits_longer(llama):
    results = [
        serve_model(llama, device=H100, load=ServingLoad(concurrency=clients)).requests for clients in (1, 8, 64)
    ]
    rates = [result.output_tokens_per_second for result in results]
    assert rates == sorted(rates)
    assert [result.tpot.mean for result in results] == sorted(result.tpot.mean for result in results)


def test_a_pipeline_serves_a_batch_in_each_stage(llama):
    load = ServingLoad(input_tokens=500, output_tokens=100, concurrency=64)
    one, two = (serve_model(llama, device="H100", layout=ServingLayout(pipeline=size), load=load) for size in (1, 2))
    assert (one.settings.stages, two.settings.stages) == (1, 2)
    ratio = two.requests.steady_tokens_per_second() / one.requests.steady_tokens_per_second()
    assert 1.2 < ratio < 2
    assert "2 batches in them at once" in " ".join(str(two).split())


def test_speculative_decoding_pays_where_drafts_are_accepted(llama):
    plain, useful, useless = (
        serve_model(llama, device=H100, load=ServingLoad(concurrency=2, speculation=speculation)).requests.tpot.mean
        for speculation in (None, Speculation(3, 0.8), Speculation(3, 0.0))
    )
    assert useful < 0.7 * plain < plain < useless


@pytest.fixture(scope="module")
def large():
    return record_serving(build("llama3_70b", device="meta"), "llama3_70b")


def test_a_model_that_does_not_fit_is_said_to_lack_memory(large):
    estimate = serve_model(large, device=H100, load=ServingLoad(concurrency=4))
    assert estimate.memory.cache < 0 and estimate.requests is None
    assert "It does not fit: each GPU lacks" in str(estimate)


def with_ten_heads_of_keys(model):
    ((layer, count),) = model.attention.items()
    return replace(model, attention={layer._replace(heads=40, cache=layer.cache._replace(heads=10)): count})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda model: serve_model(model, device=H100, layout=ServingLayout(tensor=3)), "must divide the 32 heads"),
        (
            lambda model: serve_model(with_ten_heads_of_keys(model), device=H100, layout=ServingLayout(tensor=4)),
            "tensor parallelism of 4 must divide the 10 heads of keys, or be a multiple",
        ),
        (lambda model: serve_model(model, device=H100, layout=ServingLayout(tensor=2, expert=2)), "has no experts"),
        (lambda model: serve_model(model, device="MI300X", engine="trtllm"), "on NVIDIA's GPUs only, not on MI300X"),
        (lambda model: ServingLayout(tensor=2, expert=3), "3 ranks of experts must divide the 2 ranks"),
        (lambda model: ServingLayout(weights="int3"), "weights must be one of bf16, fp8"),
        (lambda model: ServingLoad(input_tokens=0), "input_tokens must be at least 1"),
        (lambda model: ServingLoad(longest=100), "longer than the longest sequence, 100"),
        (lambda model: ServingLoad(concurrency=2, rate=1.0), "give one of concurrency, rate and requests"),
        (lambda model: ServingLoad(utilisation=1.5), "utilisation must be above 0"),
    ],
)
def test_bad_input(llama, make, message):
    with pytest.raises(ServingError, match=message):
        make(llama)


def test_report_as_data(llama):
    document = serve_report(serve_model(llama, device=H100, load=ServingLoad(rate=2.0)))
    data = json.loads(write_document(document, "json"))
    assert data["format"] == "fvflops.serve"
    assert data["memory"]["token"] == 131072 and data["decode"][0]["batch"] == 1
    assert data["requests"]["requests_per_second"] == pytest.approx(2.0, rel=0.1)
    assert sum(data["prefill"]["classes"].values()) == pytest.approx(data["prefill"]["seconds"])


@pytest.mark.parametrize(
    ("engine", "layout", "command"),
    [
        ("vllm", ServingLayout(tensor=4, cache="fp8"), "vllm serve NAME --tensor-parallel-size 4 --max-model-len 1280"),
        ("sglang", ServingLayout(), "python -m sglang.launch_server --model-path NAME --context-length 1280"),
        ("trtllm", ServingLayout(tensor=2), "trtllm-serve NAME --tp_size 2 --max_seq_len 1280"),
    ],
)
def test_launch_command(llama, engine, layout, command):
    estimate = serve_model(llama, device=H100, layout=layout, engine=engine)
    assert launch_command(estimate, "NAME").startswith(command)
    assert ("fp8" in launch_command(estimate, "NAME")) == (layout.cache == "fp8")


def test_search_keeps_to_the_limits_and_finds_the_best(llama):
    limits = LatencyLimits(ttft=0.5, tpot=0.015, at="p95")
    found = search_serving(llama, device=H100, gpus=2, limits=limits, precisions=[("bf16", "bf16")])
    best = found.best()
    assert best and all(point.ttft <= 0.5 and point.tpot <= 0.015 for point in best)
    assert best[0].per_gpu == max(point.per_gpu for point in found.points if point.within_limits)
    front = found.front()
    assert all(
        not (other.per_gpu > point.per_gpu and other.per_user > point.per_user)
        for point in front
        for other in found.points
    )
    # Two engines of one GPU, one of two, and one for prompts beside one that decodes.
    assert {(point.layout.tensor, point.engines, point.prefill) for point in found.points} == {
        (1, 2, 0),
        (1, 2, 1),
        (2, 1, 0),
    }
    assert "Most throughput within the limits" in write_document(serving_search_report(found), "text")


def test_search_says_what_does_not_fit(large):
    found = search_serving(large, device=H100, gpus=1, precisions=[("bf16", "bf16"), ("int4", "bf16")])
    assert [item.layout.weights for item in found.rejected] == ["bf16"]
    assert "GB too little on each GPU" in found.rejected[0].reason
    assert {point.layout.weights for point in found.points} == {"int4"}


def test_answers_of_one_token_have_no_time_per_output_token(llama):
    estimate = serve_model(llama, device=H100, load=ServingLoad(output_tokens=1, concurrency=2))
    report = json.loads(write_document(serve_report(estimate), "json"))["requests"]
    assert report["tpot"]["mean"] is None and report["end_to_end"] == report["ttft"]
    assert "nan" not in write_document(serve_report(estimate), "text")
    with pytest.raises(ServingError, match="answers of one token do not have"):
        search_serving(llama, device=H100, gpus=1, load=ServingLoad(output_tokens=1))


def test_throughput_and_the_cost_of_tokens_are_of_the_same_time(llama):
    """While the load is on: the first and last requests of the clients are left out of both."""
    estimate = serve_model(llama, device=H100, layout=ServingLayout(tensor=2), load=ServingLoad(concurrency=8))
    hours = estimate.cost_of_tokens(3600.0).gpu_hours
    tokens = estimate.requests.steady_tokens_per_second()
    assert hours == pytest.approx(2 / tokens)
    mean = sum(estimate.requests.requests.output_tokens) / len(estimate.requests.requests)
    assert estimate.requests.steady_requests_per_second() == pytest.approx(tokens / mean)


@pytest.mark.parametrize(("rate", "is_said"), [(5.0, False), (60.0, True)])
def test_a_rate_beyond_what_is_served_is_said(llama, rate, is_said):
    text = write_document(serve_report(serve_model(llama, device=H100, load=ServingLoad(rate=rate))), "text")
    assert ("more requests arrive than are served" in text) == is_said


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        (None, 256),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "rope_theta": 1e4}, 1024),
        ({"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}, 512),
    ],
)
def test_sequences_longer_than_the_configuration_s_are_named(rope, longest):
    from tests.support.serving.language_models import build as build_small  # skips the test without transformers

    scaled = {} if rope is None else {"rope_parameters": rope}
    model = build_small("LlamaForCausalLM", max_position_embeddings=256, **scaled)

    def report(tokens):
        load = ServingLoad(input_tokens=64, output_tokens=64, longest=tokens)
        return write_document(serve_report(serve_model(model, device="H100", load=load)))

    named = " ".join(report(longest + 1).split())
    assert f"sequences of {longest + 1:,} tokens are longer than the {longest:,} of the model's configuration" in named
    assert "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1" in named
    assert "of the model's configuration" not in " ".join(report(longest).split())
