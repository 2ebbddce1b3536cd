"""How long kernels take on a device: its peaks, and how close to them it comes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from fvflops.devices.devices import Device, short_dtype
from fvflops.plan.step_time.kernel_times import Kernel
from fvflops.text import record_repr


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Efficiency:
    """How close a device comes to its peaks, and what each kernel costs besides.

    `matmul` is the fraction of the matrix peak that a product with an infinite inner dimension reaches, `inner` the
    inner dimension at which it reaches half of that. Products are computed in whole tiles of `tile` rows and columns.
    `attention` and `attention_backward` are fractions of the matrix peak for fused attention, `bandwidth` of the memory
    bandwidth. `kernel` is the shortest time of a kernel on the device, in seconds. `launch`, `launch_backward` and
    `launch_collective` are the time that the host needs to launch an op in the forward and the backward pass, and a
    collective; a device whose kernels are shorter waits for the host. `step` is the time between steps, such as that
    of the data loader and of logging. `source` says where the figures are from.
    """

    matmul: float = 1.0
    inner: float = 0.0
    tile: tuple[int, int] = (1, 1)
    attention: float = 1.0
    attention_backward: float = 1.0
    bandwidth: float = 1.0
    kernel: float = 0.0
    launch: float = 0.0
    launch_backward: float = 0.0
    launch_collective: float = 0.0
    step: float = 0.0
    source: str = "peaks of the device, without launch overhead: a bound"

    def __repr__(self) -> str:
        return record_repr(self)

    def __post_init__(self) -> None:
        for name in ("matmul", "attention", "attention_backward", "bandwidth"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} is a fraction of a peak, above 0 and at most 1; got {getattr(self, name)}")
        for name in ("inner", "kernel", "launch", "launch_backward", "launch_collective", "step"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a number of at least 0; got {getattr(self, name)}")


# A bound: no device is faster.
PEAK = Efficiency()


@dataclass(frozen=True, slots=True)
class KernelTimer:
    """Times of kernels on a device with an efficiency, in seconds.

    >>> from fvflops.devices.devices import find_device
    >>> timer = KernelTimer(find_device("A100"), PEAK)
    >>> f"{timer.seconds(Kernel('matmul', 8192**3, 3 * 2 * 8192**2, 'bfloat16', 1, 8192, 8192, 8192)):.5f}"
    '0.00352'
    """

    device: Device
    efficiency: Efficiency
    _peaks: dict[str, float] = field(default_factory=dict, init=False, repr=False, compare=False)
    _known: dict[Kernel, float] = field(default_factory=dict, init=False, repr=False, compare=False)

    def seconds(self, kernel: Kernel) -> float:
        """Return the longer of computing and moving, besides the shortest kernel's time."""
        known = self._known.get(kernel)
        if known is None:
            moving = kernel.nbytes / (self._bandwidth() * self.efficiency.bandwidth)
            known = self._known[kernel] = self.efficiency.kernel + max(moving, self._computing(kernel))
        return known

    def _computing(self, kernel: Kernel) -> float:
        efficiency = self.efficiency
        if kernel.kind == "memory" or not kernel.macs:
            return 0.0
        seconds = 2 * kernel.macs / self._peak(kernel.dtype)
        if kernel.kind == "attention":
            return seconds / efficiency.attention
        if kernel.kind == "attention backward":
            return seconds / efficiency.attention_backward
        return seconds * self._padding(kernel) * (1 + efficiency.inner / (kernel.inner or math.inf)) / efficiency.matmul

    def _padding(self, kernel: Kernel) -> float:
        """Return the size of a product's tiles over its exact size."""
        if not kernel.rows:
            return 1.0
        height, width = self.efficiency.tile
        tiles = math.ceil(kernel.rows / height) * math.ceil(kernel.columns / width)
        return tiles * height * width / (kernel.rows * kernel.columns)

    def _peak(self, dtype: str) -> float:
        if dtype not in self._peaks:
            self._peaks[dtype] = self.device.peak(short_dtype(dtype))
        return self._peaks[dtype]

    def _bandwidth(self) -> float:
        if self.device.bandwidth is None:
            raise ValueError(f"{self.device.name} has no bandwidth, which a time needs: add one in bytes/s")
        return self.device.bandwidth
