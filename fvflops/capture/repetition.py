"""Run a loop whose iterations are equal, such as the denoising steps of a diffusion model."""

from __future__ import annotations

from collections.abc import Callable

from fvflops.capture.shapes.shape_mode import ShapeMode
from fvflops.torch_internals import dispatch_mode_stack


def repeat(times: int, iteration: Callable[[], object]) -> None:
    """Call a function `times` times.

    In shape execution without a backward pass only the first two calls run (the second one finds what the first has
    cached) and the events of the second are recorded for all later ones, so that 50 steps take the time of two. Beyond
    2^18 events only call counts are retained.
    """
    mode = next((mode for mode in reversed(dispatch_mode_stack()) if isinstance(mode, ShapeMode)), None)
    runs = times if mode is None or mode.recorder.backward else min(times, 2)
    first = 0
    for _ in range(runs):
        first = 0 if mode is None else len(mode.recorder.events)
        iteration()
    if mode is not None and runs < times:
        mode.recorder.repeat_events(first, times - runs)
