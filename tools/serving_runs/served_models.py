"""The models of the measured runs, recorded by shapes from their configuration."""

from __future__ import annotations

import json
import pickle
from collections.abc import Collection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

from fvflops.serve.record_serving import record_serving
from fvflops.serve.serving_model import ServingModel
from fvflops.sources.load import load_model
from fvflops.sources.options import SourceOptions

_SIZES = "hidden_size num_hidden_layers num_attention_heads num_key_value_heads intermediate_size vocab_size"


def _config(architecture: str, model_type: str, *sizes: int, **more: Any) -> dict[str, Any]:
    """Return a config.json; `sizes` are in the order of `_SIZES`."""
    named = dict(zip(_SIZES.split(), sizes, strict=True))
    return {"architectures": [architecture], "model_type": model_type, **named, **more}


_EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1536, "norm_topk_prob": True}
# The model's name in a file → its configuration, or a source whose defaults it has.
MODELS: dict[str, dict[str, Any] | str] = {
    "meta-llama/Llama-3.1-70B": _config("LlamaForCausalLM", "llama", 8192, 80, 64, 8, 28672, 128256),
    "meta-llama/Llama-3.1-8B": _config("LlamaForCausalLM", "llama", 4096, 32, 32, 8, 14336, 128256),
    "Qwen/Qwen3-32B": _config("Qwen3ForCausalLM", "qwen3", 5120, 64, 64, 8, 25600, 151936, head_dim=128),
    "Qwen/Qwen3-235B-A22B-FP8": _config(
        "Qwen3MoeForCausalLM", "qwen3_moe", 4096, 94, 64, 4, 12288, 151936, head_dim=128, **_EXPERTS
    ),
    "MiniMaxAI/MiniMax-M2.5": "transformers:MiniMaxM2ForCausalLM",
    "openai/gpt-oss-120b": "transformers:GptOssForCausalLM",
    "deepseek-ai/DeepSeek-V3": "transformers:DeepseekV3ForCausalLM",
}


def _load(source: dict[str, Any] | str) -> nn.Module:
    """Return a model on the meta device, of a configuration or of transformers' defaults."""
    with TemporaryDirectory() as folder:
        if isinstance(source, dict):
            Path(folder, "config.json").write_text(json.dumps(source))
            source = f"hf:{folder}"
        return load_model(source, SourceOptions(device="meta", dtype="bf16")).model


def record_models(names: Collection[str], cache: Path | None = None) -> dict[str, ServingModel]:
    """Return name → the model as an engine runs it; `cache` is a file that keeps them."""
    kept: dict[str, ServingModel] = pickle.loads(cache.read_bytes()) if cache is not None and cache.exists() else {}
    missing = [name for name in dict.fromkeys(names) if name not in kept]
    for name in missing:
        kept[name] = record_serving(_load(MODELS[name]).eval(), name)
    if missing and cache is not None:
        cache.write_bytes(pickle.dumps(kept))
    return kept
