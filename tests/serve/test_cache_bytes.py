"""Bytes of each layer's cache against the cache of transformers after a real generation, for small models."""

import pytest
import torch

from fvflops.serve.cache_size import KINDS, sequence_bytes
from fvflops.serve.record_serving import record_serving
from fvflops.serve.serving_model import ServingError
from tests.support.random_cases import long_except
from tests.support.serving.language_models import NAMES, WINDOW, build

# Tokens of an encoder.
_ENCODED = 30
# Attributes of the layers of a cache.
_HELD = ("keys", "values", "conv_states", "recurrent_states")


def _tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


def _cache_bytes(model, prompt):
    """Generate and return the bytes of the cache, and of what RecurrentGemma's modules keep."""
    ids = torch.ones(1, prompt, dtype=torch.int64)
    inputs = {"input_ids": ids}
    config = model.config
    if config.is_encoder_decoder:
        encoded = {"input_ids": torch.ones(1, _ENCODED, dtype=torch.int64)}
        if model.main_input_name == "input_features":
            encoded = {"input_features": torch.zeros(1, config.num_mel_bins, 2 * _ENCODED)}
        ids[:, 0] = config.decoder_start_token_id
        inputs = {**encoded, "decoder_input_ids": ids}
    generate = model.generate
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
    result = generate(**inputs, **options)
    cache = result.get("cache_params", result.past_key_values)
    parts = (cache.self_attention_cache, cache.cross_attention_cache) if config.is_encoder_decoder else (cache,)
    held = [layer.__dict__.get(name) for part in parts for layer in part.layers for name in _HELD]
    held += getattr(cache, "linear_cache", [])
    held += [vars(module).get(name) for module in model.modules() for name in ("conv1d_state", "recurrent_states")]
    return sum(tensor.numel() * tensor.element_size() for item in held for tensor in _tensors(item))


def _formula(layer, tokens):
    """Return the bytes as transformers keeps them: of a window all but the token that the next step adds."""
    if layer.kind == "cross attention":
        return layer.nbytes(_ENCODED, 4)
    return layer.nbytes(min(tokens, layer.window - 1) if layer.window else tokens, 4)


pytestmark = pytest.mark.usefixtures("one_thread")


# Models that keep keys and values as GPT-2 does, or as Llama with a key for several heads.
_ALIKE = {f"{name}ForCausalLM" for name in ("OPT", "GPTNeoX", "GPTJ", "Bloom", "Starcoder2", "Qwen2", "Qwen3", "Phi3")}


@pytest.mark.parametrize("name", long_except([name for name in NAMES if name not in _ALIKE], NAMES))
def test_bytes_are_those_of_the_real_cache(name):
    model = build(name)
    serving = record_serving(model)
    has_window = any(layer.window for layer in serving.cache)
    for prompt in (4, WINDOW - 4, WINDOW - 3, WINDOW + 8) if has_window else (4, 37):
        # Each generation adds three cached tokens: the last of four is not run.
        expected = sum(_formula(layer, prompt + 3) for layer in serving.cache)
        assert expected == _cache_bytes(model, prompt), (prompt, serving.cache)


def test_models_have_every_kind_of_cache():
    names = ("DeepseekV3ForCausalLM", "MambaForCausalLM", "MistralForCausalLM", "T5ForConditionalGeneration")
    found = {layer.kind for name in names for layer in record_serving(build(name)).cache}
    assert found == set(KINDS)
    assert len(NAMES) >= 25


def test_a_window_shorter_than_the_recorded_prompt():
    model = build("MistralForCausalLM", sliding_window=16)
    layers = record_serving(model).cache
    assert [layer.window for layer in layers] == [16, 16]
    for prompt in (4, 12, 13, 40):
        assert sum(_formula(layer, prompt + 3) for layer in layers) == _cache_bytes(model, prompt)
    # Engines keep all tokens of the window.
    assert sequence_bytes(layers, 40, 4) == 2 * 16 * layers[0].token * 4


def test_a_model_without_attention_layers_says_what_it_needs():
    with pytest.raises(ServingError, match=r"BambaForCausalLM .* attention layers"):
        record_serving(build("BambaForCausalLM", attn_layer_indices=None))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("size", [8, 320])
def test_heads_that_share_a_key_are_counted_however_attention_computes_them(attention, size):
    """Products of large heads have the queries of a key as rows."""
    model = build("LlamaForCausalLM", head_dim=size)
    model.set_attn_implementation(attention)
    (layer,) = record_serving(model).attention
    config = model.config
    assert (layer.heads, layer.cache.heads) == (config.num_attention_heads, config.num_key_value_heads)
