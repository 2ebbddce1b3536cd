"""Report of a serving estimate: memory, cache, tokens, requests, and the command that starts the engine."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from fvflops.devices.measured_errors import expect_serving_error
from fvflops.reports.document import Command, Document, Items, Part, Table, data_only, number_column, text_column
from fvflops.reports.escaping import plain_name
from fvflops.serve.engine_step import CLASSES
from fvflops.serve.serve_model import Phase, ServingEstimate
from fvflops.serve.serving_layout import CACHES
from fvflops.serve.serving_memory import ServingMemory
from fvflops.serve.simulation.simulation_result import Distribution, SimulationResult
from fvflops.text import record_data
from fvflops.units import (
    format_bytes,
    format_parameters,
    format_quantity,
    format_seconds,
    format_share,
    format_short,
    format_thousands,
)

ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "trtllm": "TensorRT-LLM"}
_COMMANDS = {"vllm": "vllm serve", "sglang": "python -m sglang.launch_server --model-path", "trtllm": "trtllm-serve"}
# Setting → its option of each engine, in the order of ENGINES, "" where there is none.
_OPTIONS = {
    "tensor": ("--tensor-parallel-size", "--tp-size", "--tp_size"),
    "pipeline": ("--pipeline-parallel-size", "--pp-size", "--pp_size"),
    "data": ("--data-parallel-size", "--enable-dp-attention --dp-size", ""),
    "expert": ("--enable-expert-parallel", "--ep-size", "--ep_size"),
    "length": ("--max-model-len", "--context-length", "--max_seq_len"),
    "utilisation": ("--gpu-memory-utilization", "--mem-fraction-static", "--kv_cache_free_gpu_memory_fraction"),
    "cache": ("--kv-cache-dtype", "--kv-cache-dtype", ""),
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
    options = {name: options[list(ENGINES).index(engine)] for name, options in _OPTIONS.items()}
    shown = [
        f"{options[name]} {value}".strip() for name, value in values.items() if value is not None and options[name]
    ]
    return " ".join([_COMMANDS[engine], shlex.quote(model), *shown])


_COSTS = ("{:.3g} GPU hours", "a cost of {:.3g}", "{:.3g} kWh")
# A smaller share of the requests that arrive, in the time until all are done, shows that a queue grows.
_SERVED = 0.9
_MEMORY = ("total", "usable", "weights", "activations", "graphs", "reserve", "cache", "token", "sequence", "length")


def serve_report(
    estimate: ServingEstimate, *, name: str = "", price: float | None = None, watts: float | None = None
) -> Document:
    """Return the report of an estimate for the model `name`; `price` and `watts` are as for `cost_of_tokens`."""
    subject = plain_name(name or estimate.model.name)
    parts: list[Part] = [_judge(estimate), Items("Memory of each GPU:", list(_list_memory(estimate)))]
    parts += [_tabulate_cache(estimate), _tabulate_steps(estimate), _explain_bound(estimate)]
    parts.append(expect_serving_error(estimate.engine, estimate.device))
    if estimate.requests is not None:
        items = list(_list_requests(estimate, estimate.requests))
        if price is not None or watts is not None:
            cost = zip(_COSTS, estimate.cost_of_tokens(price=price, watts=watts), strict=True)
            shown = [form.format(value) for form, value in cost if value is not None]
            items.append(f"a million output tokens take {', '.join(shown)}")
        parts += [Items(f"{_describe_load(estimate)}:", items), _tabulate_latency(estimate)]
    if estimate.memory.sequences >= 1:
        parts.append(Command("To start the engine so:", launch_command(estimate, name.partition(":")[2] or "MODEL")))
    parts.append(Items("Assumptions:", list(_list_assumptions(estimate))))
    first, further = format_seconds(estimate.time_to_first_token), format_seconds(estimate.time_per_output_token)
    gpus = f"{estimate.layout.gpus} × " if estimate.layout.gpus > 1 else ""
    device = f"{gpus}{plain_name(estimate.device.name)}"
    title = f"{subject} on {device}: first token after {first}, then {further} a token"
    about = record_data(estimate, "model=model.name", "device=device.name", "engine") | asdict(estimate.layout)
    return Document("serve", title, parts, main="steps", data=_encode(estimate), about=about)


def _judge(estimate: ServingEstimate) -> str:
    memory, length = estimate.memory, format_thousands(estimate.memory.length)
    tokens = format_thousands(memory.tokens)
    if memory.cache <= 0:
        missing = format_bytes(memory.weights + memory.activations + memory.graphs + memory.reserve - memory.usable)
        return f"It does not fit: each GPU lacks {missing} without any cache. More GPUs or smaller weights are needed."
    if memory.sequences < 1:
        remedy = "A shorter sequence, more GPUs, or a cache in fp8 fit."
        return f"No sequence of {length} tokens fits: the cache holds {tokens} tokens. {remedy}"
    sequences = format_quantity(int(memory.sequences), "sequence")
    return f"It fits: {tokens} tokens of cache, which are {sequences} of {length} tokens."


def _list_memory(estimate: ServingEstimate) -> Iterator[str]:
    memory, layout = estimate.memory, estimate.layout
    used = format_share(estimate.load.utilisation)
    yield f"{format_bytes(memory.total)}, of which the engine takes {used}: {format_bytes(memory.usable)}"
    parameters = format_parameters(estimate.model.parameters)
    yield f"weights {format_bytes(memory.weights)}: {parameters} parameters in {layout.weights}"
    rest = memory.graphs + memory.reserve
    yield f"activations of the largest step {format_bytes(memory.activations)}, context and graphs {format_bytes(rest)}"
    yield f"cache {format_bytes(max(0.0, memory.cache))} in {layout.cache}: {format_bytes(memory.token)} a token"


def _tabulate_cache(estimate: ServingEstimate) -> Table:
    element, ranks = CACHES[estimate.layout.cache], estimate.layout.tensor
    columns = (
        text_column("layers"),
        number_column("count", "number"),
        number_column("token_bytes", "bytes a token", form=format_bytes),
        number_column("window", "tokens kept", form=lambda tokens: format_thousands(tokens) if tokens else "all"),
        number_column("state_bytes", "state", form=format_bytes),
    )
    rows = []
    for layer, count in Counter(estimate.model.cache).items():
        shown = layer._replace(window=0)
        token = count * (shown.nbytes(1, element, ranks=ranks) - shown.nbytes(0, element, ranks=ranks))
        heads = f", {format_quantity(layer.heads, 'head')} of keys" if layer.heads and layer.kind != "latent" else ""
        rows.append((layer.kind + heads, count, token, layer.window, count * layer.state / ranks))
    return Table("cache", columns, rows, noun="kind of layer")


def _tabulate_steps(estimate: ServingEstimate) -> Table:
    gpus = estimate.layout.gpus
    columns = (
        text_column("step"),
        number_column("batch"),
        number_column("context"),
        number_column("seconds", "time", form=format_seconds),
        number_column("bound_seconds", "bound", form=format_seconds),
        number_column("user", "tok/s/user", form=format_short),
        number_column("gpu", "tok/s/GPU", form=format_short),
        text_column("longest", "most time in"),
        *data_only([number_column(name) for name in CLASSES], CLASSES),
    )
    rows = [_row("prompt", estimate.prefill, gpus, 1)]
    rows += [_row("decode", phase, gpus, estimate.layout.data) for phase in estimate.decode]
    return Table("steps", columns, rows, noun="step")


def _row(step: str, phase: Phase, gpus: int, replicas: int) -> tuple[Any, ...]:
    tokens = phase.context if step == "prompt" else phase.batch
    user = None if step == "prompt" else 1 / phase.seconds
    longest = max(phase.classes, key=lambda name: phase.classes[name])
    times = (phase.seconds, phase.bound_seconds, user, replicas * tokens / phase.seconds / gpus)
    return (step, phase.batch, phase.context, *times, longest, *(phase.classes[name] for name in CLASSES))


def _explain_bound(estimate: ServingEstimate) -> str:
    batch = estimate.compute_bound
    if batch is None:
        return "Decoding is memory-bound at every batch up to 4,096: the cache grows with the batch."
    return f"Decoding is memory-bound below a batch of {format_thousands(batch)}, and compute-bound from there on."


def _describe_load(estimate: ServingEstimate) -> str:
    load = estimate.load
    inputs, outputs = format_thousands(load.input_tokens), format_thousands(load.output_tokens)
    lengths = f"prompts of about {inputs} tokens, {outputs} out"
    if load.requests:
        return f"{format_quantity(len(load.requests), 'request')} of a file"
    if load.rate is not None:
        return f"{load.rate:g} requests a second, {lengths}"
    return f"{format_quantity(load.concurrency or 0, 'client')} one request after the other, {lengths}"


def _tabulate_latency(estimate: ServingEstimate) -> Table:
    columns = (text_column("latency"), *(number_column(share, form=format_seconds) for share in _SHARES))
    rows = [(_LATENCIES[key], *_shares(times).values()) for key, times in estimate.latencies().items()]
    return Table("latency", columns, rows, noun="latency")


_SHARES = ("mean", "p50", "p90", "p95", "p99")
_LATENCIES = {"ttft": "time to first token", "tpot": "time per output token", "end_to_end": "whole request"}


def _shares(times: Distribution) -> dict[str, float | None]:
    """Return the mean and percentiles, None where no request has such a time, as per output token with one token."""
    return {share: None if math.isnan(value) else value for share, value in record_data(times, *_SHARES).items()}


def _list_requests(estimate: ServingEstimate, result: SimulationResult) -> Iterator[str]:
    tokens, requests = result.steady_tokens_per_second(), result.steady_requests_per_second()
    each = format_short(tokens / estimate.layout.gpus)
    yield f"throughput {format_short(tokens)} tokens/s, {each} a GPU; {requests:.3g} requests/s"
    if estimate.load.rate is not None and result.requests_per_second < _SERVED * estimate.load.rate:
        yield "more requests arrive than are served: the longer they do, the longer is the time to first token"
    busy, pages = format_share(result.utilisation), format_share(result.peak_pages / result.pages)
    yield f"busy {busy} of the time; at most {pages} of the cache in use; {result.preemptions} preemptions"


def _list_assumptions(estimate: ServingEstimate) -> Iterator[str]:
    settings = estimate.settings
    tokens, sequences = format_thousands(settings.max_batched_tokens), format_thousands(settings.max_sequences)
    engine = ENGINES[estimate.engine]
    yield f"{engine}: at most {tokens} tokens and {sequences} sequences a step, CUDA graphs for decoding"
    yield f"times: {'; '.join(estimate.sources)}"
    if 0 < (positions := estimate.model.positions) < estimate.load.length:
        longest, most = format_thousands(estimate.load.length), format_thousands(positions)
        yield (
            f"sequences of {longest} tokens are longer than the {most} of the model's configuration: engines refuse "
            "them without rope scaling, unless told to take them (VLLM_ALLOW_LONG_MAX_MODEL_LEN=1)"
        )
    server = format_seconds(estimate.server_seconds)
    yield f"the server takes {server} for a request before the engine, which first tokens include"
    yield "bound: each kernel at the device's peak or bandwidth, without any overhead"
    if estimate.layout.pipeline > 1:
        batches = format_quantity(settings.stages, "batch")
        yield f"a step is one batch's pass through the stages of the pipeline; a load has {batches} in them at once"
    if estimate.load.concurrency:
        yield "all clients send their first requests at once, which the highest percentiles show"
    if estimate.model.experts:
        yield "each token chooses its experts at random, some more often than others"
    if images := estimate.model.images:
        each = format_quantity(images.tokens, "token")
        read = format_seconds(estimate.prefill.classes["encoder"])
        yield (
            f"prompts begin with {format_quantity(images.number, 'image')} of {each}, which the encoder reads in "
            f"bf16: {read}; the host's work on images is not included"
        )
    elif estimate.model.reads_images:
        yield "prompts of text: the image encoder is in the weights, and does not run; --images adds images"
    if estimate.model.encoder:
        length = format_thousands(estimate.load.input_tokens)
        yield f"the encoder reads prompts of {length} tokens whole; the decoder starts from one token"


def _encode(estimate: ServingEstimate) -> dict[str, Any]:
    return {
        "memory": {**record_data(estimate.memory, *_MEMORY), "tokens": estimate.memory.tokens},
        "cache": [{"count": count, **layer._asdict()} for layer, count in Counter(estimate.model.cache).items()],
        **record_data(estimate, "prefill", "decode"),
        "images": record_data(images, "number", "tokens", "macs") if (images := estimate.model.images) else None,
        "compute_bound_batch": estimate.compute_bound,
        "error": expect_serving_error(estimate.engine, estimate.device),
        "requests": None if estimate.requests is None else _encode_requests(estimate, estimate.requests),
    }


def _encode_requests(estimate: ServingEstimate, result: SimulationResult) -> dict[str, Any]:
    times = {name: _shares(item) for name, item in estimate.latencies().items()}
    names = ("steady_tokens_per_second", "steady_requests_per_second")
    steady = {name: getattr(result, name)() for name in names}
    rates = ("requests_per_second", "output_tokens_per_second", "utilisation", "preemptions", "peak_pages", "pages")
    return {**times, **steady, **record_data(result, *rates)}
