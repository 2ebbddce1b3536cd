"""The models of the measured runs, recorded by shapes from their configuration."""

from __future__ import annotations

import json
import pickle
from collections.abc import Collection, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import nn

from fvflops.serve.record_serving import record_serving
from fvflops.serve.serving_model import ServingModel
from fvflops.sources.load import load_model
from fvflops.sources.options import SourceOptions

_LLAMA = "LlamaForCausalLM"
# Architecture → the type of its configuration.
_KINDS = {_LLAMA: "llama", "Qwen3ForCausalLM": "qwen3", "Qwen3MoeForCausalLM": "qwen3_moe"}
# The model's name in a file → an architecture and its sizes from config.json, or a source whose defaults they are.
MODELS: dict[str, tuple[str, dict[str, int]]] = {
    "meta-llama/Llama-3.1-70B": (
        _LLAMA,
        {
            "hidden_size": 8192,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "intermediate_size": 28672,
            "vocab_size": 128256,
        },
    ),
    "meta-llama/Llama-3.1-8B": (
        _LLAMA,
        {
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 14336,
            "vocab_size": 128256,
        },
    ),
    "Qwen/Qwen3-32B": (
        "Qwen3ForCausalLM",
        {
            "hidden_size": 5120,
            "num_hidden_layers": 64,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 25600,
            "vocab_size": 151936,
        },
    ),
    "Qwen/Qwen3-235B-A22B-FP8": (
        "Qwen3MoeForCausalLM",
        {
            "hidden_size": 4096,
            "num_hidden_layers": 94,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "intermediate_size": 12288,
            "vocab_size": 151936,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1536,
            "norm_topk_prob": True,
        },
    ),
    "MiniMaxAI/MiniMax-M2.5": ("transformers:MiniMaxM2ForCausalLM", {}),
    "openai/gpt-oss-120b": ("transformers:GptOssForCausalLM", {}),
    "deepseek-ai/DeepSeek-V3": ("transformers:DeepseekV3ForCausalLM", {}),
}


def _load(architecture: str, sizes: Mapping[str, int]) -> nn.Module:
    """Return a model on the meta device, of transformers' defaults or of a configuration."""
    with TemporaryDirectory() as folder:
        source = architecture
        if sizes:
            kind = _KINDS[architecture]
            config = {"architectures": [architecture], "model_type": kind, **sizes}
            Path(folder, "config.json").write_text(json.dumps(config))
            source = f"hf:{folder}"
        return load_model(source, SourceOptions(device="meta", dtype="bf16")).model


def record_models(names: Collection[str], cache: Path | None = None) -> dict[str, ServingModel]:
    """Return name → the model as an engine runs it; `cache` is a file that keeps them."""
    kept: dict[str, ServingModel] = pickle.loads(cache.read_bytes()) if cache is not None and cache.exists() else {}
    missing = [name for name in dict.fromkeys(names) if name not in kept]
    for name in missing:
        kept[name] = record_serving(_load(*MODELS[name]).eval(), name)[0]
    if missing and cache is not None:
        cache.write_bytes(pickle.dumps(kept))
    return kept
