"""Figures of engines: the shipped file, mistakes in one, and what they do to a step."""

import pytest

from fvflops import find_device
from fvflops.formulas.yaml_document import TableError
from fvflops.plan.step_time.calibration import assume_network
from fvflops.serve.engine_kernels import EngineFigures, EngineKernels, find_engine_figures, load_engines
from fvflops.serve.engine_step import EngineStep, Work
from fvflops.serve.record_serving import record_serving
from fvflops.serve.serving_layout import ServingLayout
from fvflops.zoo import build

H100 = find_device("H100")
DECODE, PROMPT = Work((), 4, 4000), Work(((16, 0),))


@pytest.fixture(scope="module")
def llama():
    return record_serving(build("llama3_8b", device="meta"), "llama3_8b")


def seconds(model, work, layout=None, **figures):
    kernels = EngineKernels.of(H100, assume_network(H100), figures.get("start", 1.0))
    return EngineStep(model, layout or ServingLayout(), kernels, EngineFigures(**figures)).seconds(*work[:3])


def test_every_engine_has_figures_with_a_source():
    assert set(load_engines()) == {"vllm", "sglang", "trtllm"}
    assert all(item.source for item in load_engines().values())
    with pytest.raises(ValueError, match=r"no figures of the engine 'vlm'.*vllm"):
        find_engine_figures("vlm")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("engines:\n  fast: {step: 0}", "fast has no source"),
        ("engines:\n  fast: {step: soon, source: me}", r"step of fast is 'soon': write a number"),
        ("engines:\n  fast: {step: -1, source: me}", "step must be a number of at least 0"),
        ("engines:\n  fast: {steps: 1, source: me}", "steps"),
        ("description: none", "there are no engines"),
    ],
)
def test_mistakes_in_a_file_are_named_with_the_line(tmp_path, text, message):
    path = tmp_path / "engines.yaml"
    path.write_text(text)
    with pytest.raises(TableError, match=message):
        load_engines(str(path))


def test_each_figure_adds_what_it_says(llama):
    plain = seconds(llama, DECODE)
    assert seconds(llama, DECODE, step=1e-3) == pytest.approx(plain + 1e-3)
    assert seconds(llama, DECODE, sequence=1e-3) == pytest.approx(plain + 4e-3)
    # 32 layers of 4 products, 4 kernels of attention, 2 norms and an activation, the last norm and the logits.
    assert seconds(llama, DECODE, kernel=1e-6) == pytest.approx(plain + (32 * 11 + 2) * 1e-6)
    assert seconds(llama, DECODE, rendezvous=1e-3) == plain
    four = ServingLayout(tensor=4)
    assert seconds(llama, DECODE, four, rendezvous=1e-3) == pytest.approx(seconds(llama, DECODE, four) + 64e-3)
    for figures in ({"launch": 1e-3}, {"computing": 2.0}, {"experts": 2.0}, {"request": 1.0}, {"token": 1.0}):
        assert seconds(llama, DECODE, **figures) == plain


def test_a_host_that_is_slower_than_the_gpu_sets_the_pace_of_prompts(llama):
    kernels = 32 * 11 + 2
    assert seconds(llama, PROMPT, launch=1e-3) == pytest.approx(kernels * 1e-3)
    assert seconds(llama, PROMPT, launch=1e-9) == seconds(llama, PROMPT)
    assert seconds(llama, PROMPT, computing=2.0) > 1.5 * seconds(llama, PROMPT)


def test_without_asynchronous_scheduling_the_gpu_waits(llama):
    figures = EngineFigures(step=1e-3, synchronous=2e-3, sequence=1e-5, synchronous_sequence=2e-5)
    assert figures.host(is_asynchronous=True) == (1e-3, 1e-5)
    assert figures.host(is_asynchronous=False) == pytest.approx((3e-3, 3e-5))


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_more_clients_never_lower_the_throughput(llama, engine):
    figures = find_engine_figures(engine)
    kernels = EngineKernels.of(H100, assume_network(H100), figures.start, engine)
    step = EngineStep(llama, ServingLayout(cache="fp8"), kernels, figures)
    bound = EngineStep(llama, ServingLayout(cache="fp8"), kernels.bound())
    rates = [batch / step.seconds((), batch, batch * 1500) for batch in (1, 2, 4, 8, 16, 32, 64, 128, 256)]
    assert rates == sorted(rates)
    for batch, rate in zip((1, 2, 4, 8, 16, 32, 64, 128, 256), rates, strict=True):
        assert rate < batch / bound.seconds((), batch, batch * 1500)


def test_attention_of_an_fp8_cache_is_compared_with_the_peak_of_fp8(llama):
    """Its figures are fractions of that peak: with as many, prefill attention is not slower than in bf16."""
    kernels = EngineKernels.of(H100, None)
    steps = [EngineStep(llama, ServingLayout(cache=cache), kernels) for cache in ("bf16", "fp8")]
    plain, small = (step.by_class(Work(((8192, 0),)))["attention"] for step in steps)
    assert 0.5 * plain < small < plain
