"""Fit efficiencies and networks to measured training runs, and predict others with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from fvflops.features.step_time.calibration import find_efficiency, find_network
from fvflops.features.step_time.efficiency import Efficiency, KernelTimer
from fvflops.features.step_time.network import Link, Network
from fvflops.features.utilisation.devices import find_device
from training_runs.prepared import PreparedRun


@dataclass(frozen=True, slots=True)
class Parameter:
    """A fitted figure: its expected value, how far it may be off (of its logarithm), and its limits.

    The expectations keep figures that few runs depend on near what such devices do.
    """

    expected: float
    spread: float
    least: float
    most: float


# Of one device; the names are those of Efficiency.
DEVICE: Mapping[str, Parameter] = {
    "matmul": Parameter(0.85, 0.07, 0.4, 1.0),
    "inner": Parameter(150, 1.0, 1, 2000),
    "attention": Parameter(0.55, 0.25, 0.1, 1.0),
    "attention_backward": Parameter(0.45, 0.25, 0.1, 1.0),
    "bandwidth": Parameter(0.78, 0.1, 0.3, 1.0),
    "kernel": Parameter(5e-6, 0.5, 1e-6, 5e-5),
    "launch": Parameter(5e-5, 0.7, 2e-6, 3e-4),
    "launch_backward": Parameter(3e-5, 0.7, 2e-6, 3e-4),
    "launch_collective": Parameter(5e-5, 1.0, 2e-6, 1e-3),
    "step": Parameter(5e-3, 1.0, 1e-5, 5e-2),
}
# Of one network: bandwidths as fractions of the nominal ones.
NETWORK: Mapping[str, Parameter] = {
    "inside_bandwidth": Parameter(0.7, 0.2, 0.2, 0.85),
    "inside_latency": Parameter(5e-6, 1.0, 1e-6, 1e-4),
    "between_bandwidth": Parameter(0.75, 0.2, 0.1, 0.95),
    "between_latency": Parameter(1e-5, 1.0, 1e-6, 5e-4),
}
# Multiprocessors of a device, and GB/s of its NVLinks in one direction.
UNITS = {"A100 SXM 80GB": 108, "A100 SXM 40GB": 108, "H100 SXM": 132, "H200": 132}
NVLINK = {"A100 SXM 80GB": 300e9, "A100 SXM 40GB": 300e9, "H100 SXM": 450e9, "H200": 450e9}


@dataclass(frozen=True, slots=True)
class Fit:
    """The fitted figures of a device and its networks."""

    device: str
    values: Mapping[str, float]

    def efficiency(self) -> Efficiency:
        """Return the efficiency of the device."""
        values: dict[str, Any] = {name: self.values[name] for name in DEVICE}
        return Efficiency(tile=(128, 128), units=UNITS[self.device], **values)

    def network(self, gpus_per_node: int, node_gbps: float) -> Network:
        """Return the network of nodes, from the Gbit/s between nodes for each GPU."""
        values = self.values
        return Network(
            name="",
            gpus_per_node=gpus_per_node,
            inside=Link(NVLINK[self.device] * values["inside_bandwidth"], values["inside_latency"]),
            between=Link(node_gbps / 8 * 1e9 * values["between_bandwidth"], values["between_latency"]),
        )

    def predict(self, runs: Sequence[PreparedRun]) -> np.ndarray:
        """Return the estimated seconds of a step of each run."""
        efficiency = self.efficiency()
        return np.array(
            [
                predict_seconds(item, efficiency, self.network(item.run.gpus_per_node, item.run.node_gbps))
                for item in runs
            ]
        )


def predict_seconds(item: PreparedRun, efficiency: Efficiency, network: Network) -> float:
    """Return the estimated seconds of a step of a run."""
    device = find_device(item.run.device)
    if item.run.memory_bandwidth is not None:
        device = replace(device, bandwidth=item.run.memory_bandwidth)
    simulation = item.step.simulate(KernelTimer(device, efficiency), network, host_waits=item.host_waits)
    return efficiency.step + simulation.seconds


def fit(device: str, runs: Sequence[PreparedRun], *, evaluations: int = 12) -> Fit:
    """Fit the figures of a device to measured runs: least squares of the relative errors, outliers weighing less."""
    parameters = {**DEVICE, **NETWORK}
    names = list(parameters)
    expected = np.log([parameters[name].expected for name in names])
    spread = np.array([parameters[name].spread for name in names])
    measured = np.log([item.run.step_seconds or np.nan for item in runs])

    def residuals(point: np.ndarray) -> np.ndarray:
        predicted = _fit_at(device, names, point).predict(runs)
        return np.concatenate([(np.log(predicted) - measured) / _SPREAD, (point - expected) / spread])

    bounds = tuple(np.log([getattr(parameters[name], limit) for name in names]) for limit in ("least", "most"))
    found = least_squares(
        residuals, expected, loss="soft_l1", diff_step=1e-3, bounds=bounds, max_nfev=evaluations, x_scale=spread
    )
    return _fit_at(device, names, found.x)


# Relative error of a prediction at which it starts to weigh less than by its square.
_SPREAD = 0.04


def _fit_at(device: str, names: Sequence[str], point: np.ndarray) -> Fit:
    return Fit(device, dict(zip(names, np.exp(point).tolist(), strict=True)))


def cross_validate(
    device: str, runs: Sequence[PreparedRun], group_of: Callable[[PreparedRun], object], folds: int
) -> np.ndarray:
    """Return the predicted seconds of each run by a fit to runs of other groups, such as of other models."""
    groups = sorted({group_of(item) for item in runs}, key=repr)
    predicted = np.zeros(len(runs))
    for fold in range(min(folds, len(groups))):
        held_out = {group for index, group in enumerate(groups) if index % folds == fold}
        chosen = [index for index, item in enumerate(runs) if group_of(item) in held_out]
        others = [item for item in runs if group_of(item) not in held_out]
        predicted[chosen] = fit(device, others).predict([runs[index] for index in chosen])
    return predicted


@dataclass(frozen=True, slots=True)
class _Shipped:
    """The efficiency and the network of configs/ for a run."""

    network: Network

    def predict(self, runs: Sequence[PreparedRun]) -> np.ndarray:
        """Return the estimated seconds of a step of each run."""
        return np.array([predict_seconds(item, find_efficiency(item.run.device), self.network) for item in runs])


def shipped(item: PreparedRun) -> _Shipped:
    """Return what predicts a run by the shipped files."""
    run = item.run
    family = "H100" if run.device == "H200" else run.device.split()[0]
    network = find_network(f"HGX {family} {8 * run.node_gbps:g}G")
    return _Shipped(replace(network, gpus_per_node=run.gpus_per_node))
