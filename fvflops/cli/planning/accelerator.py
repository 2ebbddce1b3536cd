"""The accelerator that `--device` names, its kernels, its efficiency and its network."""

from __future__ import annotations

from contextlib import AbstractContextManager

from fvflops.capture.shapes.cuda.cuda_kernels import gpu_emulated
from fvflops.features.step_time.calibration import find_efficiency, find_network
from fvflops.features.step_time.efficiency import Efficiency
from fvflops.features.step_time.network import Network
from fvflops.features.utilisation.devices import CUDA_VENDORS, Device, load_peaks
from fvflops.units import parse_size

# Kinds of torch devices; other values of --device name an accelerator.
_TORCH_DEVICES = ("cpu", "cuda")


def find_accelerator(text: str | None) -> Device | None:
    """Return the accelerator that `--device` names; None for a kind of torch device, or without one.

    >>> find_accelerator("H100").name, find_accelerator("cuda")
    ('H100 SXM', None)
    """
    if text is None or text.partition(":")[0] in _TORCH_DEVICES:
        return None
    return load_peaks(text, "--device")


def find_capacity(text: str | None) -> int | None:
    """Return the bytes of a `--device` that is the memory of a GPU with its unit, None for another one.

    >>> find_capacity("24GB"), find_capacity("23.5 GiB"), find_capacity("4090")
    (24000000000, 25232932864, None)
    """
    if text is None or text.isdecimal():  # 4090 is the name of a GPU
        return None
    try:
        return parse_size(text)
    except ValueError:
        return None


def kernels_of(accelerator: Device | None, text: str | None) -> str | None:
    """Return the torch device whose kernels are shown; `text` is the value of `--device`, without an accelerator.

    >>> kernels_of(find_accelerator("H100"), "H100"), kernels_of(None, "cpu")
    ('cuda', 'cpu')
    """
    if accelerator is None:
        return text
    return "cuda" if accelerator.vendor in CUDA_VENDORS else None


def kernels_emulated(accelerator: Device | None) -> AbstractContextManager[None]:
    """Choose the kernels that torch runs on this accelerator while the context lasts."""
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


def choose_efficiency(text: str | None, accelerator: Device) -> Efficiency | None:
    """Return the efficiency of an accelerator in the file of `--efficiency`, or of FILE.yaml:NAME; None without one."""
    if text is None:
        return None
    file, name = _split_file(f"{text}:" if text.endswith((".yaml", ".yml")) else text)
    if file is None:
        raise ValueError(f"--efficiency {text}: write FILE.yaml, or FILE.yaml:NAME")
    return find_efficiency(name or accelerator.name, file=file)


def _split_file(text: str) -> tuple[str | None, str]:
    """Return the file and the name of FILE.yaml:NAME, no file of another text."""
    for ending in (".yaml", ".yml"):
        file, separator, name = text.partition(f"{ending}:")
        if separator:
            return file + ending, name
    return None, text
