"""The accelerator that `--device` names, and the torch device whose kernels run on it."""

from __future__ import annotations

from fvflops.features.utilisation.devices import Device, load_peaks

# Kinds of torch devices; other values of --device name an accelerator.
_TORCH_DEVICES = ("cpu", "cuda")
# Vendors whose accelerators are torch's device cuda.
_CUDA_VENDORS = ("NVIDIA", "AMD")


def find_accelerator(text: str | None) -> Device | None:
    """Return the accelerator that `--device` names; None for a kind of torch device, or without one.

    >>> find_accelerator("H100").name, find_accelerator("cuda")
    ('H100 SXM', None)
    """
    if text is None or text.partition(":")[0] in _TORCH_DEVICES:
        return None
    return load_peaks(text, "--device")


def kernels_of(accelerator: Device | None, text: str | None) -> str | None:
    """Return the torch device whose kernels are shown; `text` is the value of `--device`, without an accelerator.

    >>> kernels_of(find_accelerator("H100"), "H100"), kernels_of(None, "cpu")
    ('cuda', 'cpu')
    """
    if accelerator is None:
        return text
    return "cuda" if accelerator.vendor in _CUDA_VENDORS else None
