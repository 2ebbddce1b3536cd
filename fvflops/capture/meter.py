"""The meter: the time and the memory of each op and each region, less what watching them takes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from time import perf_counter_ns
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

MEASURES = ("time", "memory")
# So many calls of an op that does next to nothing tell what a dispatch mode costs a call; the best of so many rounds.
_CALLS, _ROUNDS = 100, 5


class Begun:
    """What was read when an op or a region began; the clock `ns` last, as what is done after it is timed too."""

    __slots__ = ("event", "lost", "memory", "ns")

    def __init__(self, lost: int, event: Any, memory: int | None) -> None:
        self.ns = 0
        self.lost = lost
        self.event = event
        self.memory = memory


class _Passing(TorchDispatchMode):
    """A dispatch mode that only passes on, as the recording one does without its own work."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Meter:
    """Reads the clock, and a device's allocator, around ops and regions.

    On CUDA a pair of events stands around each, so that nothing waits for the device until the end. `lost` is the time
    in ns that watching took so far: what the dispatch mode did, measured, and for each op what it takes to come there
    and back, which is measured once, at the beginning. It is subtracted from a region's time. `live` are the bytes of
    the storages that the run made and that are alive, which on a CPU is the memory that is told.
    """

    def __init__(self, measure: Collection[str], device: torch.device | None = None) -> None:
        unknown = [name for name in measure if name not in MEASURES]
        if isinstance(measure, str) or unknown:
            raise ValueError(f'measure is {{"time"}}, {{"memory"}} or {{"time", "memory"}}, not {measure!r}')
        self._time = "time" in measure
        self._memory = "memory" in measure
        self._cuda = device if device is not None and device.type == "cuda" and torch.cuda.is_available() else None
        self.lost = 0
        self.live = 0
        self.per_op = _time_dispatch() if self._time else 0
        # Read first and last around an op, without a function of ours between: after a kernel that would take long.
        self.clock = perf_counter_ns
        self._origin = self.clock()

    def begin(self) -> Begun:
        """Return what is to be known of an op or a region that begins now, but for the clock, which is to be read."""
        event = memory = None
        if self._memory:
            memory = self.live if self._cuda is None else torch.cuda.memory_allocated(self._cuda)
            if self._cuda is not None:
                torch.cuda.reset_peak_memory_stats(self._cuda)
        if self._time and self._cuda is not None:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        return Begun(self.lost, event, memory)

    def end(self, begun: Begun, now: int) -> Any:
        """Return the time in ns since something began, less what was lost meanwhile; on CUDA what will tell it."""
        passed = now - begun.ns - (self.lost - begun.lost)
        if begun.event is None:
            return passed
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return begun.event, event

    def columns(self, begun: Begun, duration: Any) -> tuple[Any, ...]:
        """Return the columns of an event from `start_ns` on."""
        times = (begun.ns - self._origin, duration) if self._time else (None, None)
        if begun.memory is None:
            return times
        if self._cuda is None:
            return *times, begun.memory, self.live, max(begun.memory, self.live)
        now, peak = torch.cuda.memory_allocated(self._cuda), torch.cuda.max_memory_allocated(self._cuda)
        return *times, begun.memory, now, peak

    def about(self) -> dict[str, str]:
        """Return what a Trace tells of the measuring: what was measured, and what was subtracted for it, in all."""
        measured = [name for name, on in (("time", self._time), ("memory", self._memory)) if on]
        about = {"measured": ", ".join(measured)}
        return about | ({"overhead_ns": str(self.lost), "overhead_ns_per_op": str(self.per_op)} if self._time else {})

    def resolve(self, events: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """Return events with the times that CUDA has measured, all of whose work is waited for."""
        if self._cuda is None or not self._time:
            return list(events)
        torch.cuda.synchronize(self._cuda)
        return [_resolve(event) for event in events]


def _resolve(event: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(event) <= 10 or not isinstance(event[10], tuple):
        return event
    start, end = event[10]
    return *event[:10], round(start.elapsed_time(end) * 1e6), *event[11:]


def _time_dispatch() -> int:
    """Return what a dispatch mode costs a call, in ns; modes that are on, other recordings' too, see nothing of it."""
    with _disable_current_modes(), torch.no_grad():
        tensor = torch.zeros(())
        bare = _time_calls(tensor)
        with _Passing():
            return max(0, (_time_calls(tensor) - bare) // _CALLS)


def _time_calls(tensor: torch.Tensor) -> int:
    best = None
    for _ in range(_ROUNDS):
        begun = perf_counter_ns()
        for _ in range(_CALLS):
            tensor.zero_()
        passed = perf_counter_ns() - begun
        best = passed if best is None else min(best, passed)
    return best or 0
