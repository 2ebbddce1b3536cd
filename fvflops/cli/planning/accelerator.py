"""The device that `--device` names: its kernels, its efficiency and its network; and `--build-on`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

from fvflops.capture.shapes.cuda_kernels import gpu_emulated
from fvflops.devices.devices import CUDA_VENDORS, NAME_DIGITS, Device, load_peaks
from fvflops.plan.step_time.calibration import Efficiency, Network, find_efficiency, find_network
from fvflops.sources.loaded_model import parse_dtype
from fvflops.units import parse_size

_META = "meta"


def find_accelerator(text: str | None) -> Device | None:
    """Return the accelerator that `--device` names; None for a kind of torch device, or without one.

    >>> find_accelerator("H100").name, find_accelerator("cuda")
    ('H100 SXM', None)
    """
    if text is None or text.partition(":")[0] in ("cpu", "cuda"):
        return None
    if text.lower() == "gpu":
        known = "'fvflops list devices' lists them"
        raise ValueError(f"no device {text!r}: write cuda, or its name, such as H100; {known}")
    return load_peaks(text, "--device")


def find_capacity(text: str | None) -> int | None:
    """Return the bytes of a `--device` that gives a GPU's memory, such as 24GB; None for any other value.

    >>> find_capacity("24GB"), find_capacity("23.5 gib"), find_capacity("4090")
    (24000000000, 25232932864, None)
    >>> find_capacity("80")
    Traceback (most recent call last):
    ValueError: --device 80: write 80GB for the memory of a GPU, or its name, such as H100
    """
    if text is not None and text.isdecimal() and len(text) < NAME_DIGITS:
        raise ValueError(f"--device {text}: write {text}GB for the memory of a GPU, or its name, such as H100")
    if text is None or text.isdecimal():
        return None
    try:
        size = parse_size(text.upper().replace("IB", "iB"))
    except ValueError:
        return None
    if size <= 0:
        raise ValueError(f"--device {text}: the memory of a GPU is above 0, such as 24GB")
    return size


def kernels_of(accelerator: Device | None, text: str | None) -> str | None:
    """Return the torch device whose kernels are recorded: the accelerator's, else `text`, the value of `--device`.

    >>> kernels_of(find_accelerator("H100"), "H100"), kernels_of(None, "cpu")
    ('cuda', 'cpu')
    """
    if accelerator is None:
        return text
    return "cuda" if accelerator.vendor in CUDA_VENDORS else None


def kernels_emulated(accelerator: Device | None) -> AbstractContextManager[None]:
    """Record the kernels that torch would choose on this accelerator while the context lasts."""
    return gpu_emulated(None if accelerator is None else accelerator.capability)


def choose_network(text: str | None) -> Network | None:
    """Return the network that `--network` names: a shipped one, or NAME of FILE.yaml:NAME; None without one.

    >>> choose_network("HGX H100 3200G").gpus_per_node
    8
    """
    if text is None:
        return None
    file, name = _split_file(text)
    return find_network(name) if file is None else find_network(name, file=file)


def choose_efficiency(arguments: argparse.Namespace, accelerator: Device) -> Efficiency:
    """Return the efficiency that `--efficiency` names: a software stack or FILE.yaml[:NAME]; tf32 by `--dtype`."""
    text = arguments.efficiency or ""
    file, name = _split_file(f"{text}:" if text.endswith((".yaml", ".yml")) else text)
    found = find_efficiency(accelerator, software=name or None, **({} if file is None else {"file": file}))
    is_tf32 = arguments.dtype is not None and parse_dtype(arguments.dtype) == "tf32"
    return replace(found, float32_matmul="tf32") if is_tf32 else found


def _split_file(text: str) -> tuple[str | None, str]:
    """Return the file and the name of FILE.yaml:NAME; (None, text) for any other text."""
    for ending in (".yaml", ".yml"):
        file, separator, name = text.partition(f"{ending}:")
        if separator:
            return file + ending, name
    return None, text


def built_on(arguments: argparse.Namespace) -> str | None:
    """Return the torch device on which the model is built; `--device meta` of version 1.0 is `--build-on meta`."""
    named: str | None = arguments.build_on
    return _META if named is None and _named(arguments) == _META else named


def parse_device(text: str) -> str:
    """Return a device whose kernels can be counted, as argparse's `type`: a torch device, or an accelerator's name."""
    if text == _META:
        return text
    try:
        accelerator = find_accelerator(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"pass cpu, cuda or an accelerator; {error}") from None
    if accelerator is not None and kernels_of(accelerator, text) is None:
        raise argparse.ArgumentTypeError(f"kernels of {accelerator.name} are not known to torch: omit it, or pass cuda")
    return text


def _named(arguments: argparse.Namespace) -> str | None:
    """Return the value of `--device`; in `roofline` it also describes a saved Trace, and is in `arguments.device`."""
    text: str | None = arguments.run_device if "run_device" in arguments else arguments.device
    return text


def runs_on(arguments: argparse.Namespace) -> tuple[str | None, Callable[[], AbstractContextManager[None]]]:
    """Return the torch device whose kernels are recorded, None for the model's own, and a context to record in.

    For the CPU it is None where the model is built on the CPU or without weights: its kernels are recorded by default.
    """
    named = _named(arguments)
    text = None if named == _META else named
    accelerator = find_accelerator(text)
    kernels = kernels_of(accelerator, text)
    if kernels == (built_on(arguments) or "cpu") or (kernels == "cpu" and built_on(arguments) == _META):
        kernels = None
    if kernels is not None and arguments.execution == "real":
        raise ValueError(f"--device {text} is simulated, without values: omit it, or --execution real")
    return kernels, partial(kernels_emulated, accelerator)
