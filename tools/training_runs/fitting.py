"""Fit efficiencies and networks to measured training runs, and predict others with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from fvflops.devices.devices import Device
from fvflops.plan.step_time.calibration import (
    Efficiency,
    KernelTimer,
    Link,
    Network,
    assume_network,
    find_efficiency,
    find_network,
)
from training_runs.batch import Batch, device_of
from training_runs.prepared import PreparedRun
from training_runs.rows import TrainingRun
from training_runs.time_tables import Point


@dataclass(frozen=True, slots=True)
class Parameter:
    """A fitted figure: its expected value, how far it may be off (of its logarithm), and its limits.

    The expectations keep figures that few runs depend on near values of such devices.
    """

    expected: float
    spread: float
    least: float
    most: float


# Of one software; the names are as in Efficiency, the fractions are of the speed of kernels measured alone.
SOFTWARE: Mapping[str, Parameter] = {
    "matmul": Parameter(0.85, 0.1, 0.4, 1.0),
    "attention": Parameter(0.8, 0.15, 0.05, 1.0),
    "attention_backward": Parameter(0.8, 0.15, 0.05, 1.0),
    "bandwidth": Parameter(0.9, 0.1, 0.3, 1.0),
    "launch": Parameter(5e-5, 0.7, 2e-6, 3e-4),
    "launch_backward": Parameter(3e-5, 0.7, 2e-6, 3e-4),
    "launch_collective": Parameter(5e-5, 1.0, 2e-6, 1e-3),
    "step": Parameter(5e-3, 0.5, 1e-5, 5e-2),
}
# A source that is predicted only: its trials of one layout differ by up to 29 %.
_TRIALS = "BigScience"
# Of one network: bandwidths as fractions of the nominal ones.
NETWORK: Mapping[str, Parameter] = {
    "between_bandwidth": Parameter(0.75, 0.2, 0.1, 0.95),
    "between_latency": Parameter(1e-5, 1.0, 1e-6, 5e-4),
}


@dataclass(frozen=True, slots=True)
class Fit:
    """The fitted figures of a software and its networks."""

    values: Mapping[str, float]

    def efficiency(self) -> Efficiency:
        values: dict[str, Any] = {name: self.values[name] for name in SOFTWARE}
        return Efficiency(**values)

    def network(self, device: Device, gpus_per_node: int, node_gbps: float) -> Network:
        """Return the network of nodes of a device, from the Gbit/s between nodes for each GPU."""
        bandwidth, latency = (self.values[f"between_{name}"] for name in ("bandwidth", "latency"))
        between = Link(node_gbps / 8 * 1e9 * bandwidth, latency)
        known = assume_network(device)
        assert known is not None
        return replace(known, gpus_per_node=gpus_per_node, between=between)

    def point(self) -> Point:
        return self.efficiency(), self.network


def predict_seconds(item: PreparedRun, efficiency: Efficiency, network: Network) -> float:
    """Return the estimated seconds of a step of a run."""
    timer = KernelTimer(device_of(item.run), efficiency)
    simulation = item.step.simulate(timer, network, host_waits=item.host_waits)
    return efficiency.step + simulation.seconds


def fit(batch: Batch, *, chosen: Sequence[int] | None = None) -> Fit:
    """Fit the figures of a software to measured runs: least squares of the relative errors, outliers weighing less.

    `chosen` are the indexes of the runs of the batch to fit to, by default all.
    """
    parameters = {**SOFTWARE, **NETWORK}
    names = list(parameters)
    expected = np.log([parameters[name].expected for name in names])
    spread = np.array([parameters[name].spread for name in names])
    least, most = (np.log([getattr(parameters[name], limit) for name in names]) for limit in ("least", "most"))
    indexes = list(range(len(batch.runs)) if chosen is None else chosen)
    measured = np.log([batch.runs[index].run.seconds or np.nan for index in indexes])

    def residuals_at(points: Sequence[np.ndarray]) -> np.ndarray:
        predicted = batch.predict([_fit_at(names, point).point() for point in points])[:, indexes]
        return np.hstack([(np.log(predicted) - measured) / _SPREAD, (np.array(points) - expected) / spread])

    def jacobian(point: np.ndarray) -> np.ndarray:
        steps = np.where(point + _STEP > most, -_STEP, _STEP)
        base, *moved = residuals_at([point, *(point + np.diag(steps))])
        return ((np.array(moved) - base) / steps[:, None]).T

    found = least_squares(
        lambda point: residuals_at([point])[0],
        expected,
        jac=jacobian,
        loss="soft_l1",
        bounds=(least, most),
        max_nfev=40,
        x_scale=spread,
    )
    return _fit_at(names, found.x)


# Relative error of a prediction at which it starts to weigh less than by its square.
_SPREAD = 0.02
# Of a logarithm, for differences in place of derivatives.
_STEP = 1e-3


def _fit_at(names: Sequence[str], point: np.ndarray) -> Fit:
    return Fit(dict(zip(names, np.exp(point).tolist(), strict=True)))


def cross_validate(batch: Batch, group_of: Callable[[PreparedRun], object], folds: int) -> np.ndarray:
    """Return the predicted seconds of each run by a fit to runs of other groups, such as of other models.

    The groups are divided into folds; all groups of a fold are left out of the fit that predicts their runs.
    """
    groups = sorted({group_of(item) for item in batch.runs}, key=repr)
    predicted = np.zeros(len(batch.runs))
    for fold in range(min(folds, len(groups))):
        held_out = {group for index, group in enumerate(groups) if index % folds == fold}
        is_held_out = np.array([group_of(item) in held_out for item in batch.runs])
        is_used = ~is_held_out & np.array([item.run.publisher != _TRIALS for item in batch.runs])
        found = fit(batch, chosen=np.flatnonzero(is_used).tolist())
        predicted[is_held_out] = batch.predict([found.point()])[0, is_held_out]
    return predicted


def shipped_network(run: TrainingRun) -> Network:
    family = "H100" if run.device == "H200" else run.device.split()[0]
    network = find_network(f"HGX {family} {8 * run.node_gbps:g}G")
    return replace(network, gpus_per_node=run.gpus_per_node)


def predict_shipped(item: PreparedRun) -> float:
    """Return the estimated seconds of a step of a run, by the efficiency and the network of configs/."""
    return predict_seconds(
        item, find_efficiency(device_of(item.run), software=item.run.software), shipped_network(item.run)
    )
