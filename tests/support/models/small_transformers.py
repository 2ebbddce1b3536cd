"""Small language models of transformers, on the meta device: dense ones, and mixtures of experts."""

import importlib
from typing import Any

import torch

VOCABULARY, WIDTH, LAYERS, HEADS, KEY_HEADS, HEAD_WIDTH = 256, 64, 2, 4, 2, 16
DENSE_WIDTH, EXPERT_WIDTH, EXPERTS, TOP_K = 96, 48, 4, 2
# DeepSeek-V3: the ranks of the projections, the parts of a head, and the first layer, which is dense.
QUERY_RANK, KEY_RANK, ROTATED, KEPT, VALUE = 32, 16, 8, 16, 16

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": DENSE_WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
}
_HEADS = {"num_key_value_heads": KEY_HEADS, "head_dim": HEAD_WIDTH}
# Name → the class without "ForCausalLM" and "Config", and sizes.
_MODELS = {
    "llama": ("Llama", _HEADS),
    "qwen3": ("Qwen3", _HEADS),
    "mixtral": (
        "Mixtral",
        _HEADS | {"num_local_experts": EXPERTS, "num_experts_per_tok": TOP_K, "intermediate_size": EXPERT_WIDTH},
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        _HEADS | {"num_experts": EXPERTS, "num_experts_per_tok": TOP_K, "moe_intermediate_size": EXPERT_WIDTH},
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            "num_key_value_heads": HEADS,
            "moe_intermediate_size": EXPERT_WIDTH,
            "n_routed_experts": EXPERTS,
            "num_experts_per_tok": TOP_K,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": QUERY_RANK,
            "kv_lora_rank": KEY_RANK,
            "qk_rope_head_dim": ROTATED,
            "qk_nope_head_dim": KEPT,
            "v_head_dim": VALUE,
        },
    ),
}
NAMES = tuple(_MODELS)


def build_small(name: str, device: str = "meta", **sizes: Any) -> Any:
    transformers = importlib.import_module("transformers")
    prefix, own = _MODELS[name]
    config = getattr(transformers, f"{prefix}Config")(**(_SIZES | own | sizes))
    with torch.device(device):
        return getattr(transformers, f"{prefix}ForCausalLM")(config)
