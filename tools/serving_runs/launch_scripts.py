"""What the launch scripts of published benchmarks set, which the files of their measurements do not say.

From the scripts in the folder benchmarks/ of github.com/SemiAnalysisAI/InferenceX (Apache-2.0): the dtype of the cache,
the budget of tokens of a step, and how long requests wait on purpose. Its client sends ten requests for each of its
connections, the first ones at once; lengths are uniform from 0.8 of the longest (--random-range-ratio). Other
publishers' runs have the engines' usual settings.
"""

from __future__ import annotations

from typing import Any

from serving_runs.serving_run import Launch

INFERENCEX = "InferenceX"
_SHORTEST = 0.8
# Tokens of a step that vLLM's server takes on GPUs of 70 GiB and more.
_VLLM = {"max_batched_tokens": 8192, "max_sequences": 1024}


def find_launch(
    publisher: str,
    engine: str,
    model: str,
    gpu: str,
    weights: str,
    lengths: tuple[int, int],
    clients: int,
    gpus: int,
) -> Launch:
    """Return the settings of a run of a publisher; `lengths` are the longest prompt and output."""
    if publisher != INFERENCEX:
        return Launch(settings=_VLLM if engine == "vllm" else {})
    is_blackwell = gpu.startswith("b")
    if engine == "vllm":
        has_small_cache = "Llama" in model or ("gpt-oss" in model and is_blackwell)
        return Launch(cache="fp8" if has_small_cache else "bf16", settings=_VLLM, shortest=_SHORTEST)
    if engine == "sglang":
        return _sglang(is_blackwell, weights, clients, gpus)
    return _trtllm(model, is_blackwell, weights, lengths, clients, gpus)


def _sglang(is_blackwell: bool, weights: str, clients: int, gpus: int) -> Launch:
    """Return the settings of DeepSeek's: on B200 the scheduler looks for requests every 10 or 30 steps."""
    if not is_blackwell:
        return Launch(settings={"max_batched_tokens": 32768}, shortest=_SHORTEST)
    tokens = 16384 if weights == "nvfp4" else 32768 if gpus > 4 else 8192
    is_slow = clients >= 16 and (weights == "nvfp4" or gpus > 4)
    settings = {"max_batched_tokens": tokens, "max_sequences": 256}
    return Launch(cache="fp8", settings=settings, shortest=_SHORTEST, waits=(30 if is_slow else 10) / 2)


def _trtllm(
    model: str, is_blackwell: bool, weights: str, lengths: tuple[int, int], clients: int, gpus: int
) -> Launch:
    """Return the settings: those of Llama wait 20 steps to put prompts of 1,024 tokens together on up to 4 GPUs."""
    prompt, output = lengths
    settings: dict[str, Any] = {}
    waits = 0.0
    is_short = prompt == output
    if "Llama" in model:
        settings["max_batched_tokens"] = 16384 if is_blackwell and weights == "fp8" else prompt + output + 200
        waits = 20.0 if is_short and gpus < 8 else 0.0
    elif "gpt-oss" in model:
        settings["max_batched_tokens"] = 20000
    else:
        settings["max_batched_tokens"] = max(8192, clients + prompt + 64)
        waits = 40.0 if is_blackwell and weights == "fp8" and is_short and 64 <= clients < 256 else 0.0
    cache = "bf16" if "gpt-oss" in model and not is_blackwell else "fp8"
    settings["max_sequences"] = min(2048, settings["max_batched_tokens"])
    return Launch(cache=cache, settings=settings, shortest=_SHORTEST, waits=waits)
