"""Division of products among ranks of tensor parallelism against the plans that transformers' configurations have."""

import torch

from fvflops.serve.record_serving import record_serving
from tests.support.serving.language_models import transformers

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
    plan = getattr(config.get_text_config(), "base_model_tp_plan", None) or {}
    return plan


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


def test_products_are_divided_as_in_the_plans_of_all_architectures():
    checked = {}
    for name in _names():
        if name in _OTHERS:
            continue
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
    assert sum(count > 0 for count in checked.values()) >= 60
