"""The estimated time of a training step, and where it goes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from fvflops.features.step_time.efficiency import Efficiency
from fvflops.features.step_time.network import Network
from fvflops.features.step_time.schedule import Simulation
from fvflops.text import short_repr
from fvflops.units import format_percent, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class StepEstimate:
    """The estimated time of one training step of all ranks, in seconds.

    `bound` is the time with an efficiency of 1: no kernel is faster than the device's peaks, and no launch takes time;
    the network is the same. `mfu` and `hfu` are the utilisations of the `gpus` devices. `device`, `efficiency` and
    `network` are what the times rest on, `assumptions` what else does.

    The compute stream of the slowest rank is in kernels for `kernels` seconds; for the rest of the step it waits: for
    other pipeline stages (`bubble`), for collectives (`exposed`, by mesh axis), for the host (`launching`), or has
    finished. `by_phase` and `by_module` divide its kernels' time, each module without its submodules.
    """

    seconds: float
    bound: float
    gpus: int
    mfu: float
    hfu: float
    slowest: int
    kernels: float
    bubble: float
    exposed: Mapping[str, float]
    communication: Mapping[str, float]
    launching: float
    by_phase: Counter[str]
    by_module: Counter[str]
    device: str
    efficiency: Efficiency
    network: Network | None
    assumptions: tuple[str, ...] = ()
    simulation: Simulation = field(repr=False)

    def __repr__(self) -> str:
        return short_repr(self, format_seconds(self.seconds), f"MFU {format_percent(self.mfu, 1)}", self.device)

    @property
    def bubble_share(self) -> float:
        """The share of the step in which a pipeline rank waits for others, on average over the pipeline's ranks."""
        busy = [sum(span.end - span.start for span in spans) for spans in self.simulation.spans]
        return 1 - sum(busy) / len(busy) / self.simulation.seconds
