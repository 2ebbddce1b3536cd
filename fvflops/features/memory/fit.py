"""Whether memory fits a device, and by how much it does or not."""

from __future__ import annotations

from fvflops.units import format_bytes


def describe_fit(nbytes: int, device: str, capacity: float | None, *, advice: str = "") -> str:
    """Return whether `nbytes` fit the `capacity` in bytes of a device, None if unknown, and advice if they do not.

    >>> describe_fit(92_300_000_000, "H100 SXM", 80e9)
    'Does not fit: 92.3 GB is 12.3 GB more than the 80 GB of H100 SXM.'
    """
    needed = format_bytes(nbytes)
    if capacity is None:
        return f"Predicted: {needed}. The memory of {device} is not known: give it in a file of devices."
    total, room = format_bytes(capacity), format_bytes(abs(capacity - nbytes))
    if nbytes <= capacity:
        return f"Fits: {needed} of the {total} of {device}; {room} are left for what is not predicted."
    return " ".join(filter(None, [f"Does not fit: {needed} is {room} more than the {total} of {device}.", advice]))
