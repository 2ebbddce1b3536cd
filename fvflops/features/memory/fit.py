"""Whether a predicted memory fits on a device, by how much it does not, and what would make it fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fvflops.features.memory.compute import MemoryTimeline
from fvflops.features.memory.model import MemorySaving, MemorySavings
from fvflops.text import short_repr
from fvflops.units import format_bytes


@dataclass(frozen=True, slots=True)
class MemoryAllowance:
    """Memory that a device needs besides what is predicted; both parts are 0 by default, so nothing is assumed.

    `fragmentation` is a share of the predicted peak: memory that the allocator has reserved and cannot use, which
    `reserved_memory` simulates for CUDA. `outside` is bytes outside the allocator: the CUDA context and the libraries'
    kernels (on an H100 about 0.5 GiB), and NCCL's buffers.

    >>> MemoryAllowance(fragmentation=0.05, outside=2**29).nbytes(10 * 2**30) / 2**30
    1.0
    """

    fragmentation: float = 0.0
    outside: int = 0

    def __post_init__(self) -> None:
        if self.fragmentation < 0 or self.outside < 0:
            raise ValueError(f"an allowance must not be negative; got {self}")

    def nbytes(self, peak: int) -> int:
        """Return the bytes of both parts for a peak."""
        return round(self.fragmentation * peak) + self.outside


@dataclass(frozen=True, slots=True, repr=False)
class MemoryFit:
    """A predicted peak, an allowance and a device's memory, in bytes.

    `changes` are those, of `memory_savings` or `plan_savings`, with each of which the step fits; `best` is the one with
    the lowest peak if none is enough. Both are empty if the step fits or no savings were given.
    """

    device: str
    capacity: int
    peak: int
    allowance: int = 0
    changes: tuple[MemorySaving, ...] = ()
    best: MemorySaving | None = None

    def __repr__(self) -> str:
        return short_repr(self, next(iter(self.describe())))

    def __bool__(self) -> bool:
        return self.over == 0

    @property
    def over(self) -> int:
        """The bytes by which it does not fit, 0 if it fits."""
        return max(self.peak + self.allowance - self.capacity, 0)

    def describe(self) -> Iterator[str]:
        """Yield a sentence on whether it fits, one on the allowance if there is any, then what would make it fit.

        >>> print(*MemoryFit("H100 SXM", 80 * 10**9, 90 * 10**9).describe())
        Does not fit: 90 GB is 10 GB more than the 80 GB of H100 SXM.
        """
        needed, total = format_bytes(self.peak + self.allowance), format_bytes(self.capacity)
        if self:
            room = format_bytes(self.capacity - self.peak - self.allowance)
            yield f"Fits: {needed} of the {total} of {self.device}; {room} are left for what is not predicted."
        else:
            yield f"Does not fit: {needed} is {format_bytes(self.over)} more than the {total} of {self.device}."
        if self.allowance:
            yield f"That includes an allowance of {format_bytes(self.allowance)}, which is not predicted."
        for change in self.changes:
            yield f"Fits with {_name(change)}: {format_bytes(change.peak)}."
        if self.best is not None:
            lowest = f"{_name(self.best)}: {format_bytes(self.best.peak)}"
            yield f"No change that was tried is enough; the lowest peak is with {lowest}."


def fits(
    memory: MemoryTimeline,
    device: str,
    capacity: int,
    *,
    allowance: MemoryAllowance | None = None,
    savings: Callable[[], MemorySavings] | None = None,
) -> MemoryFit:
    """Return whether a predicted memory fits on a device with `capacity` bytes, named `device`.

    `savings` returns what lowers the peak, such as `partial(plan_savings, model, inputs, mesh=mesh)`; it is called only
    if the prediction does not fit.

    >>> import torch
    >>> from fvflops import TrainingStepAnalysis, predict_memory
    >>> step = TrainingStepAnalysis(torch.nn.Linear(8, 8), torch.ones(4, 8), loss=torch.sum)
    >>> fit = fits(predict_memory(step), "a small device", 1000)
    >>> bool(fit), fit.peak, fit.over
    (True, 840, 0)
    """
    extra = (allowance or MemoryAllowance()).nbytes(memory.peak)
    fit = MemoryFit(device, capacity, memory.peak, extra)
    if fit or savings is None:
        return fit
    changes = savings().changes
    enough = tuple(item for item in changes if MemoryFit(device, capacity, item.peak, extra))
    lowest = None if enough else min(changes, key=lambda item: item.peak, default=None)
    return MemoryFit(device, capacity, memory.peak, extra, enough, lowest)


def _name(change: MemorySaving) -> str:
    """Return a change in words: of checkpoints the class and the number of its modules."""
    if change.change == "checkpoint":
        return f"checkpoint {change.name} × {len(change.modules)}"
    return f"{change.change} {change.name}"
