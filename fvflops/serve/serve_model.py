"""Estimate the cost of serving a language model on a device: memory, first token, further tokens, and requests."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, takewhile
from typing import Any, NamedTuple

from torch import nn

from fvflops.devices.devices import Device, resolve_device
from fvflops.plan.step_time.calibration import Network, assume_network
from fvflops.reports.display import Displayed
from fvflops.serve.cache_size import sequence_bytes
from fvflops.serve.engine_kernels import EngineKernels, find_engine_figures
from fvflops.serve.engine_step import CLASSES, Chunks, EngineStep
from fvflops.serve.record_serving import record_serving
from fvflops.serve.serving_layout import CACHES, ServingLayout
from fvflops.serve.serving_memory import ServingMemory, find_memory, weights_read
from fvflops.serve.serving_model import ServingError, ServingModel
from fvflops.serve.simulation.engine_settings import EngineSettings, Speculation, engine_settings
from fvflops.serve.simulation.request_simulation import simulate
from fvflops.serve.simulation.requests import ClosedLoop, Lengths, Request, client_requests, poisson_requests
from fvflops.serve.simulation.simulation_result import Distribution, SimulationResult
from fvflops.text import explaining_arguments, record_repr, short_repr
from fvflops.units import format_seconds

# Simulated requests of each client of a closed loop, and of a rate.
_ROUNDS, _ARRIVALS = 6, 2000
# Tokens of a prompt by default.
_PROMPT = 1024
# Lengths of simulated prompts and answers vary by this share, so that clients do not stay in step.
SPREAD = 0.2
# Batches of decoding that are shown: powers of this number, up to the largest that is considered.
_BATCHES, _MOST = 4, 4096


@explaining_arguments
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ServingLoad:
    """Load of an engine: prompts of `input_tokens`, answered with `output_tokens`.

    An encoder reads prompts where the model has one, and the decoder starts from one token of its own.
    `concurrency` clients each send a request after the last one's answer, or requests arrive at random, `rate` a
    second, or are `requests`. `hit_rate` of a prompt is found in the prefix cache. Sequences have at most
    `longest` tokens, by default a prompt and its output; `utilisation` is the part of the GPU's memory that the engine
    takes. With `speculation` simulated requests are decoded speculatively. Each prompt begins with `images`, like the
    one in `image`, which are keyword arguments of a call of the model; their tokens come on top of `input_tokens`, and
    are among the tokens of `requests`.
    """

    input_tokens: int = _PROMPT
    output_tokens: int = 256
    concurrency: int | None = None
    rate: float | None = None
    requests: tuple[Request, ...] = ()
    hit_rate: float = 0.0
    longest: int | None = None
    utilisation: float = 0.9
    speculation: Speculation | None = None
    images: int = 0
    image: Mapping[str, Any] | None = field(default=None, repr=False, compare=False)

    __repr__ = record_repr

    def __post_init__(self) -> None:
        for name in ("input_tokens", "output_tokens"):
            if getattr(self, name) < 1:
                raise ServingError(f"{name} must be at least 1; got {getattr(self, name)}")
        if self.images < 0:
            raise ServingError(f"images must be at least 0; got {self.images}")
        if not 0 < self.utilisation <= 1:
            raise ServingError(f"utilisation must be above 0, and at most 1; got {self.utilisation}")
        if sum(given is not None for given in (self.concurrency, self.rate)) + bool(self.requests) > 1:
            raise ServingError("give one of concurrency, rate and requests")
        prompt, output = max(self._sizes(), key=sum)
        if self.longest is not None and self.longest < prompt + output:
            given = f"a prompt of {prompt} tokens and {output} tokens of output"
            raise ServingError(f"{given} are longer than the longest sequence, {self.longest}")

    def _sizes(self) -> list[tuple[int, int]]:
        """Return the tokens of prompts and of outputs, the first for a single request."""
        simulated = [(request.input_tokens, request.output_tokens) for request in self.requests]
        return [(self.input_tokens, self.output_tokens), *simulated]

    @property
    def length(self) -> int:
        """Tokens of the longest sequence."""
        return self.longest or max(map(sum, self._sizes()))

    @property
    def mean(self) -> int:
        """Tokens of a simulated sequence at its end; of several, the mean."""
        sizes = self._sizes()[bool(self.requests) :]
        return round(sum(map(sum, sizes)) / len(sizes))

    def read_by(self, model: ServingModel) -> tuple[ServingLoad, ServingModel]:
        """Return the load and the model for each other.

        Prompts are as long as a model's encoder reads them, if it has one; of requests, their mean. Tokens of images
        are added, and the model reads as many. Prompts of another length, prompts found in the prefix cache, and
        images for a model that was recorded without raise ServingError.
        """
        if self.images:
            if model.images is None:
                raise ServingError(
                    "images need `image` too: the keyword arguments of a call of the model with an image"
                )
            images = model.images._replace(number=self.images)
            tokens = self.input_tokens + (0 if self.requests else images.number * images.tokens)
            return replace(self, input_tokens=tokens), replace(model, images=images)
        if not model.cross_attention:
            return self, replace(model, images=None)
        if self.hit_rate or any(request.prefix_tokens for request in self.requests):
            raise ServingError(f"{model.name} reads each prompt with its encoder, so no prefix is found in a cache")
        inputs = [request.input_tokens for request in self.requests]
        mean = round(sum(inputs) / len(inputs)) if inputs else model.encoded or self.input_tokens
        given = set(inputs or [self.input_tokens]) - {model.encoded, *(() if inputs else (_PROMPT,))}
        if model.encoded and given:
            reads = f"the encoder of {model.name} reads {model.encoded} tokens of any request"
            raise ServingError(f"{reads}; got {min(given)}")
        return replace(self, input_tokens=mean), model

    def lengths(self, spread: float = 0.0) -> Lengths:
        """Return the lengths of prompts and outputs, which vary by a share."""
        inputs, outputs = (
            (max(1, round(tokens * (1 - spread))), round(tokens * (1 + spread)))
            for tokens in (self.input_tokens, self.output_tokens)
        )
        return Lengths(inputs, outputs, self.hit_rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Time and work of steps: `batch` sequences of `context` tokens; of a prompt, `batch` prompts are 1.

    `bound_seconds` is the time with each kernel at the peak or the bandwidth of the device. `macs` are multiply-adds of
    all GPUs, `weight_bytes` and `cache_bytes` each GPU's reads. `classes` is class → seconds.
    """

    batch: int
    context: int
    seconds: float
    bound_seconds: float
    macs: float
    weight_bytes: float
    cache_bytes: float
    classes: Mapping[str, float]

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of one replica: decoded, or of a prompt."""
        return self.batch / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ServingEstimate(Displayed):
    """Cost of serving: see `serve_model`.

    `prefill` is a prompt alone, `decode` steps by batch, at a context of the prompt and half of the output.
    `compute_bound` is the smallest batch whose decoding is compute-bound, None without one up to 4,096. `requests`
    is the simulation of the load, None without a load.
    """

    _report = "fvflops.serve.serve_report:serve_report"

    model: ServingModel
    device: Device
    layout: ServingLayout
    load: ServingLoad
    engine: str
    settings: EngineSettings
    memory: ServingMemory
    prefill: Phase
    decode: tuple[Phase, ...]
    compute_bound: int | None
    requests: SimulationResult | None
    sources: tuple[str, ...] = field(default=())

    @property
    def time_to_first_token(self) -> float:
        """Seconds from a request to its first token, of a prompt alone on the engine, with the server's own time."""
        return self.prefill.seconds + self.server_seconds

    @property
    def server_seconds(self) -> float:
        """Seconds that the server takes for a request before it reaches the engine."""
        return find_engine_figures(self.engine).server(self.load.input_tokens)

    def latencies(self) -> dict[str, Distribution]:
        """Return the times of requests under the load, the server's included; empty without a load.

        They are `ttft`, time to first token, `tpot`, time per output token, and `end_to_end`.
        """
        if self.requests is None:
            return {}
        server, result = self.server_seconds, self.requests
        return {"ttft": result.ttft + server, "tpot": result.tpot, "end_to_end": result.end_to_end + server}

    @property
    def time_per_output_token(self) -> float:
        """Seconds between tokens of one sequence alone."""
        return self.decode[0].seconds

    def cost_of_tokens(
        self, tokens: float = 1e6, *, price: float | None = None, watts: float | None = None
    ) -> TokenCost:
        """Return the cost of `tokens` output tokens under the load: `price` of a GPU hour, `watts`, the power of a GPU.

        Without a load it raises ServingError.
        """
        if self.requests is None:
            raise ServingError("a cost of tokens needs a load that fits: give concurrency, rate or requests")
        hours = tokens / self.requests.steady_tokens_per_second() * self.layout.gpus / 3600
        return TokenCost(hours, price and price * hours, watts and watts * hours / 1000)

    def __repr__(self) -> str:
        first, further = format_seconds(self.time_to_first_token), format_seconds(self.time_per_output_token)
        return short_repr(self, self.model.name, self.device.name, f"first token {first}", f"then {further}")


class TokenCost(NamedTuple):
    """Cost of output tokens: GPU hours, the price, and the energy in kilowatt hours; None where it was not asked."""

    gpu_hours: float
    cost: float | None
    kilowatt_hours: float | None


@explaining_arguments
def serve_model(
    model: nn.Module | ServingModel,
    *,
    device: str | Device,
    layout: ServingLayout | None = None,
    load: ServingLoad | None = None,
    engine: str = "vllm",
    network: Network | None = None,
    name: str = "",
) -> ServingEstimate:
    """Return the cost of serving a language model on a device: memory, time of tokens, and requests.

    `model` is as for `generation_cost`, and may be on the meta device; or what `record_serving` returned, which is
    shared by several estimates. `device` is a name, as for `mfu`, or a Device. `layout` says how GPUs divide the model,
    and in which precision they keep weights and cache; `network` links them, by default the one of the device's
    systems. `engine` is "vllm", "sglang" or "trtllm". Times rest on measured kernels (configs/kernel_figures.yaml).
    A model that cannot be served, a layout that does not divide it, and weights that do not fit raise ServingError.

    >>> from fvflops.zoo import build
    >>> estimate = serve_model(build("llama3_8b", device="meta"), device="H100")
    >>> estimate.memory.token, estimate.time_per_output_token > estimate.decode[0].bound_seconds
    (131072.0, True)
    """
    load, layout = load or ServingLoad(), layout or ServingLayout()
    serving = model if isinstance(model, ServingModel) else record_serving(model, name, image=load.image)
    load, serving = load.read_by(serving)
    check_layout(serving, layout)
    setup = prepare_engine(serving, layout, resolve_device(device), load, engine, network)
    return _estimate(setup, load, engine)


class EngineSetup(NamedTuple):
    """An engine with a model: the times of its steps, the memory of each GPU, and its settings.

    Without room for a cache the settings have one page.
    """

    steps: EngineStep
    memory: ServingMemory
    settings: EngineSettings

    def lengths(self, load: ServingLoad) -> Lengths:
        """Return the lengths of a load's requests, which vary unless an encoder reads as many tokens of each."""
        fixed, settings = self.steps.model.encoded, self.settings
        most = (settings.pages - 1) * settings.page_size / load.mean - 1  # so that each fits
        lengths = load.lengths(max(0.0, min(SPREAD, most)))
        return replace(lengths, input_tokens=(fixed, fixed)) if fixed else lengths


def prepare_engine(
    model: ServingModel, layout: ServingLayout, device: Device, load: ServingLoad, engine: str, network: Network | None
) -> EngineSetup:
    """Return an engine with a model in a layout; arguments are as for `serve_model`."""
    if engine == "trtllm" and device.vendor not in ("", "NVIDIA"):
        raise ServingError(f"TensorRT-LLM runs on NVIDIA's GPUs only, not on {device.name}: use vllm or sglang")
    network = network or (assume_network(device) if layout.gpus > 1 else None)
    figures = find_engine_figures(engine)
    drafted = load.speculation.draft_tokens if load.speculation else 0
    kernels = EngineKernels.of(device, network, figures.start, engine)
    encoded = load.input_tokens if model.cross_attention else 0
    steps = EngineStep(model, layout, kernels, figures, draft_tokens=drafted, encoded=encoded)
    settings = engine_settings(engine, 10**9, **_settings_of(engine, device))
    verified = max(1, settings.max_batched_tokens // (1 + drafted))  # sequences of which a step can
    settings = replace(settings, max_sequences=min(settings.max_sequences, verified))
    memory = find_memory(
        model,
        layout,
        device,
        length=(load.longest or encoded + load.output_tokens) if encoded else load.length,
        utilisation=load.utilisation,
        step_tokens=settings.max_batched_tokens,
        step_sequences=settings.max_sequences,
        encoded=encoded,
    )
    if encoded:  # engines run an encoder on whole prompts
        settings = replace(settings, chunked_prefill=False, prefix_caching=False)
    # Bytes a token depend on the length where layers keep a window or a state: the load's own, not the longest.
    pages = int(max(0.0, memory.cache) / _cache_bytes(steps, 1, load.mean) * load.mean / settings.page_size)
    # Each batch of a pipeline has room for a longest sequence at least.
    stages = max(1, min(layout.pipeline, int(memory.sequences / layout.data)))
    settings = replace(settings, pages=max(1, pages), replicas=layout.data, stages=stages, speculation=load.speculation)
    return EngineSetup(steps, memory, settings)


def check_layout(model: ServingModel, layout: ServingLayout) -> None:
    """Raise ServingError where a layout does not divide a model's heads, experts and layers."""
    tensor = layout.tensor
    for attention in (*model.attention, *model.cross_attention, *model.encoder_attention):
        if attention.heads % tensor:
            raise ServingError(f"tensor parallelism of {tensor} must divide the {attention.heads} heads of attention")
        keys = attention.cache.heads
        if keys and tensor % keys and keys % tensor:
            raise ServingError(f"tensor parallelism of {tensor} must divide the {keys} heads of keys, or be a multiple")
    for layer in model.experts:
        if layer.experts % layout.expert:
            raise ServingError(f"{layout.expert} ranks of experts must divide the {layer.experts} experts of a layer")
    if layout.expert > 1 and not model.experts:
        raise ServingError(f"{model.name} has no experts to divide among {layout.expert} ranks")
    if layout.pipeline > model.layers:
        raise ServingError(f"{layout.pipeline} stages of a pipeline are more than the {model.layers} layers")


def _settings_of(engine: str, device: Device) -> dict[str, Any]:
    """Return the settings that an engine chooses by the GPU's memory: vLLM's of its server, from 70 GiB."""
    is_large = device.memory is not None and device.memory >= 70 * 2**30
    return {"max_batched_tokens": 8192, "max_sequences": 1024} if engine == "vllm" and is_large else {}


def _estimate(setup: EngineSetup, load: ServingLoad, engine: str) -> ServingEstimate:
    steps, memory, settings = setup
    model, kernels = steps.model, steps.kernels
    bound = steps.bound()
    context = load.input_tokens + load.output_tokens // 2
    fitting = min(_MOST, max(1, int(memory.cache / _cache_bytes(steps, 1, context))))
    batches = list(takewhile(lambda batch: batch <= fitting, (_BATCHES**power for power in count())))
    return ServingEstimate(
        model=model,
        device=kernels.device,
        layout=steps.layout,
        load=load,
        engine=engine,
        settings=settings,
        memory=memory,
        prefill=_prefill(steps, bound, load.input_tokens, settings),
        decode=tuple(_decode(steps, bound, batch, context) for batch in batches),
        compute_bound=_find_compute_bound(steps, context),
        requests=_simulate(setup, load) if memory.sequences >= 1 else None,
        sources=(
            kernels.figures.source if kernels.figures else "peaks of the device",
            f"{engine}'s own time {steps.figures.source}",
        ),
    )


def _prefill(steps: EngineStep, bound: EngineStep, prompt: int, settings: EngineSettings) -> Phase:
    """Return the phase of one prompt, in chunks of at most the tokens of a step if an encoder does not read it."""
    budget = prompt if steps.encoded else settings.max_batched_tokens
    chunks = [(((min(budget, prompt - start), start),), 0, 0.0) for start in range(0, prompt, budget)]
    weight_bytes = len(chunks) * weights_read(steps.model, steps.layout, 1.0, encodes=True)
    return _sum_steps(steps, bound, chunks, batch=1, context=prompt, weight_bytes=weight_bytes)


def _decode(steps: EngineStep, bound: EngineStep, batch: int, context: int) -> Phase:
    """Return the phase of a step of `batch` sequences on each replica."""
    touched = [1 - (1 - layer.topk / layer.experts) ** (batch * steps.layout.data) for layer in steps.model.experts]
    weight_bytes = weights_read(steps.model, steps.layout, touched[0] if touched else 1.0)
    step = (), batch, float(batch * context)
    return _sum_steps(steps, bound, [step], batch=batch, context=context, weight_bytes=weight_bytes)


def _sum_steps(
    steps: EngineStep, bound: EngineStep, sizes: Sequence[tuple[Chunks, int, float]], *, batch: int, **known: Any
) -> Phase:
    """Return the phase of steps of some (chunks, decoding sequences, cached tokens)."""
    works = [steps.work(*size) for size in sizes]
    parts = [steps.by_class(work) for work in works]
    classes = {name: sum(part[name] for part in parts) for name in CLASSES}
    return Phase(
        batch=batch,
        seconds=sum(classes.values()),
        bound_seconds=sum(bound.seconds(*size) for size in sizes),
        macs=sum(map(steps.macs, works)),
        cache_bytes=_cache_bytes(steps, batch, known["context"]),
        classes=classes,
        **known,
    )


def _cache_bytes(steps: EngineStep, batch: int, context: int) -> float:
    layout = steps.layout
    element, encoded = CACHES[layout.cache], min(steps.encoded, context)
    each = sequence_bytes(steps.model.cache, context, element, ranks=layout.tensor, encoded=encoded)
    return batch * each / layout.pipeline


def _find_compute_bound(steps: EngineStep, context: int) -> int | None:
    """Return the smallest batch whose multiply-adds take longer than its bytes; None where none does up to 4,096."""
    computing, reading = steps.bound(bandwidth=math.inf), steps.bound(peak=math.inf)

    def is_bound(batch: int) -> bool:
        tokens = batch * context
        return computing.seconds((), batch, tokens) >= reading.seconds((), batch, tokens)

    below = bisect_left(range(1, _MOST + 1), True, key=is_bound)
    return below + 1 if below < _MOST else None


def _simulate(setup: EngineSetup, load: ServingLoad) -> SimulationResult | None:
    lengths = setup.lengths(load)
    requests: Iterable[Request] | ClosedLoop = load.requests
    if load.rate is not None:
        requests = poisson_requests(load.rate, _ARRIVALS, lengths)
    elif load.concurrency is not None:
        requests = ClosedLoop(load.concurrency, client_requests(load.concurrency * _ROUNDS, lengths))
    return simulate(requests, setup.settings, setup.steps) if requests else None
