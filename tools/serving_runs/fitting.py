"""Fit the figures of an engine to measured runs, in closed form around a simulation of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import OptimizeResult, least_squares

from fvflops.serve.engine_kernels import EngineFigures
from fvflops.serve.engine_step import Work
from serving_runs.launch_scripts import ServingRun
from serving_runs.prediction import Predictor, Times

Array = NDArray[np.float64]


class Bounds(NamedTuple):
    """Lowest and highest value of a figure, and the mean and standard deviation that it has without runs."""

    lowest: float
    highest: float
    mean: float
    deviation: float


_MS, _US = 1e-3, 1e-6
FITTED: dict[str, Bounds] = {
    "start": Bounds(0, 1.2, 0.6, 0.2),
    "kernel": Bounds(0, 8 * _US, 1.5 * _US, 1 * _US),
    "rendezvous": Bounds(0, 30 * _US, 4 * _US, 3 * _US),
    "step": Bounds(0, 6 * _MS, 0.1 * _MS, 0.2 * _MS),
    "sequence": Bounds(0, 60 * _US, 1 * _US, 3 * _US),
    "synchronous": Bounds(0, 10 * _MS, 1 * _MS, 1 * _MS),
    "synchronous_sequence": Bounds(0, 100 * _US, 10 * _US, 10 * _US),
    "launch": Bounds(0, 60 * _US, 30 * _US, 15 * _US),
    "computing": Bounds(0.7, 2, 1.12, 0.1),
    "experts": Bounds(0.7, 4, 1.8, 0.4),
    "request": Bounds(0, 0.3, 0.02, 0.03),
    "token": Bounds(0, 100 * _US, 4 * _US, 3 * _US),
}
_PRIOR = 2.0
_LAUNCHES = (5 * _US, 15 * _US, 30 * _US, 45 * _US)
# Weights of residuals, which are relative errors: of TTFT, and how much larger groups of runs count.
_TTFT = 0.35
_SCALE = 5.0
_CROWD = 0.3


# Linear coefficients of the times of a run by figure: the seconds of kernels of a step that only decodes, without their
# start times, and these; its launches, collectives and sequences, and whether the engine waits for it; what a prompt
# adds to a step; the prompts for each output token, and 1 where a step with prompts also decodes.
_NAMES = "decode starts launches collectives batch synchronous computing experts others share mixed prompt waits"


def _times(features: Any, value: Mapping[str, float]) -> tuple[Array, Array]:
    """Return the seconds of steps that only decode, and a prompt's addition to one, by name → figure."""
    decode = features.decode + value["start"] * features.starts
    decode = decode + value["kernel"] * features.launches + value["rendezvous"] * features.collectives
    decode = decode + value["step"] + value["sequence"] * features.batch
    decode = decode + features.synchronous * (value["synchronous"] + value["synchronous_sequence"] * features.batch)
    prompt = value["computing"] * features.computing + value["experts"] * features.experts + features.others
    waiting = value["launch"] * features.launches - features.mixed * decode
    return decode, np.maximum(prompt, waiting)


def find_features(predictor: Predictor, runs: Sequence[ServingRun]) -> Any:
    """Return the features of each run, an array of records."""
    rows = [tuple(_features_of(predictor, run)) for run in runs]
    return np.array(rows, dtype=[(name, float) for name in _NAMES.split()]).view(np.recarray)


def _features_of(predictor: Predictor, run: ServingRun) -> list[float]:
    settings = predictor.settings(run)
    prompt, output = run.tokens
    fitting = settings.pages * settings.page_size / (prompt + output)
    batch = max(1, round(min(run.clients / run.layout.data, settings.max_sequences, fitting)))
    cached = batch * (prompt + output / 2)
    free, full = (predictor.step(run, EngineFigures(start=start)) for start in (0.0, 1.0))
    decode = Work((), batch, cached)
    chunk = ((round(prompt), 0),)
    mixed = Work(chunk, batch, cached) if settings.mixed else Work(chunk)
    before = full.by_class(decode) if settings.mixed else dict.fromkeys(full.by_class(decode), 0.0)
    added = {name: seconds - before[name] for name, seconds in full.by_class(mixed).items()}
    computing, experts = added["products"] + added["attention"], added["experts"]
    return [
        free.seconds((), batch, cached),
        full.seconds((), batch, cached) - free.seconds((), batch, cached),
        full.launches,
        full.collectives,
        batch,
        0.0 if run.launch.is_asynchronous else 1.0,
        computing,
        experts,
        sum(added.values()) - computing - experts,
        batch / output,
        float(settings.mixed),
        prompt,
        run.launch.waits,
    ]


@dataclass(frozen=True, slots=True)
class Batch:
    """Runs of an engine, their features, and their simulated times by some figures, around which fits are."""

    runs: Sequence[ServingRun]
    features: Any
    figures: EngineFigures
    simulated: Sequence[Times]

    def take(self, chosen: Sequence[int]) -> Batch:
        return Batch(
            [self.runs[index] for index in chosen],
            self.features[list(chosen)],
            self.figures,
            [self.simulated[index] for index in chosen],
        )

    def predict(self, figures: EngineFigures) -> tuple[Array, Array]:
        """Return the times to the first and to each further token by figures near the simulation's."""
        return self._estimator()(point_of(figures))

    def _estimator(self) -> Callable[[Array], tuple[Array, Array]]:
        features = self.features
        decode, prompt = _times(features, _values(point_of(self.figures)))
        mixed = decode + features.share * prompt
        tpot = np.array([times.tpot for times in self.simulated])
        server = self.figures.request + self.figures.token * features.prompt + features.waits * tpot
        engine = np.maximum(1e-4, np.array([times.ttft for times in self.simulated]) - server)

        def estimate(point: Array) -> tuple[Array, Array]:
            value = _values(point)
            new_decode, new_prompt = _times(features, value)
            new_tpot = tpot * (new_decode + features.share * new_prompt) / mixed
            new_engine = engine * (new_decode + new_prompt) / (decode + prompt)
            server = value["request"] + value["token"] * features.prompt + features.waits * new_tpot
            return new_engine + server, new_tpot

        return estimate

    def fit(self, source: str) -> EngineFigures:
        """Return the figures with the least errors; each has a prior, which holds where no run depends on it."""
        estimate = self._estimator()
        ttft = np.array([run.ttft for run in self.runs])
        tpot = np.array([run.tpot for run in self.runs])
        weights = _weights(self.runs)
        bounds = np.array(list(FITTED.values()))

        def residuals(point: Array) -> Array:
            found_ttft, found_tpot = estimate(point)
            return np.concatenate(
                [
                    _SCALE * weights * (found_tpot / tpot - 1),
                    _SCALE * _TTFT * weights * np.log(found_ttft / ttft),
                    _PRIOR * (point - bounds[:, 2]) / bounds[:, 3],
                ]
            )

        def search(launch: float) -> OptimizeResult:
            first = np.clip(point_of(replace(self.figures, launch=launch)), bounds[:, 0], bounds[:, 1])
            limits = bounds[:, 0], bounds[:, 1]
            return least_squares(
                residuals, first, bounds=limits, x_scale=bounds[:, 3], loss="soft_l1", f_scale=0.3, max_nfev=60
            )

        # Below the time of kernels a launch changes nothing, so that no step leads from there.
        found = min(map(search, _LAUNCHES), key=lambda item: item.cost)
        return EngineFigures(**_values(found.x), source=source)


def _values(point: Array) -> dict[str, float]:
    return dict(zip(FITTED, point.tolist(), strict=True))


def point_of(figures: EngineFigures) -> Array:
    return np.array([getattr(figures, name) for name in FITTED])


def _weights(runs: Sequence[ServingRun]) -> Array:
    """Return the weight of each run: runs of a model, GPU and precision count less the more there are."""
    keys = [(run.model, run.gpu, run.layout.weights) for run in runs]
    return np.array([keys.count(key) ** -_CROWD for key in keys])
