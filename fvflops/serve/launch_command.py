"""The command that starts an engine with the model and layout of an estimate."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping

from fvflops.serve.serve_model import ServingEstimate
from fvflops.serve.serving_memory import ServingMemory

# Engine → its command and options: vLLM's `vllm serve`, SGLang's launch_server, TensorRT-LLM's trtllm-serve.
_COMMANDS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "vllm": (
        "vllm serve",
        {
            "tensor": "--tensor-parallel-size",
            "pipeline": "--pipeline-parallel-size",
            "data": "--data-parallel-size",
            "expert": "--enable-expert-parallel",
            "length": "--max-model-len",
            "utilisation": "--gpu-memory-utilization",
            "cache": "--kv-cache-dtype",
        },
    ),
    "sglang": (
        "python -m sglang.launch_server --model-path",
        {
            "tensor": "--tp-size",
            "pipeline": "--pp-size",
            "data": "--enable-dp-attention --dp-size",
            "expert": "--ep-size",
            "length": "--context-length",
            "utilisation": "--mem-fraction-static",
            "cache": "--kv-cache-dtype",
        },
    ),
    "trtllm": (
        "trtllm-serve",
        {
            "tensor": "--tp_size",
            "pipeline": "--pp_size",
            "expert": "--ep_size",
            "length": "--max_seq_len",
            "utilisation": "--kv_cache_free_gpu_memory_fraction",
        },
    ),
}
# Formats of a cache in fp8, where the engine has an option for it.
_CACHE = {"vllm": "fp8", "sglang": "fp8_e4m3"}
# Engine → what its option is a part of: all that it takes, SGLang's weights and cache, and TensorRT-LLM's cache, of the
# memory beside weights and activations.
_UTILISATIONS: Mapping[str, Callable[[ServingMemory, float], float]] = {
    "vllm": lambda memory, taken: taken,
    "sglang": lambda memory, taken: (memory.weights + memory.cache) / memory.total,
    "trtllm": lambda memory, taken: memory.cache / (memory.cache + memory.total - memory.usable),
}
# Engines whose tensor-parallel size counts the ranks of all groups of attention.
_COUNTS_ALL = ("sglang", "trtllm")


def launch_command(estimate: ServingEstimate, model: str) -> str:
    """Return the command of an engine that serves `model`, the name or folder of a checkpoint in its precision."""
    layout, memory, engine = estimate.layout, estimate.memory, estimate.engine
    command, options = _COMMANDS[engine]
    tensor = layout.tensor * layout.data if engine in _COUNTS_ALL else layout.tensor
    values = {
        "tensor": tensor if tensor > 1 else None,
        "pipeline": layout.pipeline if layout.pipeline > 1 else None,
        "data": layout.data if layout.data > 1 else None,
        "expert": ("" if engine == "vllm" else layout.expert) if layout.expert > 1 else None,
        # Engines count the decoder's tokens.
        "length": memory.length - (estimate.load.input_tokens if estimate.model.cross_attention else 0),
        "utilisation": round(_UTILISATIONS[engine](memory, estimate.load.utilisation), 3),
        "cache": _CACHE.get(engine) if layout.cache == "fp8" else None,
    }
    shown = [
        f"{options[name]} {value}".strip() for name, value in values.items() if value is not None and name in options
    ]
    return " ".join([command, shlex.quote(model), *shown])
