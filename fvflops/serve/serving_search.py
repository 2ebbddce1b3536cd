"""Search for the layout that serves most within limits of latency, on a number of GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

from torch import nn

from fvflops.devices.devices import Device, resolve_device
from fvflops.plan.step_time.calibration import Network
from fvflops.reports.display import Displayed
from fvflops.serve.record_serving import record_serving
from fvflops.serve.serve_model import EngineSetup, ServingLoad, check_layout, prepare_engine
from fvflops.serve.serving_layout import CACHES, ServingLayout
from fvflops.serve.serving_model import ServingError, ServingModel
from fvflops.serve.simulation.request_simulation import Disaggregation, LatencyLimits, simulate
from fvflops.serve.simulation.requests import ClosedLoop, client_requests
from fvflops.serve.simulation.simulation_result import Distribution, SimulationResult
from fvflops.text import explaining_arguments, short_repr

# Requests of each client of a simulation; the first wave starts at once, which the others do not.
_ROUNDS = 4
_LARGEST = 4096  # clients of an engine
# A doubled number of clients that adds less than this share of throughput is the last one.
_LEAST_GAIN = 0.03
_SPLITS = 3  # numbers of prefill engines that are tried in a layout


class ServingPoint(NamedTuple):
    """A layout under a load: `engines` of them, `prefill` of which only compute prompts, and `clients` in all.

    `ttft` and `tpot` are at the limits' percentile. Tokens per second are per GPU and per user.
    """

    layout: ServingLayout
    engines: int
    prefill: int
    clients: int
    ttft: float
    tpot: float
    per_gpu: float
    per_user: float
    requests_per_second: float
    within_limits: bool


class RejectedLayout(NamedTuple):
    """A layout that cannot serve the load, and why."""

    layout: ServingLayout
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ServingSearch(Displayed):
    """Result of a search: the `points` of all layouts, and layouts that do not fit."""

    _report = "fvflops.serve.serving_search_report:serving_search_report"

    model: ServingModel
    device: Device
    gpus: int
    load: ServingLoad
    engine: str
    limits: LatencyLimits
    points: tuple[ServingPoint, ...]
    rejected: tuple[RejectedLayout, ...]

    def best(self, count: int | None = None) -> list[ServingPoint]:
        """Return each layout's point with most throughput within the limits, the best first."""
        found: dict[tuple[ServingLayout, int, int], ServingPoint] = {}
        for point in self.points:
            key = point.layout, point.engines, point.prefill
            if point.within_limits and (key not in found or point.per_gpu > found[key].per_gpu):
                found[key] = point
        return sorted(found.values(), key=lambda point: -point.per_gpu)[:count]

    def front(self) -> list[ServingPoint]:
        """Return the points that no other one exceeds in throughput per GPU and in tokens per second of a user."""
        found: list[ServingPoint] = []
        for point in sorted(self.points, key=lambda point: (-point.per_user, -point.per_gpu)):
            if not found or point.per_gpu > found[-1].per_gpu:
                found.append(point)
        return found

    def __repr__(self) -> str:
        best = self.best(1)
        shown = f"{best[0].per_gpu:.0f} tokens/s/GPU" if best else "nothing within the limits"
        return short_repr(self, self.model.name, f"{self.gpus} × {self.device.name}", shown)


@explaining_arguments
def search_serving(
    model: nn.Module | ServingModel,
    *,
    device: str | Device,
    gpus: int,
    load: ServingLoad | None = None,
    limits: LatencyLimits | None = None,
    precisions: Sequence[tuple[str, str]] = (("bf16", "bf16"), ("fp8", "fp8")),
    engine: str = "vllm",
    network: Network | None = None,
) -> ServingSearch:
    """Return how many tokens per second layouts of `gpus` GPUs serve, by the number of clients.

    Layouts are all divisions by tensor, expert and attention data parallelism, with as many engines as fit on the GPUs,
    each for both phases, or divided into prefill and decode engines. `precisions` are pairs of the weights' and the
    cache's. Each is simulated with 1, 2, 4 ... clients, until more add no throughput or pass the `limits`. Other
    arguments are as for `serve_model`.

    >>> from fvflops.zoo import build
    >>> found = search_serving(build("llama3_8b", device="meta"), device="H100", gpus=1, precisions=[("bf16", "bf16")])
    >>> found.best(1)[0].layout.gpus
    1
    """
    device, load, limits = resolve_device(device), load or ServingLoad(), limits or LatencyLimits(at="p95")
    serving = model if isinstance(model, ServingModel) else record_serving(model, image=load.image)
    load, serving = load.read_by(serving)
    if load.output_tokens < 2:
        raise ServingError("a search compares the time per output token, which answers of one token do not have")
    points: list[ServingPoint] = []
    rejected: list[RejectedLayout] = []
    for layout in _list_layouts(serving, gpus, precisions):
        try:
            check_layout(serving, layout)
            setup = prepare_engine(serving, layout, device, load, engine, network)
            _require_memory(setup)
        except ServingError as error:
            rejected.append(RejectedLayout(layout, str(error)))
            continue
        engines = gpus // layout.gpus
        for prefill in (0, *_list_splits(engines)):
            points += _raise_clients(setup, load, limits, engines, prefill)
    given: dict[str, Any] = {"device": device, "gpus": gpus, "load": load, "engine": engine, "limits": limits}
    return ServingSearch(model=serving, points=tuple(points), rejected=tuple(rejected), **given)


def _list_layouts(model: ServingModel, gpus: int, precisions: Sequence[tuple[str, str]]) -> Iterator[ServingLayout]:
    sizes = [size for size in range(1, gpus + 1) if gpus % size == 0]
    for (weights, cache), tensor, data in product(precisions, sizes, sizes if model.experts else [1]):
        ranks = tensor * data
        for expert in sorted({1, ranks} if model.experts else {1}):
            if gpus % ranks == 0 and (data == 1 or expert == ranks):
                yield ServingLayout(tensor=tensor, data=data, expert=expert, weights=weights, cache=cache)


def _list_splits(engines: int) -> list[int]:
    """Return numbers of engines for prompts, of those in all: about a quarter, half and three quarters."""
    parts = range(1, _SPLITS + 1) if engines > 1 else ()
    return sorted({max(1, engines * part // (_SPLITS + 1)) for part in parts})


def _require_memory(setup: EngineSetup) -> None:
    memory = setup.memory
    if memory.sequences < 1:
        lacking = (memory.sequence - memory.cache) / 1e9
        raise ServingError(f"{lacking:.1f} GB too little on each GPU for one sequence of {memory.length:,} tokens")


def _raise_clients(
    setup: EngineSetup, load: ServingLoad, limits: LatencyLimits, engines: int, prefill: int
) -> Iterator[ServingPoint]:
    """Yield the points of a layout with more and more clients."""
    decoding = engines - prefill
    most = min(_LARGEST, setup.settings.max_sequences, max(1, int(2 * setup.memory.sequences)))
    before = 0.0
    clients = 1
    while clients <= most * (decoding if prefill else 1):
        point = _measure_point(setup, load, limits, clients, engines, prefill)
        yield point
        if not point.within_limits or point.per_gpu < (1 + _LEAST_GAIN) * before:
            return
        before = point.per_gpu
        clients *= 2


def _simulate(setup: EngineSetup, load: ServingLoad, clients: int, prefill: int, decoding: int) -> SimulationResult:
    loop = ClosedLoop(clients, client_requests(max(_ROUNDS * clients, 8), setup.lengths(load)))
    if not prefill:
        return simulate(loop, setup.settings, setup.steps)
    layout, model = setup.steps.layout, setup.steps.model
    # An encoder's tokens are kept by layers of cross attention only.
    kept = [item for item in model.cache if not model.cross_attention or item.kind == "cross attention"]
    token = sum(item.token for item in kept) * CACHES[layout.cache]
    network = setup.steps.kernels.network
    bandwidth = network.between.bandwidth if network is not None else setup.steps.kernels.processor("bf16").bandwidth
    each = token / layout.gpus / bandwidth
    others = Disaggregation(prefill, decoding, setup.settings, setup.steps, seconds_per_token=each)
    return simulate(loop, setup.settings, setup.steps, disaggregation=others)


def _measure_point(
    setup: EngineSetup, load: ServingLoad, limits: LatencyLimits, clients: int, engines: int, prefill: int
) -> ServingPoint:
    result = _simulate(setup, load, clients, prefill, engines - prefill)
    copies = 1 if prefill else engines
    gpus = setup.steps.layout.gpus * engines
    # The first wave arrives at once.
    server = setup.steps.figures.server(load.input_tokens)
    first = Distribution.of(result.requests.time_to_first_token()[clients:]) + server
    further = Distribution.of(result.requests.time_per_output_token()[clients:])
    ttft, tpot = getattr(first, limits.at), getattr(further, limits.at)
    return ServingPoint(
        *(setup.steps.layout, engines, prefill, clients * copies, ttft, tpot),
        per_gpu=result.steady_tokens_per_second() * copies / gpus,
        per_user=1 / further.mean,
        requests_per_second=result.requests_per_second * copies,
        within_limits=ttft <= limits.ttft and tpot <= limits.tpot,
    )
