"""Measure time and memory of ops and regions, with profiling overhead subtracted."""

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
# An op that does nothing and that torch.profiler does not record. It runs after each of the first ops, then after every
# `_SAMPLE_EVERY`th; of `_MAX_SAMPLES` samples half are dropped.
_do_nothing = torch.ops.aten.is_complex.default._op
_SAMPLE_EVERY, _MAX_SAMPLES = 8, 1000
# Cycles for which a CUDA device sleeps before each op and region, about half a millisecond.
_SLEEP_CYCLES = 1_000_000
# At most this share of an op's time is subtracted.
_MAX_SHARE = 0.1
_DURATION = 10  # its position in an event's row


class StartMark:
    """Readings at the start of an op or region; the clock `ns` is read last, since what follows it is timed."""

    __slots__ = ("event", "memory", "ns", "overhead_ns", "sleeps")

    def __init__(self, overhead_ns: int, event: Any, memory: int | None, sleeps: int) -> None:
        self.ns = 0
        self.overhead_ns = overhead_ns
        self.event = event
        self.memory = memory
        self.sleeps = sleeps


class Probe:
    """Reads the clock and a device's allocator around ops and regions.

    On CUDA each is enclosed in a pair of events, so that nothing synchronises until the end. Before each, the device
    sleeps: otherwise an idle device would be timed waiting for kernel launches, which take longer than most kernels.
    A region's time excludes the sleeps inside it.

    `dispatch_ns` is the dispatch overhead of one op in ns: ten times that in a tight loop, since kernels evict it from
    the processor's caches; hence it is sampled in the run, by a no-op. On a CPU its median is subtracted from each op's
    time, but at most a tenth, since small ops evict less. `overhead_ns` is the profiling overhead so far in ns: the
    measured time of the dispatch mode, and one dispatch overhead per op. It is subtracted from a region's time. `live`
    is the number of bytes in live storages that the run created, which is the memory reported on a CPU.
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
        self._dispatch_samples: list[int] = []  # sorted
        self._sleeps: list[tuple[Any, Any]] = []  # events before and after each sleep
        with disable_dispatch_modes(), disable_torch_function():
            self._tensor = torch.zeros((), device="cpu")
            _do_nothing(self._tensor)  # warm-up
        # Called first and last around an op, directly: a Python function would take long after a kernel evicted the
        # caches.
        self.clock = perf_counter_ns
        self._origin = self.clock()

    def begin(self) -> StartMark:
        """Return the readings at the start of an op or region, except the clock, which the caller reads last."""
        event = memory = None
        if self._memory:
            memory = self.live if self._cuda is None else _allocated(self._cuda)["current"]
            if self._cuda is not None:
                torch.cuda.reset_peak_memory_stats(self._cuda)
        if self._time and self._cuda is not None:
            before = _record_event()
            cuda_sleep(_SLEEP_CYCLES)
            event = _record_event()
            self._sleeps.append((before, event))
        return StartMark(self.overhead_ns, event, memory, len(self._sleeps))

    def end(self, begun: StartMark, now: int) -> Any:
        """Return the duration in ns since a start, less the overhead; on CUDA, the events that will give it.

        Clamped at 0: the overhead of the ops inside is an estimate, which may exceed the time of a small region.
        """
        if begun.event is None:
            return max(now - begun.ns - (self.overhead_ns - begun.overhead_ns), 0)
        return begun.event, _record_event(), begun.sleeps, len(self._sleeps)

    def sample(self) -> None:
        """Count an op; regularly measure the dispatch overhead, unless other modes are active, which would see it."""
        self._ops += 1
        due = self._time and (self._ops <= _SAMPLE_EVERY or self._ops % _SAMPLE_EVERY == 0)
        if not due or dispatch_stack_length() or function_stack_length():
            return
        begun = self.clock()
        _do_nothing(self._tensor)
        insort(self._dispatch_samples, self.clock() - begun)
        if len(self._dispatch_samples) > _MAX_SAMPLES:
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
        """Return the Trace's metadata of the measurement: what was measured, and the overhead subtracted in total."""
        measured = [name for name, on in (("time", self._time), ("memory", self._memory)) if on]
        about = {"measured": ", ".join(measured)}
        return about | (
            {"overhead_ns": str(self.overhead_ns), "overhead_ns_per_op": str(self.dispatch_ns)} if self._time else {}
        )

    def resolve(self, events: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """Return events with final durations: on CUDA after synchronising, on a CPU less the dispatch overhead."""
        if not self._time:
            return list(events)
        if self._cuda is None:
            return [self._without_dispatch(event) for event in events]
        torch.cuda.synchronize(self._cuda)
        slept = [0, *accumulate(_nanoseconds(*pair) for pair in self._sleeps)]
        return [_resolve(event, slept) for event in events]

    def _without_dispatch(self, event: tuple[Any, ...]) -> tuple[Any, ...]:
        if event[0] != "op" or len(event) <= _DURATION:
            return event
        duration = event[_DURATION]
        return (
            *event[:_DURATION],
            duration - min(self.dispatch_ns, int(duration * _MAX_SHARE)),
            *event[_DURATION + 1 :],
        )


def _resolve(event: tuple[Any, ...], slept: Sequence[int]) -> tuple[Any, ...]:
    """Return an event with its duration; `slept` is the cumulative sleep time before each sleep."""
    if len(event) <= _DURATION or not isinstance(event[_DURATION], tuple):
        return event
    start, end, first, last = event[_DURATION]
    duration = max(_nanoseconds(start, end) - (slept[last] - slept[first]), 0)
    return *event[:_DURATION], duration, *event[_DURATION + 1 :]


def _record_event() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _nanoseconds(start: Any, end: Any) -> int:
    return round(start.elapsed_time(end) * 1e6)


def _allocated(device: torch.device) -> dict[str, int]:
    """Return the bytes allocated on a CUDA device, current and peak; faster than torch's full flat statistics."""
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    found: dict[str, int] = stats["allocated_bytes"]["all"]
    return found
