"""What a search for a layout has found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fvflops.devices.devices import Device
from fvflops.plan.memory.step_settings import NO_CHECKPOINTING
from fvflops.plan.parallel_axes import count_shares
from fvflops.plan.search.candidates import Candidate
from fvflops.plan.step_time.efficiency import Efficiency
from fvflops.plan.step_time.network import Network
from fvflops.reports.display import Displayed
from fvflops.text import record_repr, short_repr


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class LayoutResult:
    """A layout with what is known of it.

    `seconds` is the estimated time of a step, `peak` what torch's allocator reserves in bytes on its fullest rank. Both
    are None of a layout that was not planned, for which `least_seconds` and `least_peak` are lower bounds. `status` is
    "fits", "does not fit", "slower" (not planned, since its lower bound is above the time of the best), or "failed";
    `reason` says why it is not among the best. `unknown` and `bytes_only` are those of a StepEstimate.
    """

    candidate: Candidate
    status: str
    reason: str = ""
    seconds: float | None = None
    peak: int | None = None
    tokens_per_second: float | None = None
    samples_per_second: float | None = None
    mfu: float | None = None
    hfu: float | None = None
    bubble_share: float | None = None
    exposed_share: float | None = None
    least_seconds: float = 0.0
    least_peak: int = 0
    unknown: Mapping[str, int] = field(default_factory=dict)
    bytes_only: Mapping[str, int] = field(default_factory=dict)

    def __repr__(self) -> str:
        return record_repr(self)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class LayoutSearch(Displayed):
    """The layouts that a search has tried: those that fit in the order of their time, then all others.

    `not_tried` is an axis that no layout has, though nobody excluded it → why. `settings` are what all
    plans assume.
    """

    _report = "fvflops.plan.search.search_report:search_report"

    results: tuple[LayoutResult, ...]
    gpus: int
    global_batch: int
    wanted: int
    device: Device
    network: Network | None
    efficiency: Efficiency
    bucket_cap_mb: float | None = None
    seconds: float = 0.0
    not_tried: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return short_repr(self, f"{len(self.results):,} layouts", f"{len(self.fitting())} fit")

    def settings_of(self, candidate: Candidate) -> dict[str, Any]:
        """Return what the plan of a layout assumes."""
        settings = {**candidate.settings(), **self.settings}
        if candidate.checkpoint != NO_CHECKPOINTING:
            settings["checkpointing"] = candidate.checkpoint
        if "sequence" in settings:
            settings["sequence"] //= candidate.size("cp")
        if count_shares(candidate.mesh, "tokens") == 1:
            settings.pop("gradient_reduction", None)
        return settings

    def fitting(self) -> list[LayoutResult]:
        """Return the planned layouts that fit, the fastest first."""
        return [result for result in self.results if result.status == "fits"]

    def best(self, count: int | None = None) -> list[LayoutResult]:
        """Return the fastest layouts that fit; `count` is by default the number that the search was for."""
        return self.fitting()[: self.wanted if count is None else count]

    def pareto_front(self) -> list[LayoutResult]:
        """Return the planned layouts that fit and that no other one beats in both time and memory, fastest first."""
        front: list[LayoutResult] = []
        for result in self.fitting():
            if not front or _peak(result) < _peak(front[-1]):
                front.append(result)
        return front


def _peak(result: LayoutResult) -> int:
    return result.peak or 0


def in_order(results: Sequence[LayoutResult]) -> tuple[LayoutResult, ...]:
    """Return results in the order of `LayoutSearch.results`."""
    order = {"fits": 0, "slower": 1, "does not fit": 2, "failed": 3}
    return tuple(
        sorted(
            results, key=lambda item: (order[item.status], item.least_seconds if item.seconds is None else item.seconds)
        )
    )
