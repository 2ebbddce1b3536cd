"""Replicas of the attention that share experts, and products divided as in the plans of transformers."""

from dataclasses import replace

import pytest
import torch

from fvflops import find_device
from fvflops.devices.kernel_models.mixtures import Mixture, drawn_rows
from fvflops.plan.step_time.calibration import assume_network
from fvflops.serve.engine_kernels import EngineKernels
from fvflops.serve.engine_step import UNBALANCED, EngineStep, Work
from fvflops.serve.record_serving import record_serving
from fvflops.serve.serving_layout import WEIGHTS, ServingLayout
from fvflops.serve.simulation.engine_settings import engine_settings
from fvflops.serve.simulation.request_simulation import simulate
from fvflops.serve.simulation.requests import Request
from fvflops.zoo import build
from tests.support.serving.language_models import transformers

H100 = find_device("H100")
KERNELS = EngineKernels.of(H100, assume_network(H100))


@pytest.fixture(scope="module")
def model():
    return record_serving(build("mixtral_8x7b", device="meta"), "mixtral_8x7b")


def expert_seconds(tokens, ranks):
    """Mixtral's 8 experts, 2 for each token, as ranks divide them."""
    rows = drawn_rows(tokens, 8, 2, ranks, UNBALANCED)
    inner = 14336 // (4 // ranks)
    return 32 * KERNELS.mixture(Mixture(tokens, 2, rows, 4096, inner, 2.0, 2.0, gated=True), WEIGHTS["bf16"])


def own_seconds(step, work):
    """What a replica computes by itself: all but the experts and the collectives around them."""
    found = step.by_class(work)
    return sum(found.values()) - found["experts"] - found["collectives"]


@pytest.mark.parametrize("ranks", [1, 4])
def test_experts_compute_the_tokens_of_all_replicas(model, ranks):
    step = EngineStep(model, ServingLayout(data=4, expert=ranks), KERNELS)
    for work in (Work((), 3, 3000, all_new=503), Work(((500, 0),), all_new=503)):
        assert step.by_class(work)["experts"] == pytest.approx(expert_seconds(503, ranks))
    assert step.by_class(Work((), 3, 3000)) == step.by_class(Work((), 3, 3000, all_new=12))


def test_a_router_that_balances_its_experts_reads_more_of_them(model):
    balanced = EngineStep(replace(model, balances_experts=True), ServingLayout(), KERNELS)
    step = EngineStep(model, ServingLayout(), KERNELS)
    one, few = Work((), 1, 1000), Work((), 4, 4000)
    assert balanced.by_class(few)["experts"] > 1.02 * step.by_class(few)["experts"]
    assert balanced.by_class(one)["experts"] == pytest.approx(step.by_class(one)["experts"], rel=0.05)


def test_ranks_gather_the_tokens_that_there_are(model):
    step = EngineStep(model, ServingLayout(data=4), KERNELS)
    gather = KERNELS.collective("all_gather", 4, 503 * 4096 * 2.0)
    for work in (Work((), 3, 3000, all_new=503), Work(((500, 0),), all_new=503)):
        assert step.by_class(work)["collectives"] == pytest.approx(2 * 32 * gather)


@pytest.mark.parametrize("prompts", [(100, 2000), (2000, 100), (700, 700)])
def test_a_step_takes_the_slowest_replica_and_the_experts_of_all(model, prompts):
    """Two replicas compute a prompt each, and then one decodes while the other has a further prompt."""
    step = EngineStep(model, ServingLayout(data=2, expert=2), KERNELS)
    settings = replace(engine_settings("vllm", 10**6, max_batched_tokens=8192), replicas=2, steps_ahead=0)
    requests = [Request(0.0, prompt, output) for prompt, output in zip(prompts, (3, 1), strict=True)]
    times = simulate([*requests, Request(1e-9, 10, 1), Request(1e-9, 900, 1)], settings, step).requests

    def seconds(*works):
        all_new = sum(work.tokens for work in works)
        sent = max(work.tokens for work in works) * 4096 * 2.0 * 2
        mixture = Mixture(all_new, 2, drawn_rows(all_new, 8, 2, 2, UNBALANCED), 4096, 14336, 2.0, 2.0, gated=True)
        layer = KERNELS.mixture(mixture, WEIGHTS["bf16"]) + 2 * KERNELS.collective("all_to_all", 2, sent)
        return max(own_seconds(step, work) for work in works) + 32 * layer

    first = seconds(*(Work(((prompt, 0),)) for prompt in prompts))
    second = seconds(Work(((10, 0),), 1, prompts[0]), Work(((900, 0),)))
    third = seconds(Work((), 1, prompts[0] + 1))
    assert times.first_token[0] == times.first_token[1] == pytest.approx(first)
    assert times.first_token[3] == pytest.approx(first + second)
    assert times.last_token[0] == pytest.approx(first + second + third, rel=1e-3)


# Models whose small configuration needs more than fewer layers, or that do not run by shapes from a cache.
_OTHERS = {
    "BailingHybridForCausalLM": "no attention layer among the first layers",
    "CohereCompassForCausalLM": "layer types without full attention",
    "DeepseekV4ForCausalLM": "layers of several caches",
    "DeepseekV2ForCausalLM": "its default configuration has no number of experts a token",
    "Dots1ForCausalLM": "its default configuration has no number of experts",
    "Gemma3nForCausalLM": "layers that share a cache",
    "Gemma3nForConditionalGeneration": "layers that share a cache",
    "GraniteMoeHybridForCausalLM": "its default configuration has no attention layer",
    "HrmTextForCausalLM": "layers that run several times",
    "HunYuanMoEV1ForCausalLM": "its default configuration has no size of a head",
    "JambaForCausalLM": "no attention layer among the first layers",
    "KimiLinearForCausalLM": "no attention layer among the first layers",
    "Lfm2MoeForCausalLM": "its default configuration has no kinds of layers",
    "LongcatFlashForCausalLM": "data-dependent experts",
    "MinistralForCausalLM": "its default configuration has no size of a head",
    "NemotronForCausalLM": "its default configuration has no size of a head",
    "Qwen4ExpForCausalLM": "its default configuration has no sizes of heads",
}
# Products that engines divide otherwise: rows of a gated delta net, which the plan gathers, and Doge's dynamic mask.
_GATHERED = {"layers.*.linear_attn.out_proj", "layers.*.self_attn.dt_proj"}


def _plan(config):
    return getattr(config.get_text_config(), "base_model_tp_plan", None) or {}


def _names():
    found = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    classes = (getattr(transformers, name if isinstance(name, str) else name[0], None) for name in found)
    with_plan = set()
    for item in classes:
        config = getattr(item, "config_class", None)
        text = getattr(config, "sub_configs", {}).get("text_config") or config
        if item is not None and getattr(text, "base_model_tp_plan", None):
            with_plan.add(item.__name__)
    return sorted(with_plan)


def _short(name):
    return name[name.index("layers.*") :] if "layers.*" in name else name


def _compare(serving, plan):
    """Return how many products have an entry in the plan, and those that are divided otherwise."""
    checked, other = 0, []
    for item in serving.projections:
        name = _short(item.name)
        style = plan.get(name)
        if style is None or name in _GATHERED:
            continue
        checked += 1
        expected = "columns" if "colwise" in style else "rows" if "rowwise" in style else ""
        if item.divided != expected:
            other.append((name, style, item.divided))
    return checked, other


# Plans with other names or styles: fused, packed or low-rank projections, norms of heads, experts, and other mixers.
_PLANS = [
    *("Cohere2ForCausalLM", "DeepseekV3ForCausalLM", "GPTNeoXForCausalLM", "Gemma3ForCausalLM", "GlmForCausalLM"),
    *("Llama4ForCausalLM", "MiniCPM3ForCausalLM", "MixtralForCausalLM", "NemotronHForCausalLM", "Olmo2ForCausalLM"),
    *("Phi3ForCausalLM", "Qwen2MoeForCausalLM", "Qwen3NextForCausalLM", "Starcoder2ForCausalLM"),
]


@pytest.mark.parametrize("names", [_PLANS, pytest.param((), marks=pytest.mark.long)], ids=["some", "all"])
def test_products_are_divided_as_in_the_plans_of_transformers(names):
    checked = {}
    for name in names or (name for name in _names() if name not in _OTHERS):
        model_class = getattr(transformers, name)
        config = model_class.config_class()
        config.get_text_config().num_hidden_layers = 4
        with torch.device("meta"):
            model = model_class(config).eval()
        serving = record_serving(model)
        checked[name], other = _compare(serving, _plan(config))
        assert not other, name
        rows = [count for item, count in serving.projections.items() if item.divided == "rows"]
        if not serving.experts:
            assert serving.reductions == sum(rows), name
    assert sum(count > 0 for count in checked.values()) >= (13 if names else 60)
