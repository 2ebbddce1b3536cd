"""The kernel run: the events that torch.profiler took down, as plain data, and the rows that they are summed up in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

# "op" is a call into torch, "node" what autograd does for a node, "module" a call of a module, "step" one of
# torch.profiler's steps, "optimizer" an optimizer's, "compiled" a call of code that torch.compile made, "range" what
# the program marked itself, "python" a Python function, "memory" a change outside of all ops, "device" what a device
# ran, "other" anything else, such as the calls of a device's runtime.
KINDS = ("op", "node", "module", "step", "optimizer", "compiled", "range", "python", "memory", "device", "other")


class KernelEvent(NamedTuple):
    """One event of torch.profiler's, in nanoseconds and bytes.

    `place` is the number under which torch.profiler exports it, `parent` the index of the event around it, of what a
    device ran that of the op which launched it, -1 where there is none. `start_ns` is counted from the beginning of its
    trace. `sequence` and `forward_thread` tell, of a node of autograd's, which forward op made it: one with that
    `sequence` on that thread. `module` is the name of the module whose call it is, "" too where it is none. `device_ns`
    is what a device took for it and for all in it. Memory is what was allocated less what was freed in it; `before`,
    `after` and `peak` is what the CPU's allocator held, None where that was not asked for.
    """

    name: str
    kind: str
    place: int = 0
    parent: int = -1
    start_ns: int = 0
    duration_ns: int = 0
    thread: int = 0
    sequence: int = -1
    forward_thread: int = 0
    module: str = ""
    self_ns: int = 0
    device_ns: int = 0
    self_device_ns: int = 0
    memory: int = 0
    self_memory: int = 0
    device_memory: int = 0
    self_device_memory: int = 0
    shapes: str = ""
    stack: tuple[str, ...] = ()
    before: int | None = None
    after: int | None = None
    peak: int | None = None

    @property
    def end_ns(self) -> int:
        """When it ended."""
        return self.start_ns + self.duration_ns


@dataclass(frozen=True, slots=True)
class KernelRun:
    """What torch.profiler took down in one cycle: its events, in the order in which they began, parents first.

    `device` is the kind of device that was watched beside the CPU, "" for none. `complete` is False where the program
    raised: then its last step is no whole one.
    """

    events: tuple[KernelEvent, ...]
    device: str = ""
    complete: bool = True


@dataclass(frozen=True, slots=True)
class KernelRow:
    """All events of one name, and where it was asked of one module, of the same shapes and of the same stack.

    The names and units are torch.profiler's: µs and bytes, `self` leaving out what ran in an event. `flops` are those
    of the events and of what ran in them, `self_flops` their own, None where nothing is known of any of them.
    `module` is None where rows are not told apart by module.
    """

    key: str
    module: str | None = None
    count: int = 0
    cpu_time_total: float = 0.0
    self_cpu_time_total: float = 0.0
    device_time_total: float = 0.0
    self_device_time_total: float = 0.0
    cpu_memory_usage: int = 0
    self_cpu_memory_usage: int = 0
    device_memory_usage: int = 0
    self_device_memory_usage: int = 0
    flops: int | None = None
    self_flops: int | None = None
    input_shapes: str = ""
    stack: tuple[str, ...] = ()

    @property
    def cpu_time(self) -> float:
        """The mean time of an event."""
        return self.cpu_time_total / self.count if self.count else 0.0

    @property
    def device_time(self) -> float:
        """The mean time of a device for an event."""
        return self.device_time_total / self.count if self.count else 0.0

    @property
    def flops_per_second(self) -> float | None:
        """FLOPs a second: of the device's time where it took any, else of the CPU's; None where it is not known."""
        time = self.device_time_total or self.cpu_time_total
        return self.flops * 1e6 / time if self.flops and time else None


@dataclass(frozen=True, slots=True)
class KernelLedger:
    """What of a run and of its count has found each other, in numbers of calls, by name.

    `matched` are the ops of the count that have an event, `no_event` those that have none, such as the `detach` of what
    autograd saves; `told_elsewhere` are those of the latter that have FLOPs, or unknown ones, which are told of the
    call of the module that they ran in. `no_op` are the events that run in no op of the count and hold none, `compiled`
    those in code that torch.compile made, where fused kernels stand for several ops.
    """

    matched: int = 0
    no_event: Sequence[tuple[str, int]] = ()
    told_elsewhere: Sequence[tuple[str, int]] = ()
    no_op: Sequence[tuple[str, int]] = ()
    compiled: int = 0
