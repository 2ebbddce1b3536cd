"""Serving prompts with images: the encoder's work, its time in a step, and bad input."""

from dataclasses import replace

import pytest

from fvflops import FlopCountAnalysis, find_device
from fvflops.plan.step_time.calibration import assume_network
from fvflops.serve.engine_kernels import EngineKernels
from fvflops.serve.engine_step import EngineStep
from fvflops.serve.image_encoder import count_image_tokens
from fvflops.serve.record_serving import record_serving
from fvflops.serve.serve_model import ServingLoad, serve_model
from fvflops.serve.serving_layout import ServingLayout
from fvflops.serve.serving_model import ServingError
from fvflops.serve.serving_search import search_serving
from fvflops.serve.simulation.request_simulation import LatencyLimits
from fvflops.sources.load import load_model
from fvflops.sources.options import SourceOptions
from tests.support.serving.language_models import build

H100 = find_device("H100")
# Class → the size of an image, and the modules that read it.
CASES = {
    "LlavaForConditionalGeneration": (None, ("model.vision_tower", "model.multi_modal_projector")),
    "LlavaNextForConditionalGeneration": (None, ("model.vision_tower", "model.multi_modal_projector")),
    "Gemma3ForConditionalGeneration": (None, ("model.vision_tower", "model.multi_modal_projector")),
    "Qwen2_5_VLForConditionalGeneration": ((504, 1008), ("model.visual",)),
    "Qwen3VLForConditionalGeneration": ((512, 256), ("model.visual",)),
}


def load(name, config='{"text_config": {"num_hidden_layers": 2}}'):
    build("LlamaForCausalLM")  # it lets transformers import its image processors
    options = SourceOptions(device="meta", dtype="bf16", image_size=CASES[name][0], config=config)
    loaded = load_model(f"transformers:{name}", options)
    return loaded.model.eval(), loaded.kwargs


@pytest.fixture(scope="module", params=CASES)
def recorded(request):
    model, image = load(request.param)
    return request.param, record_serving(model, request.param, image=image), model, image


@pytest.fixture(scope="module")
def llava():
    model, image = load("LlavaForConditionalGeneration", config=None)
    return model, image, record_serving(model, "llava", image=image)


def test_the_work_of_an_image_is_that_of_the_modules_that_read_it(recorded):
    name, serving, model, image = recorded
    counts = FlopCountAnalysis(model, kwargs=image)
    read = sum(counts.by_module()[module] for module in CASES[name][1])
    # Qwen's interpolation of positions is not a product: 0.1 % of its tower.
    assert serving.images.macs == pytest.approx(read, rel=1e-3)
    assert serving.images.tokens == int((image["input_ids"] == model.config.image_token_id).sum()) > 0


def test_images_are_resized_to_the_nearest_number_of_patches():
    """As by Qwen's processor: 1000 by 500 pixels are 35.7 by 17.9 tokens of 28 by 28 pixels, so 36 by 18."""
    options = SourceOptions(device="meta", dtype="bf16", image_size=(1000, 500))
    loaded = load_model("transformers:Qwen2VLForConditionalGeneration", options)
    assert loaded.kwargs["image_grid_thw"].tolist() == [[1, 72, 36]]
    assert count_image_tokens(loaded.model, loaded.kwargs) == 36 * 18


def test_images_add_their_encoder_to_the_first_token_and_nothing_to_further_ones(recorded):
    _, serving, _, _ = recorded
    text = ServingLoad(input_tokens=100 + 2 * serving.images.tokens, output_tokens=50)
    plain = serve_model(serving, device=H100, load=text)
    both = serve_model(serving, device=H100, load=replace(text, input_tokens=100, images=2))
    assert plain.model.images is None and both.load.input_tokens == text.input_tokens
    assert [phase.classes for phase in both.decode] == [phase.classes for phase in plain.decode]
    one, two = dict(plain.prefill.classes), dict(both.prefill.classes)
    assert one.pop("encoder") == 0 < two.pop("encoder")
    assert one.pop("engine") <= two.pop("engine") and one == two
    assert both.prefill.macs - plain.prefill.macs == 2 * serving.images.macs
    added = both.prefill.bound_seconds - plain.prefill.bound_seconds
    assert 2 * 2 * serving.images.macs / H100.peak("bf16") <= added * 1.001 and added < both.prefill.classes["encoder"]


def test_only_a_chunk_that_begins_a_prompt_reads_its_images(llava):
    _, _, serving = llava
    steps = EngineStep(serving, ServingLayout(), EngineKernels.of(H100, None))
    alone = steps.by_class(steps.work([(700, 0)]))["encoder"]
    assert alone > 0
    assert steps.by_class(steps.work([(700, 600)], 3, 3000))["encoder"] == 0
    assert steps.by_class(steps.work([(700, 0), (50, 600), (700, 0)]))["encoder"] == pytest.approx(2 * alone)


def test_ranks_divide_the_encoder_where_they_divide_its_heads(llava):
    _, _, serving = llava
    kernels = EngineKernels.of(H100, assume_network(H100))
    serving = replace(serving, images=serving.images._replace(number=8))  # so that sums take less than products
    times = [
        EngineStep(serving, ServingLayout(tensor=ranks), kernels)
        for ranks in (1, 4, 32)  # the encoder has 16 heads
    ]
    one, four, whole = (steps.by_class(steps.work([(5000, 0)]))["encoder"] for steps in times)
    assert one / 4 < four < one == whole


def test_simulated_requests_and_a_search_wait_for_images(llava):
    model, image, serving = llava
    load = ServingLoad(input_tokens=500, output_tokens=20, concurrency=8, images=4, image=image)
    found = serve_model(model, device=H100, load=load)
    tokens = 500 + 4 * serving.images.tokens
    plain = serve_model(serving, device=H100, load=replace(load, input_tokens=tokens, images=0, image=None))
    assert found.latencies()["ttft"].mean > plain.latencies()["ttft"].mean
    assert found.requests.steps >= 6 * 8 * 20 / 8
    limits = LatencyLimits(tpot=0.05)
    search = [
        search_serving(model, device=H100, gpus=1, limits=limits, precisions=[("bf16", "bf16")], load=each).best(1)[0]
        for each in (replace(load, concurrency=None), ServingLoad(input_tokens=500, output_tokens=20))
    ]
    assert 0 < search[0].per_gpu < search[1].per_gpu / 2


def test_the_encoder_reads_as_many_images_at_once_as_a_step_has_tokens_for(llava):
    serving = llava[2]
    most = 8192 // serving.images.tokens
    memory = [serve_model(serving, device=H100, load=ServingLoad(images=number)).memory for number in (most, 10 * most)]
    assert memory[0].activations == memory[1].activations


def test_bad_input(llava):
    model, _, serving = llava
    with pytest.raises(ServingError, match="images need `image` too"):
        serve_model(model, device=H100, load=ServingLoad(images=1))
    with pytest.raises(ServingError, match="images must be at least 0; got -1"):
        ServingLoad(images=-1)
    with pytest.raises(ServingError, match="the inputs of LlamaForCausalLM have no image"):
        record_serving(build("LlamaForCausalLM"), image={})
    with pytest.raises(ServingError, match="are longer than the longest sequence, 700"):
        serve_model(serving, device=H100, load=ServingLoad(input_tokens=100, images=1, longest=700))
