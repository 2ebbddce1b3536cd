"""Fit efficiencies and networks to measured training runs, and predict others with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


# Parameters of a software stack, named as in Efficiency (fractions of the speed of kernels measured alone), and of the
# links between its nodes: the bandwidth is a fraction of the nominal one.
PARAMETERS: Mapping[str, Parameter] = {
    "matmul": Parameter(0.85, 0.1, 0.4, 1.0),
    "attention": Parameter(0.8, 0.15, 0.05, 1.0),
    "attention_backward": Parameter(0.8, 0.15, 0.05, 1.0),
    "bandwidth": Parameter(0.9, 0.1, 0.3, 1.0),
    "launch": Parameter(5e-5, 0.7, 2e-6, 3e-4),
    "launch_backward": Parameter(3e-5, 0.7, 2e-6, 3e-4),
    "launch_collective": Parameter(5e-5, 1.0, 2e-6, 1e-3),
    "step": Parameter(5e-3, 0.5, 1e-5, 5e-2),
    "between_bandwidth": Parameter(0.75, 0.2, 0.1, 0.95),
    "between_latency": Parameter(1e-5, 1.0, 1e-6, 5e-4),
}
# A source that is predicted only: its trials of one layout differ by up to 29 %.
_TRIALS = "BigScience"


def point_of(values: Mapping[str, float]) -> Point:
    """Return an efficiency, and the network of nodes of a device by the Gbit/s between nodes for each GPU."""

    def network(device: Device, gpus_per_node: int, node_gbps: float) -> Network:
        between = Link(node_gbps / 8 * 1e9 * values["between_bandwidth"], values["between_latency"])
        known = assume_network(device)
        assert known is not None
        return replace(known, gpus_per_node=gpus_per_node, between=between)

    of_software: dict[str, Any] = {name: value for name, value in values.items() if "between" not in name}
    return Efficiency(**of_software), network


def predict_seconds(item: PreparedRun, efficiency: Efficiency, network: Network) -> float:
    """Return the estimated seconds of a step of a run."""
    timer = KernelTimer(device_of(item.run), efficiency)
    simulation = item.step.simulate(timer, network, host_waits=item.host_waits)
    return efficiency.step + simulation.seconds


# Relative error of a prediction at which it starts to weigh less than by its square.
_SPREAD = 0.02
# Step of a logarithm, for differences in place of derivatives.
_STEP = 1e-3


def fit(batch: Batch, chosen: Sequence[int] | None = None) -> dict[str, float]:
    """Fit a software stack's figures to measured runs: least squares of the relative errors, outliers weighing less.

    `chosen` are the indexes of the runs of the batch to fit to, by default all.
    """
    expected, least, most = (
        np.log([getattr(parameter, name) for parameter in PARAMETERS.values()])
        for name in ("expected", "least", "most")
    )
    spread = np.array([parameter.spread for parameter in PARAMETERS.values()])
    indexes = list(range(len(batch.runs)) if chosen is None else chosen)
    measured = np.log([batch.runs[index].run.seconds or np.nan for index in indexes])

    def values_at(point: np.ndarray) -> dict[str, float]:
        return dict(zip(PARAMETERS, np.exp(point).tolist(), strict=True))

    def residuals_at(points: Sequence[np.ndarray]) -> np.ndarray:
        predicted = batch.predict([point_of(values_at(point)) for point in points])[:, indexes]
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
    return values_at(found.x)


def hold_out(batch: Batch) -> np.ndarray:
    """Return the predicted seconds of each run by a fit to what others have published; nan without others."""
    publishers = np.array([item.run.publisher for item in batch.runs])
    predicted = np.full(len(publishers), np.nan)
    for publisher in dict.fromkeys(publishers.tolist()):
        own = publishers == publisher
        if not own.all():
            found = fit(batch, np.flatnonzero(~own & (publishers != _TRIALS)).tolist())
            predicted[own] = batch.predict([point_of(found)])[0, own]
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
