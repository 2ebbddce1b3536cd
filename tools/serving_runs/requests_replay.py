"""Replay measured requests through a simulation of the engine that served them."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

from fvflops import find_device
from fvflops.serve.engine_kernels import EngineFigures
from fvflops.serve.engine_step import EngineStep
from fvflops.serve.serving_layout import ServingLayout
from fvflops.serve.serving_memory import find_memory
from fvflops.serve.serving_model import ServingModel
from fvflops.serve.simulation.engine_settings import EngineSettings, engine_settings
from fvflops.serve.simulation.request_simulation import simulate
from fvflops.serve.simulation.requests import Request
from serving_runs.prediction import find_kernels

MODEL = "meta-llama/Llama-3.1-8B"
# File → GPU and the largest number of sequences; vLLM 0.19, bf16, 2,048 tokens a step (LLMServingSim's examples, MIT).
FILES = {
    "requests_rtx4090_llama_8b.csv": ("RTX 4090", 256),
    "requests_rtxpro6000_llama_8b.csv": ("RTX PRO 6000 Blackwell Server Edition", 128),
}
_STEP_TOKENS = 2048


def replay(path: Path, model: ServingModel, figures: EngineFigures) -> str:
    """Return a line with the relative errors of simulated means of the requests of a file."""
    gpu, sequences = FILES[path.name]
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    requests = [Request(float(row["queued_s"]), int(row["input_tokens"]), int(row["output_tokens"])) for row in rows]
    waits = [float(row["first_token_s"]) - float(row["queued_s"]) for row in rows]
    whole = [float(row["last_token_s"]) - float(row["queued_s"]) for row in rows]
    steps = [
        (all_ - first) / (request.output_tokens - 1)
        for first, all_, request in zip(waits, whole, requests, strict=True)
        if request.output_tokens > 1
    ]
    measured = [sum(values) / len(values) for values in (waits, steps, whole)]
    times = EngineStep(model, ServingLayout(), find_kernels(gpu, figures.start, "vllm"), figures)
    result = simulate(sorted(requests, key=lambda item: item.arrival), _settings(gpu, model, sequences), times)
    simulated = (result.ttft.mean, result.tpot.mean, result.end_to_end.mean)
    ttft, tpot, end_to_end = (found / known - 1 for found, known in zip(simulated, measured, strict=True))
    means = f"mean TPOT {tpot:+.1%}, TTFT {ttft:+.1%}, end to end {end_to_end:+.1%}"
    return f"{path.name} on {gpu}: errors of the {means}"


def _settings(gpu: str, model: ServingModel, sequences: int) -> EngineSettings:
    settings = engine_settings("vllm", 10**9, max_sequences=sequences, max_batched_tokens=_STEP_TOKENS)
    device = find_device(gpu)
    memory = find_memory(
        model, ServingLayout(), device, length=4096, step_tokens=_STEP_TOKENS, step_sequences=sequences
    )
    return replace(settings, pages=memory.tokens // settings.page_size)
