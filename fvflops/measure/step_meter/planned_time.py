"""The time that a plan has for a step, and the share of the measured one that it accounts for."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from statistics import fmean, median
from typing import TYPE_CHECKING, NamedTuple

from fvflops.measure.step_meter.step_figures import StepFigures, describe_unexplained
from fvflops.plan.parallel_axes import AXES
from fvflops.text import shown
from fvflops.units import format_quantity, format_share

if TYPE_CHECKING:
    from fvflops.plan.step_time.step_estimate import StepEstimate

_LOGGER = logging.getLogger("fvflops")
JUDGED = 20  # steps after which a loop is compared with its plan, by the second half of them: the first ones warm up
_WITHIN = 0.1  # share of a step that the models of kernels miss anyway
_MORE = 0.02  # share of the FLOPs


class PlannedTime(NamedTuple):
    """Seconds of a step as planned, and the model FLOPs of a GPU if each computes the whole model, else NaN."""

    seconds: float = math.nan
    model_flops: float = math.nan

    def compare(self, steps: Sequence[StepFigures]) -> None:
        """Log the share of some steps that is planned, as a warning if the rest is more than the error of a plan."""
        steps = steps[len(steps) // 2 :]
        measured, flops = median(one.seconds for one in steps), fmean(one.model_flops for one in steps)
        text = describe_unexplained(self.seconds, measured)
        more = flops / self.model_flops - 1
        if abs(more) > _MORE:  # False for NaN
            text += f"; a step has {format_share(abs(more))} {'more' if more > 0 else 'fewer'} FLOPs than planned"
        level = logging.WARNING if measured - self.seconds > _WITHIN * measured else logging.INFO
        _LOGGER.log(level, "StepMeter: median of %s: %s", format_quantity(len(steps), "step"), text)


def read_planned(expected: StepEstimate | float | None, *, has_default_counts: bool) -> PlannedTime:
    """Return the planned time of an estimate or of a number of seconds; its FLOPs are by the default convention."""
    if expected is None:
        return PlannedTime()
    if isinstance(expected, (int, float)):
        if not 0 < expected < math.inf:
            raise ValueError(f"expected seconds must be a number above 0, got {expected}")
        return PlannedTime(float(expected))
    if not hasattr(expected, "model_flops"):
        raise TypeError(f"expected is a StepEstimate or seconds, got {shown(expected)}")
    mesh = expected.plans[0].mesh
    is_whole = has_default_counts and all(AXES[axis].samples for axis, size in mesh.items() if size > 1)
    return PlannedTime(expected.seconds, (is_whole and expected.model_flops) or math.nan)
