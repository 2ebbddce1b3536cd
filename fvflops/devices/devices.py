"""Devices and their peaks, read from a YAML file in which each device names its source."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

from fvflops import paths
from fvflops.formulas.yaml_document import Node, read_entries
from fvflops.text import explaining_arguments, nearest, short_repr, shown, suggest, truncate
from fvflops.trace.notebook_table import write_text_table
from fvflops.units import format_short

SHIPPED = paths.SCHEME + "devices.yaml"

# Short dtype → torch's names of the dtypes with its peak; complex numbers have the peak of their parts.
DTYPES = {
    "fp64": ("float64", "double", "complex128", "cdouble"),
    "fp32": ("float32", "float", "complex64", "cfloat"),
    "tf32": ("tfloat32",),
    "fp16": ("float16", "half", "complex32", "chalf"),
    "bf16": ("bfloat16",),
    "fp8": ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
    "int8": ("uint8", "qint8", "quint8"),
    "fp4": ("float4_e2m1fn_x2",),
}
_SHORT = {name: short for short, names in DTYPES.items() for name in (short, *names)}

# Words of a device's name that do not distinguish it.
_VENDORS = frozenset(
    ["nvidia", "tesla", "geforce", "amd", "instinct", "google", "cloud", "aws", "amazon", "intel", "apple", "gpu"]
)
_KINDS = ("matrix", "sparse", "vector")
_NUMBERS = ("bandwidth", "memory", "ecc", "multiprocessors")
_TEXTS = ("vendor", "unit", "source", "note", "memory_source")
_KEYS = (*_KINDS, *_NUMBERS, *_TEXTS, "aliases", "capability")
_CAPABILITY = re.compile(r"([0-9]{1,2})\.([0-9])")
_NUMBER = re.compile(r"[0-9]{1,20}(\.[0-9]{1,20})?(e[0-9]{1,2})?")

# Vendors whose accelerators are torch's device cuda.
CUDA_VENDORS = ("NVIDIA", "AMD")
# Digits of a device's name that is a number, such as 4090; a shorter number is a memory in GB.
NAME_DIGITS = 4
# Bytes outside of torch's allocator: the driver's context with kernels, and one of NCCL's communicators.
_CONTEXT, _NCCL = 512 * 2**20, 2**30
# Additional communicators of tensor with pipeline parallelism, from the memory of measured runs.
_FURTHER = 3

# Remedy for a device that is not listed.
_OTHERS = "Others can be given as a Device or as FILE.yaml, which 'fvflops peak --output FILE.yaml' measures"


def short_dtype(dtype: object) -> str:
    """Return the short name of a dtype in a Device's peaks, from torch's dtype or any of its names."""
    name = str(dtype).removeprefix("torch.")
    if name.lower() not in _SHORT:
        # int64 is not a typo of int8.
        near = "" if "int" in name else suggest(name.lower(), _SHORT)
        hint = near or f": peaks are for {', '.join(DTYPES)}"
        raise ValueError(f"no device has a peak for the dtype {truncate(name)!r}{hint}")
    return _SHORT[name.lower()]


@explaining_arguments
@dataclass(frozen=True, slots=True, repr=False)
class Device:
    """The peaks of one device, FLOP/s by dtype (int8: operations/s), where a multiply-add is 2.

    `matrix` has the peaks of its matrix units for dense operands, `sparse` the same for 2:4 sparsity, `vector` the
    peaks outside the matrix units. `bandwidth` is in bytes/s and `memory` its memory's size in bytes, None if unknown:
    as torch reports it where `memory_source` names where that is seen, else the vendor's. `unit` says what one device
    is: a GPU, a die, a module. `multiprocessors` are SMs of NVIDIA, compute units of AMD. `source` names the document.
    One of `ecc` bytes, and of the bandwidth, is for ECC where it has no memory of its own (GDDR6).
    `capability` is CUDA's compute capability, (9, 0) of an H100, which chooses kernels. Keys of the peaks are the short
    names in DTYPES; contradictory peaks raise ValueError.

    >>> mine = Device("mine", matrix={"bfloat16": 400e12}, vector={"float32": 25e12})
    >>> mine.peak("bf16"), mine.dtypes()
    (400000000000000, ('fp32', 'bf16'))
    """

    name: str
    matrix: Mapping[str, float] = field(default_factory=dict)
    sparse: Mapping[str, float] = field(default_factory=dict)
    vector: Mapping[str, float] = field(default_factory=dict)
    bandwidth: float | None = None
    memory: float | None = None
    vendor: str = ""
    aliases: tuple[str, ...] = ()
    unit: str = ""
    source: str = ""
    note: str = ""
    memory_source: str = ""
    capability: tuple[int, int] | None = None
    multiprocessors: int | None = None
    ecc: float | None = None

    def __post_init__(self) -> None:
        for kind in _KINDS:
            object.__setattr__(self, kind, _check_peaks(getattr(self, kind), f"{kind} of {self.name}"))
        for key in _NUMBERS:
            if getattr(self, key) is not None:
                object.__setattr__(self, key, _check_number(getattr(self, key), f"{key} of {self.name}"))
        if not self.matrix and not self.vector:
            raise ValueError(f"{self.name} has no peak: add matrix or vector, such as matrix={{'bf16': 400e12}}")
        for dtype, peak in self.sparse.items():
            if peak < self.matrix.get(dtype, math.inf):
                dense = f"the dense peak {self.matrix[dtype]}" if dtype in self.matrix else "no dense peak: add matrix"
                raise ValueError(f"sparse of {self.name}: {dtype} has {peak}, but {dense}")

    def __repr__(self) -> str:
        peaks = [f"{dtype} {format_short(self.peak(dtype))}FLOP/s" for dtype in self.dtypes()]
        bandwidth = "" if self.bandwidth is None else f"{format_short(self.bandwidth)}B/s"
        return short_repr(self, self.name, bandwidth, *reversed(peaks))

    def __str__(self) -> str:
        peaks: dict[str, Mapping[str, float]] = {kind: getattr(self, kind) for kind in _KINDS if getattr(self, kind)}
        dtypes = [dtype for dtype in DTYPES if any(dtype in kind for kind in peaks.values())]
        shown = ([format_short(kind[key]) if key in kind else "" for kind in peaks.values()] for key in dtypes)
        rows = [[dtype, *values] for dtype, values in zip(dtypes, shown, strict=True)]
        sizes = [("bandwidth", self.bandwidth, "B/s"), ("memory", self.memory, "B")]
        notes = [f"{name} {format_short(value)}{unit}" for name, value, unit in sizes if value is not None]
        notes += [f"source: {self.source}"] * bool(self.source)
        return write_text_table(self.name, ["dtype", *(f"{kind} FLOP/s" for kind in peaks)], rows, "; ".join(notes))

    def reserve(self, mesh: Mapping[str, int] | None = None) -> int:
        """Return the bytes that a plan sets aside for the context of CUDA or ROCm, and for NCCL's buffers.

        An allowance: it depends on driver, kernels and network. Each axis of the mesh (name → size) has a communicator;
        tensor and pipeline parallelism together have more, such as for the norm of gradients of both.

        >>> [find_device("H100").reserve(m) / 2**20 for m in ({"dp": 1}, {"fsdp": 8}, {"pp": 4, "dp": 8, "tp": 2})]
        [512.0, 1536.0, 6656.0]
        """
        if self.vendor not in CUDA_VENDORS:
            return 0
        axes = {axis for axis, size in (mesh or {}).items() if size > 1}
        return _CONTEXT + _NCCL * (len(axes) + (_FURTHER if {"tp", "pp"} <= axes else 0))

    def dtypes(self, *, sparse: bool = False) -> tuple[str, ...]:
        """Return the dtypes with a peak, or with one for 2:4 sparsity."""
        return tuple(dtype for dtype in DTYPES if dtype in (self.sparse if sparse else {**self.matrix, **self.vector}))

    def peak(self, dtype: object, *, sparse: bool = False) -> int:
        """Return the highest peak for a dtype, FLOP/s; a dtype without one raises ValueError with the known dtypes.

        Without `sparse` it is the higher of the matrix and the vector units' for dense operands.

        >>> find_device("H100").peak("float32"), find_device("H100").peak("bfloat16")
        (66900000000000, 989400000000000)
        """
        short = short_dtype(dtype)
        kinds = (self.sparse,) if sparse else (self.matrix, self.vector)
        peaks = [int(kind[short]) for kind in kinds if short in kind]
        if not peaks:
            dtypes = ", ".join(self.dtypes(sparse=sparse)) or "none"
            absent = f"{self.name} has no peak for {short}{' at 2:4 sparsity' * sparse}: it has {dtypes}"
            remedy = "omit sparse" if sparse else "pass dtype= (--dtype) with one of these"
            raise ValueError(f"{absent}; {remedy}, or a Device or FILE.yaml with that peak")
        return max(peaks)


@explaining_arguments
def find_device(name: str, *, file: str | os.PathLike[str] = SHIPPED) -> Device:
    """Return the device of a name, as `torch.cuda.get_device_name()` gives it or shorter, in any case and word order.

    `file` is a YAML file in the form of `fvflops://devices.yaml`, at a path or a URI that iopath can open. An unknown
    name raises ValueError with the nearest: a variant of a device is never used for another. A mistake in the file
    raises TableError with the file and the line.

    >>> [find_device(name).name for name in ("h100", "NVIDIA H100 80GB HBM3", "A100-SXM4-80GB", "Tesla T4", "tpu v5e")]
    ['H100 SXM', 'H100 SXM', 'A100 SXM 80GB', 'T4', 'TPU v5e']
    >>> find_device("H10")
    Traceback (most recent call last):
    ValueError: no device 'H10': did you mean 'H100'? Others can be given as a Device or as ...
    """
    if not isinstance(name, str):
        raise TypeError(f"device must be a name such as 'H100', or a Device; got {shown(name)}")
    devices = load_devices(file)
    key = _key(name)
    for device in devices:
        if key in map(_key, (device.name, *device.aliases)):
            return device
    if "mig" in key:
        raise ValueError(f"{truncate(name)!r} is a slice of a device, whose peak is in no datasheet. {_OTHERS}")
    names = {alias.lower(): alias for device in devices for alias in (device.name, *device.aliases)}
    is_memory = name.isdecimal() and len(name) < NAME_DIGITS
    near = nearest(f"{name}gb" if is_memory else name.lower(), names)
    if name.lower() in ("cpu", "cuda"):
        hint = "its peaks are this machine's own."
    elif near:
        hint = f"did you mean {names[near]!r}?"
    elif file == SHIPPED:
        hint = "'fvflops list devices' lists all."
    else:
        hint = f"{file} has {', '.join(device.name for device in devices)}."
    raise ValueError(f"no device {truncate(name)!r}: {hint} {_OTHERS}")


def load_devices(file: str | os.PathLike[str] = SHIPPED) -> tuple[Device, ...]:
    """Return the devices of a YAML file in the form that `find_device` reads; the shipped one is cached."""
    file = os.fspath(file)
    return _load_shipped() if file == SHIPPED else _load(file)


def _load(file: str) -> tuple[Device, ...]:
    return tuple(read_entries(file, "devices", partial(_read_device, names={})).values())


_load_shipped = lru_cache(maxsize=1)(partial(_load, SHIPPED))


def _read_device(node: Node, name: str, names: dict[tuple[str, ...], str]) -> Device:
    fields = node.fields("a device", _KEYS)
    if "source" not in fields:
        raise node.error(f"{name} has no source: name the document that its peaks are from")
    values: dict[str, Any] = {key: fields[key].text(f"{key} of {name}") for key in _TEXTS if key in fields}
    readers = {**dict.fromkeys(_KINDS, _read_peaks), **dict.fromkeys(_NUMBERS, _read_number)}
    for key, read in {**readers, "capability": _read_capability}.items():
        if key in fields:
            values[key] = read(fields[key], f"{key} of {name}")
    if "aliases" in fields:
        items = fields["aliases"].items(f"aliases of {name}", "[H100, H100 SXM5]")
        values["aliases"] = tuple(item.name(f"an alias of {name}") for item in items)
    device = node.make(partial(Device, name, **values))
    _check_names(device, node, names)
    return device


def _read_peaks(node: Node, what: str) -> dict[str, int]:
    peaks: dict[str, int] = {}
    for key, value in node.fields(what).items():
        dtype = value.make(partial(short_dtype, key))
        if dtype in peaks:
            raise value.error(f"{what}: {dtype} is given twice, once as {key}")
        peaks[dtype] = _read_number(value, f"{what} at {key}")
    return peaks


def _read_capability(node: Node, what: str) -> tuple[int, int]:
    text = node.text(what)
    match = _CAPABILITY.fullmatch(text)
    if match is None:
        raise node.error(f"{what} is {truncate(text)!r}: write a compute capability such as 9.0")
    return int(match[1]), int(match[2])


def _read_number(node: Node, what: str) -> int:
    text = node.text(what)
    if not _NUMBER.fullmatch(text) or not float(text).is_integer() or float(text) == 0:
        raise node.error(f"{what} is {truncate(text)!r}: write a number such as 989.4e12")
    return int(float(text))


def _check_names(device: Device, node: Node, names: dict[tuple[str, ...], str]) -> None:
    """Raise TableError for a name that another device in `names` has; add this device's names to it."""
    for name in (device.name, *device.aliases):
        key = _key(name)
        if not key:
            raise node.error(f"{truncate(name)!r} names no device: write more than its vendor")
        if key in names:
            raise node.error(f"{name!r} is given twice: it is a name of {names[key]} too")
        names[key] = device.name


def _check_peaks(peaks: Mapping[str, float], what: str) -> dict[str, int]:
    checked = {short_dtype(dtype): _check_number(peak, f"{what} at {dtype}") for dtype, peak in peaks.items()}
    if len(checked) != len(peaks):
        raise ValueError(f"{what}: {', '.join(map(str, peaks))} name one dtype twice")
    return checked


def _check_number(value: float, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"{what} must be a positive number; got {shown(value)}")
    return int(value)


def _key(name: str) -> tuple[str, ...]:
    """Return the sorted words and numbers of a name without its vendor: "A100-SXM4-80GB" is "NVIDIA A100 80GB SXM4"."""
    words = re.findall(r"[a-z]+|[0-9]+", name.lower())
    return tuple(sorted(word for word in words if word not in _VENDORS))


def resolve_device(device: str | Device) -> Device:
    """Return a Device itself, or the one that a name, FILE.yaml or FILE.yaml:NAME gives."""
    if isinstance(device, Device):
        return device
    return load_peaks(device, "device") if isinstance(device, str) else find_device(device)


def load_peaks(text: str, option: str) -> Device:
    """Return the device that an option names: a shipped one, FILE.yaml or FILE.yaml:NAME."""
    for ending in (".yaml", ".yml"):
        file, separator, name = text.partition(ending + ":")
        if separator:
            return find_device(name, file=file + ending)
        if text.endswith(ending):
            first, *others = load_devices(text)
            if others:
                names = ", ".join(device.name for device in (first, *others))
                raise ValueError(f"{option} {text}: the file has several devices, {names}: write {text}:{first.name}")
            return first
    return find_device(text)
