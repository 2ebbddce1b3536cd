"""Measure time and memory of ops and regions (calls of modules and functions), with profiling overhead subtracted."""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from time import perf_counter_ns
from typing import Any

import torch

from fvflops.text import shown
from fvflops.torch_internals import (
    cuda_sleep,
    disable_dispatch_modes,
    disable_torch_function,
    dispatch_stack_length,
    function_stack_length,
)

MEASURES = ("time", "memory")
# An op that does nothing and that torch.profiler does not record. It runs after each of the first ops, then after every
# `_SAMPLE_EVERY`th. Beyond `_MAX_SAMPLES` samples every second one is discarded.
_do_nothing = torch.ops.aten.is_complex.default._op
_SAMPLE_EVERY, _MAX_SAMPLES = 8, 1000
# Cycles for which a CUDA device sleeps before each op and region, about half a millisecond.
_SLEEP_CYCLES = 1_000_000
# At most this share of an op's time is subtracted as dispatch overhead.
_MAX_SHARE = 0.1
_DURATION = 10  # index of `duration_ns` in an event's row


@dataclass(slots=True, eq=False)
class StartMark:
    """Readings at the start of an op or region; the clock `ns` is read last, so that no other reading is timed."""

    overhead_ns: int
    event: Any
    memory: int | None
    sleeps: int
    ns: int = 0


class Probe:
    """Measures time and memory of ops and regions with a clock and a device's allocator.

    On CUDA, ops and regions are timed by pairs of events, without synchronising until the end. The device sleeps before
    each, because kernel launches take longer than most kernels and the wait for them would be timed. A region's time
    excludes the sleeps inside it.

    `dispatch_ns` is the dispatch overhead of an op, the median time of a no-op sampled during the run: in a tight loop,
    where no kernels evict the caches, the no-op takes a tenth as long. On a CPU it is subtracted from an op's
    time, but at most a tenth of the op's time: small ops evict less. `overhead_ns` is the profiling overhead so far:
    the time spent in the dispatch mode and one dispatch overhead per op. It is subtracted from a region's time.
    `live_bytes` is the size of the live storages that the run created, the memory reported on a CPU.
    """

    def __init__(self, measure: Collection[str], device: torch.device | None = None) -> None:
        is_collection = isinstance(measure, Collection) and not isinstance(measure, str)
        if not is_collection or any(item not in MEASURES for item in measure):
            raise ValueError(f'measure must be {{"time"}}, {{"memory"}} or {{"time", "memory"}}; got {shown(measure)}')
        self._time = "time" in measure
        self._memory = "memory" in measure
        self._cuda = device if device is not None and device.type == "cuda" and torch.cuda.is_available() else None
        self.overhead_ns = 0
        self.live_bytes = 0
        self.dispatch_ns = 0
        self._ops = 0
        self._dispatch_samples: list[int] = []  # sorted
        self._sleeps: list[tuple[Any, Any]] = []  # events before and after each sleep
        with disable_dispatch_modes(), disable_torch_function():
            self._tensor = torch.zeros((), device="cpu")
            _do_nothing(self._tensor)  # warm-up
        # Called directly before and after an op: a Python function would be slow after a kernel has evicted the caches.
        self.clock = perf_counter_ns
        self._started_ns = self.clock()

    def begin(self) -> StartMark:
        """Return the readings at the start of an op or region, except the clock, which the caller reads last."""
        event = memory = None
        if self._memory:
            memory = self.live_bytes if self._cuda is None else _allocated(self._cuda)["current"]
            if self._cuda is not None:
                torch.cuda.reset_peak_memory_stats(self._cuda)
        if self._time and self._cuda is not None:
            before = _record_event()
            cuda_sleep(_SLEEP_CYCLES)
            event = _record_event()
            self._sleeps.append((before, event))
        return StartMark(self.overhead_ns, event, memory, len(self._sleeps))

    def end(self, start: StartMark, now: int) -> Any:
        """Return the duration in ns without overhead; on CUDA, the events from which `finalize_durations` computes it.

        At least 0: the overhead of the ops inside is an estimate, which may exceed the time of a small region.
        """
        if start.event is None:
            return max(now - start.ns - (self.overhead_ns - start.overhead_ns), 0)
        return start.event, _record_event(), start.sleeps, len(self._sleeps)

    def sample(self) -> None:
        """Count an op and regularly measure the dispatch overhead, unless other active modes would see the no-op."""
        self._ops += 1
        due = self._time and (self._ops <= _SAMPLE_EVERY or self._ops % _SAMPLE_EVERY == 0)
        if not due or dispatch_stack_length() or function_stack_length():
            return
        started_ns = self.clock()
        _do_nothing(self._tensor)
        insort(self._dispatch_samples, self.clock() - started_ns)
        if len(self._dispatch_samples) > _MAX_SAMPLES:
            del self._dispatch_samples[::2]
        self.dispatch_ns = self._dispatch_samples[len(self._dispatch_samples) // 2]

    def columns(self, start: StartMark, duration: Any) -> tuple[Any, ...]:
        """Return an event's `start_ns`, `duration_ns` and, if memory is measured, its three memory columns."""
        times = (start.ns - self._started_ns, duration) if self._time else (None, None)
        if start.memory is None:
            return times
        if self._cuda is None:
            return (*times, start.memory, self.live_bytes, max(start.memory, self.live_bytes))
        allocated = _allocated(self._cuda)
        return *times, start.memory, allocated["current"], allocated["peak"]

    def metadata(self) -> dict[str, str]:
        """Return the Trace's metadata of the measurement: the quantities measured and the overhead subtracted."""
        measured = [name for name, on in (("time", self._time), ("memory", self._memory)) if on]
        metadata = {"measured": ", ".join(measured)}
        if self._time:
            metadata |= {"overhead_ns": str(self.overhead_ns), "overhead_ns_per_op": str(self.dispatch_ns)}
        return metadata

    def finalize_durations(self, events: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """Return events with final durations: on CUDA after synchronising, on a CPU without the dispatch overhead."""
        if not self._time:
            return list(events)
        slept = [0]  # cumulative sleep time before each sleep
        if self._cuda is not None:
            torch.cuda.synchronize(self._cuda)
            slept += accumulate(_nanoseconds(*pair) for pair in self._sleeps)
        return [self._finalize_duration(event, slept) if len(event) > _DURATION else event for event in events]

    def _finalize_duration(self, event: tuple[Any, ...], slept: Sequence[int]) -> tuple[Any, ...]:
        duration = event[_DURATION]
        if isinstance(duration, tuple):
            start, end, first, last = duration
            duration = max(_nanoseconds(start, end) - (slept[last] - slept[first]), 0)
        elif event[0] == "op" and duration is not None:
            duration -= min(self.dispatch_ns, int(duration * _MAX_SHARE))
        return *event[:_DURATION], duration, *event[_DURATION + 1 :]


def _record_event() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _nanoseconds(start: Any, end: Any) -> int:
    return round(start.elapsed_time(end) * 1e6)


def _allocated(device: torch.device) -> dict[str, int]:
    """Return the bytes allocated on a CUDA device, current and peak; faster than `torch.cuda.memory_stats`."""
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    allocated: dict[str, int] = stats["allocated_bytes"]["all"]
    return allocated
