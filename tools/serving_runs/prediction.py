"""Predict the times of measured serving runs by simulating each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

from fvflops import find_device
from fvflops.plan.step_time.calibration import assume_network
from fvflops.serve.engine_kernels import EngineFigures, EngineKernels
from fvflops.serve.engine_step import EngineStep
from fvflops.serve.serving_memory import find_memory
from fvflops.serve.serving_model import ServingModel
from fvflops.serve.simulation.engine_settings import EngineSettings, engine_settings
from fvflops.serve.simulation.request_simulation import simulate
from fvflops.serve.simulation.requests import ClosedLoop, Lengths, client_requests
from fvflops.serve.simulation.simulation_result import RequestTimes
from serving_runs.launch_scripts import ServingRun

# Simulated requests of a client; the first ones of all clients, sent together, stand for one of `Launch.bursts`.
_REQUESTS_PER_CLIENT = 4
_MIN_REQUESTS = 24


class Times(NamedTuple):
    """Mean seconds to the first token, and for each further one."""

    ttft: float
    tpot: float


@dataclass(frozen=True, slots=True)
class Predictor:
    """Predicts runs of models; steps of a model, GPU and layout are reused by later runs."""

    models: Mapping[str, ServingModel]
    _steps: dict[object, EngineStep] = field(default_factory=dict, init=False, repr=False, compare=False)

    def step(self, run: ServingRun, figures: EngineFigures) -> EngineStep:
        key = run.model, run.gpu, run.layout, run.engine, run.launch.is_asynchronous, figures
        known = self._steps.get(key)
        if known is None:
            kernels = find_kernels(run.gpu, figures.start, run.engine)
            known = self._steps[key] = EngineStep(
                self.models[run.model], run.layout, kernels, figures, is_asynchronous=run.launch.is_asynchronous
            )
        return known

    def settings(self, run: ServingRun) -> EngineSettings:
        """Return the scheduler's settings, with a cache in the memory that the weights leave."""
        changes = dict(run.launch.settings)
        settings = engine_settings(run.engine, 10**9, **changes)
        longest = run.prompt + run.output
        memory = find_memory(
            self.models[run.model],
            run.layout,
            find_device(run.gpu),
            length=longest,
            utilisation=run.launch.utilisation,
            step_tokens=settings.max_batched_tokens,
            step_sequences=min(settings.max_sequences, run.clients),
        )
        tokens = max(0.0, memory.cache) / memory.sequence * longest
        pages = max(int(tokens), longest + settings.page_size) // settings.page_size + 1
        return replace(settings, pages=pages)

    def simulate(self, run: ServingRun, figures: EngineFigures) -> Times:
        """Return the mean times of a closed loop of the run's clients.

        One replica of the attention is simulated: in engines all replicas compute prompts in the same steps.
        """
        clients = max(1, round(run.clients / run.layout.data))
        shortest = run.launch.shortest
        lengths = Lengths(
            (int(shortest * run.prompt), run.prompt), (max(2, int(shortest * run.output)), max(2, run.output))
        )
        count = max(_REQUESTS_PER_CLIENT * clients, _MIN_REQUESTS)
        server = figures.request + figures.token * run.tokens[0]
        load = ClosedLoop(clients, client_requests(count, lengths))
        requests = simulate(load, self.settings(run), self.step(run, figures)).requests
        times = _weighted(requests, clients, run.launch.bursts)
        return Times(times.ttft + server + run.launch.waits * times.tpot, times.tpot)


@lru_cache(maxsize=256)
def find_kernels(gpu: str, start: float, engine: str) -> EngineKernels:
    """Return the kernels of an engine on a GPU, with the network of its systems."""
    device = find_device(gpu)
    return EngineKernels.of(device, assume_network(device), start, engine)


def _weighted(requests: RequestTimes, clients: int, bursts: int) -> Times:
    """Return mean times in which the first requests of all clients have the weight that they have in the benchmark."""
    first = 1 / bursts
    means = []
    for values in (requests.time_to_first_token(), requests.time_per_output_token()):
        early, late = values[:clients], values[clients:]
        means.append(first * sum(early) / len(early) + (1 - first) * sum(late) / len(late))
    return Times(*means)
