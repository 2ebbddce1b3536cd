"""The meter: the time and the memory of each op and each region, less what watching them takes."""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Sequence
from itertools import accumulate
from time import perf_counter_ns
from typing import Any

import torch

from fvflops.torch_internals import (
    cuda_sleep,
    disable_dispatch_modes,
    disable_torch_function,
    dispatch_stack_length,
    function_stack_length,
)

MEASURES = ("time", "memory")
# An op that does nothing, and that torch.profiler does not see. It is called after each of the first ops, and then
# after one in so many; of so many of its times half are forgotten.
_do_nothing = torch.ops.aten.is_complex.default._op
_ONE_IN, _MOST = 8, 1000
# So many cycles, some half a millisecond, a CUDA device waits before each op and each region.
_HOLD = 1_000_000
# What is subtracted from an op's time is at most this share of it.
_MOST_OF_OP = 0.1
_DURATION = 10  # where it stands in an event's row


class StartMark:
    """What was read when an op or a region began; the clock `ns` last, as what is done after it is timed too."""

    __slots__ = ("event", "holds", "memory", "ns", "overhead_ns")

    def __init__(self, lost: int, event: Any, memory: int | None, holds: int) -> None:
        self.ns = 0
        self.overhead_ns = lost
        self.event = event
        self.memory = memory
        self.holds = holds


class Probe:
    """Reads the clock, and a device's allocator, around ops and regions.

    On CUDA a pair of events stands around each, so that nothing waits for the device until the end. Before each the
    device is held for a while: one that has nothing else to do would wait for the launch of the kernels, which takes
    longer than most of them, with the clock running. Of a region's time the holds in it are subtracted.

    `per_op` is the time in ns that the way from Python into an op and back takes: ten times what it takes in a loop,
    since kernels leave nothing of it in the processor's caches, so that it is sampled in the run itself, by an op that
    does nothing. On a CPU its median is subtracted from each op's time, but of small ops, which leave more in the
    caches, no more than a tenth. `lost` is the time in ns that watching took so far: what the dispatch mode did,
    measured, and for each op that way once more. It is subtracted from a region's time. `live` are the bytes of the
    storages that the run made and that are alive, which on a CPU is the memory that is told.
    """

    def __init__(self, measure: Collection[str], device: torch.device | None = None) -> None:
        unknown = [name for name in measure if name not in MEASURES]
        if isinstance(measure, str) or unknown:
            raise ValueError(f'measure is {{"time"}}, {{"memory"}} or {{"time", "memory"}}, not {measure!r}')
        self._time = "time" in measure
        self._memory = "memory" in measure
        self._cuda = device if device is not None and device.type == "cuda" and torch.cuda.is_available() else None
        self.overhead_ns = 0
        self.live = 0
        self.dispatch_ns = 0
        self._ops = 0
        self._dispatch_samples: list[int] = []  # in the order of their times
        self._holds: list[tuple[Any, Any]] = []  # events before and after each
        with disable_dispatch_modes(), disable_torch_function():
            self._tensor = torch.zeros((), device="cpu")
            _do_nothing(self._tensor)  # the first call in a process takes longer
        # Read first and last around an op, without a function of ours between: after a kernel that would take long.
        self.clock = perf_counter_ns
        self._origin = self.clock()

    def begin(self) -> StartMark:
        """Return what is to be known of an op or a region that begins now, but for the clock, which is to be read."""
        event = memory = None
        if self._memory:
            memory = self.live if self._cuda is None else _allocated(self._cuda)["current"]
            if self._cuda is not None:
                torch.cuda.reset_peak_memory_stats(self._cuda)
        if self._time and self._cuda is not None:
            before = _record_event()
            cuda_sleep(_HOLD)
            event = _record_event()
            self._holds.append((before, event))
        return StartMark(self.overhead_ns, event, memory, len(self._holds))

    def end(self, begun: StartMark, now: int) -> Any:
        """Return the time in ns since something began, less the overhead; on CUDA what will tell it.

        The overhead of the ops inside is an estimate, which may be more than a small region took.
        """
        if begun.event is None:
            return max(now - begun.ns - (self.overhead_ns - begun.overhead_ns), 0)
        return begun.event, _record_event(), begun.holds, len(self._holds)

    def sample(self) -> None:
        """Note that an op has run, and after some see what the way to an op and back takes, if no other mode would."""
        self._ops += 1
        due = self._time and (self._ops <= _ONE_IN or self._ops % _ONE_IN == 0)
        if not due or dispatch_stack_length() or function_stack_length():
            return
        begun = self.clock()
        _do_nothing(self._tensor)
        insort(self._dispatch_samples, self.clock() - begun)
        if len(self._dispatch_samples) > _MOST:
            del self._dispatch_samples[::2]
        self.dispatch_ns = self._dispatch_samples[len(self._dispatch_samples) // 2]

    def columns(self, begun: StartMark, duration: Any) -> tuple[Any, ...]:
        """Return the columns of an event from `start_ns` on."""
        times = (begun.ns - self._origin, duration) if self._time else (None, None)
        if begun.memory is None:
            return times
        if self._cuda is None:
            return *times, begun.memory, self.live, max(begun.memory, self.live)
        allocated = _allocated(self._cuda)
        return *times, begun.memory, allocated["current"], allocated["peak"]

    def about(self) -> dict[str, str]:
        """Return what a Trace tells of the measuring: what was measured, and what was subtracted for it, in all."""
        measured = [name for name, on in (("time", self._time), ("memory", self._memory)) if on]
        about = {"measured": ", ".join(measured)}
        return about | (
            {"overhead_ns": str(self.overhead_ns), "overhead_ns_per_op": str(self.dispatch_ns)} if self._time else {}
        )

    def resolve(self, events: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """Return events with the times that CUDA has measured, all of whose work is waited for, or that ops took."""
        if not self._time:
            return list(events)
        if self._cuda is None:
            return [self._without_dispatch(event) for event in events]
        torch.cuda.synchronize(self._cuda)
        held = [0, *accumulate(_nanoseconds(*pair) for pair in self._holds)]
        return [_resolve(event, held) for event in events]

    def _without_dispatch(self, event: tuple[Any, ...]) -> tuple[Any, ...]:
        if event[0] != "op" or len(event) <= _DURATION:
            return event
        duration = event[_DURATION]
        return (
            *event[:_DURATION],
            duration - min(self.dispatch_ns, int(duration * _MOST_OF_OP)),
            *event[_DURATION + 1 :],
        )


def _resolve(event: tuple[Any, ...], held: Sequence[int]) -> tuple[Any, ...]:
    """Return an event with its time; `held` is for how long the device was held before each hold, in all."""
    if len(event) <= _DURATION or not isinstance(event[_DURATION], tuple):
        return event
    start, end, first, last = event[_DURATION]
    duration = max(_nanoseconds(start, end) - (held[last] - held[first]), 0)
    return *event[:_DURATION], duration, *event[_DURATION + 1 :]


def _record_event() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _nanoseconds(start: Any, end: Any) -> int:
    return round(start.elapsed_time(end) * 1e6)


def _allocated(device: torch.device) -> dict[str, int]:
    """Return the bytes that a CUDA device's allocator has handed out, now and at most, without torch's whole list."""
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    found: dict[str, int] = stats["allocated_bytes"]["all"]
    return found
