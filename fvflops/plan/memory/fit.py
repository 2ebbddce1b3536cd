"""Whether memory fits a device, and by how much it does or not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fvflops.units import format_bytes


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether `needed` bytes fit a device's `memory`, as torch reports it, less a `reserve`; None if it is not known.

    Of the needed bytes `tensors` are in use at the peak; the others are cached by torch's allocator.

    >>> print(Verdict(92_300_000_000, "H100 SXM", 84_932_977_459, 536_870_912))
    Does not fit: 92.3 GB of 84.9 GB. That is 7.9 GB too much for H100 SXM, where 537 MB are set aside (an allowance).
    """

    needed: int
    device: str = ""
    memory: float | None = None
    reserve: int = 0
    reserved_for: str = ""
    advice: str = ""
    tensors: int | None = None

    @property
    def room(self) -> float | None:
        """The bytes that are left, negative where they are too few; None if the memory is not known."""
        return None if self.memory is None else self.memory - self.reserve - self.needed

    @property
    def fits(self) -> bool | None:
        """Whether the memory is enough; None if it is not known."""
        return None if self.room is None else self.room >= 0

    def __str__(self) -> str:
        """Return the verdict, then its details."""
        needed = format_bytes(self.needed)
        if self.memory is None or self.room is None:
            unknown = f"the memory of {self.device} is not known" if self.device else "no device is named"
            return f"Needs {needed}: {unknown}. {self.advice}".rstrip()
        aside = f"{format_bytes(self.reserve)} are set aside{self.reserved_for and f' for {self.reserved_for}'}"
        aside = f", where {aside} (an allowance)" if self.reserve else ""
        room, total = format_bytes(abs(self.room)), format_bytes(self.memory)
        if self.fits:
            return f"Fits: {needed} of {total}. {room} are left of {self.device}{aside}."
        text = f"Does not fit: {needed} of {total}. That is {room} too much for {self.device}{aside}."
        near = ""
        if self.tensors is not None and self.tensors + self.reserve <= self.memory:
            near = f"The tensors alone, {format_bytes(self.tensors)}, fit: if torch's allocator frees cached blocks in "
            near += "time, the step runs, more slowly."
        return " ".join(filter(None, [text, near, self.advice]))

    def encode(self) -> dict[str, Any]:
        """Return the verdict as data."""
        return {
            "text": str(self),
            "fits": self.fits,
            "needed": self.needed,
            "device": self.device,
            "memory": self.memory,
            "reserve": self.reserve,
            "reserved_for": self.reserved_for,
        }
