"""Page of the devices, from configs/devices.yaml: peaks, bandwidth, memory and sources."""

from __future__ import annotations

from collections.abc import Iterator

from fvflops.devices.devices import DTYPES, Device, load_devices

_INTRODUCTION = """\
# Devices

Peaks of the accelerators that `--device`, `--peaks`, [`mfu`](api/training.md) and `find_device` know by name, in
TFLOP/s by dtype (int8: 10^12 operations/s), from their vendors' documents. A multiply-add is 2 FLOPs; operands are
dense. An empty cell is a value that the vendor does not state. A name without a variant is the
fastest one, so that no utilisation is overestimated: A100 is A100 SXM 80GB, and H100 is H100 SXM. The column "Also" has
these names.

`fvflops peak --output mine.yaml` measures your own device's peaks, and `--device mine.yaml` reads them. A device of
your own is a `Device` in Python, or an entry of a YAML file:

```yaml
devices:
  My accelerator:
    vendor: Mine
    capability: 9.0                        # CUDA compute capability, of an NVIDIA GPU
    matrix: {fp16: 100e12, bf16: 100e12}   # matrix units, dense operands, FLOP/s
    sparse: {fp16: 200e12}                 # the same, where one operand has 2:4 sparsity
    vector: {fp32: 20e12}                  # outside the matrix units
    bandwidth: 1e12                        # bytes/s
    memory: 32e9                           # bytes that torch reports
    unit: one GPU
    source: my measurements
```
"""
_TERA = 10**12
_GIGA = 10**9


def page() -> str:
    devices = load_devices()
    vendors = list(dict.fromkeys(device.vendor for device in devices))
    lines = [_INTRODUCTION]
    for vendor in vendors:
        chosen = [device for device in devices if device.vendor == vendor]
        lines += [f"\n## {vendor}\n\n", *_peaks(chosen), "\n", *_sources(chosen)]
    return "".join(lines)


def _peaks(devices: list[Device]) -> Iterator[str]:
    dtypes = [dtype for dtype in DTYPES if any(dtype in device.dtypes() for device in devices)]
    heads = ["Device", *dtypes, "GB/s", "GB"]
    yield f"| {' | '.join(heads)} |\n|:---|{'---:|' * (len(heads) - 1)}\n"
    for device in devices:
        peaks = [_number(device.peak(dtype), _TERA) if dtype in device.dtypes() else "" for dtype in dtypes]
        cells = [device.name, *peaks, _number(device.bandwidth, _GIGA), _number(device.memory, _GIGA)]
        yield f"| {' | '.join(cells)} |\n"


def _sources(devices: list[Device]) -> Iterator[str]:
    yield "| Device | Also | Unit | Source |\n|:---|:---|:---|:---|\n"
    for device in devices:
        note = f" ({device.note})" if device.note else ""
        memory = f"; memory as torch reports: {device.memory_source}" if device.memory_source else ""
        yield f"| {device.name} | {', '.join(device.aliases)} | {device.unit} | {device.source}{memory}{note} |\n"


def _number(value: float | None, unit: int) -> str:
    """Return a value in a unit, without needless digits.

    >>> _number(989400000000000, 10**12), _number(None, 10**9)
    ('989.4', '')
    """
    return "" if value is None else f"{value / unit:,.1f}".removesuffix(".0")
