"""Measure the peaks of this machine for a roofline: matrix products by dtype, and memory bandwidth."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from fvflops.capture.restore import interrupts
from fvflops.devices.devices import Device

# The dtype that is timed for each peak; tf32 is float32 with rounding to tf32 allowed on CUDA.
PRODUCTS = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
_MIN_SIDE, _MAX_SIDE = 256, 16384  # of the square matrices
_MIN_REPEATS = 5
_MEMORY_FRACTION = 16  # an array has at most 1/16 of the memory
_ARRAY_BYTES = {"cpu": 1 << 28, "cuda": 1 << 30}  # far larger than any cache


def measure_device(
    where: str | torch.device | None = None, *, dtypes: Sequence[str] | None = None, seconds: float = 1.0
) -> Device:
    """Return the measured peaks of a device of this machine: FLOP/s of matrix products by dtype, and memory bandwidth.

    `where` is "cpu" or a CUDA device, by default CUDA if there is one. `dtypes` are names in `PRODUCTS`, by default all
    (tf32 only on CUDA); one that the device does not support is ignored. Each peak takes about `seconds`. Products have
    square matrices, whose size is doubled while time remains; the fastest run counts. The bandwidth is measured by a
    copy or a triad (a = b + s*c) of arrays larger than the caches, whichever is higher, each number read or
    written counted once; a CPU with write-allocate caches moves more. fp8 and int8 are not measured. Another device or
    dtype raises ValueError.
    """
    device = _resolve_device(where)
    unknown = [dtype for dtype in dtypes or () if dtype not in PRODUCTS]
    if unknown:
        raise ValueError(f"dtypes must be among {', '.join(PRODUCTS)}; got {unknown[0]!r}")
    if not seconds > 0:
        raise ValueError(f"seconds must be positive; got {seconds!r}")
    measured = [dtype for dtype in dtypes or PRODUCTS if dtype != "tf32" or device.type == "cuda"]
    with torch.no_grad():
        peaks = {dtype: peak for dtype in measured if (peak := _time_products(device, dtype, seconds))}
        bandwidth = _time_memory(device, seconds)
    return replace(_describe(device), matrix=peaks, bandwidth=bandwidth)


def write_device(device: Device) -> str:
    """Return a device as a YAML file of devices, which `find_device(name, file=...)` reads.

    >>> print(write_device(Device("mine", matrix={"bf16": 400e12}, bandwidth=2e12, source="measured")), end="")
    devices:
      "mine":
        matrix: {bf16: 400000000000000}
        bandwidth: 2000000000000
        source: "measured"
    """
    lines = ["devices:", f"  {_quote(device.name)}:"]
    for key in ("vendor", "unit", "matrix", "sparse", "vector", "bandwidth", "memory", "source", "note"):
        value = getattr(device, key)
        if isinstance(value, Mapping):
            text = f"{{{', '.join(f'{dtype}: {int(peak)}' for dtype, peak in value.items())}}}"
        else:
            text = _quote(value) if isinstance(value, str) else str(int(value or 0))
        lines += [f"    {key}: {text}"] * bool(value)
    return "\n".join(lines) + "\n"


def _resolve_device(where: str | torch.device | None) -> torch.device:
    try:
        device = torch.device(where if where is not None else "cuda" if torch.cuda.is_available() else "cpu")
    except RuntimeError:
        raise ValueError(f"device must be 'cpu' or 'cuda'; got {where!r}") from None
    if device.type not in _ARRAY_BYTES:
        raise ValueError(f"device must be 'cpu' or 'cuda'; got {device.type!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"this machine has no device {device}: use 'cpu'")
    return device


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)  # a string of JSON is one of YAML


def _describe(device: torch.device) -> Device:
    """Return the device's name and memory, with a placeholder for its peaks."""
    source = f"measured with torch {torch.__version__}"
    placeholder = {"fp32": 1.0}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        vendor = "AMD" if torch.version.hip else "NVIDIA"
        memory = properties.total_memory
        return Device(properties.name, placeholder, memory=memory, vendor=vendor, unit="one GPU", source=source)
    threads = torch.get_num_threads()
    name = platform.processor() or platform.machine() or "CPU"
    unit = f"one machine, {threads} thread{'' if threads == 1 else 's'}"
    return Device(f"{name} CPU", placeholder, memory=_memory(device), unit=unit, source=source)


def _memory(device: torch.device) -> int:
    """Return the bytes of memory, for a CUDA device the free ones."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _time_products(device: torch.device, dtype: str, seconds: float) -> int:
    """Return the FLOP/s of the fastest product, 0 where the device does not support the dtype."""
    best, side, deadline = 0, _MIN_SIDE, time.perf_counter() + seconds
    with interrupts.deferred(), _allow_tf32(device, dtype == "tf32"), interrupts.allowed():
        while side <= _MAX_SIDE:
            try:
                left, right, out = (torch.ones(side, side, device=device, dtype=PRODUCTS[dtype]) for _ in range(3))
                duration = _best_time(device, partial(torch.mm, left, right, out=out), seconds / 8)
            except RuntimeError:  # dtype not supported on this device, or out of memory
                break
            best = max(best, int(2 * side**3 / duration))
            # Twice the side is 8 times the work. On a busy machine small products are too slow: threads wait.
            if 8 * duration > deadline - time.perf_counter():
                break
            side *= 2
    return best


def _time_memory(device: torch.device, seconds: float) -> int:
    length = min(_ARRAY_BYTES[device.type], _memory(device) // _MEMORY_FRACTION) // 4  # of float32
    a, b, c = (torch.ones(length, device=device) for _ in range(3))
    copy = 2 * a.nbytes / _best_time(device, partial(a.copy_, b), seconds / 2)
    triad = 3 * a.nbytes / _best_time(device, partial(torch.add, b, c, alpha=3.0, out=a), seconds / 2)
    return int(max(copy, triad))


def _best_time(device: torch.device, run: Callable[[], Any], seconds: float) -> float:
    """Return the seconds of the fastest run after a warm-up run, of as many as fit in `seconds` and a few at least."""
    deadline = time.perf_counter() + seconds
    run()
    times: list[float] = []
    while time.perf_counter() < deadline or (len(times) < _MIN_REPEATS and sum(times) < 4 * seconds):
        times.append(_time(device, run))
    return min(times)


def _time(device: torch.device, run: Callable[[], Any]) -> float:
    if device.type == "cpu":
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin
    with torch.cuda.device(device):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
    return float(start.elapsed_time(end)) / 1000


@contextmanager
def _allow_tf32(device: torch.device, enabled: bool) -> Iterator[None]:
    if device.type != "cuda":
        yield
        return
    settings = torch.backends.cuda.matmul
    before = settings.allow_tf32
    settings.allow_tf32 = enabled
    try:
        yield
    finally:
        settings.allow_tf32 = before
