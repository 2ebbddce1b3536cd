"""The part of the Recorder that detects unseen work, and where such work is attributed."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch

from fvflops.capture.recorder.caller_lines import SourceLine
from fvflops.capture.recorder.thread_state import ThreadState
from fvflops.trace import Region, Signature


class Site(NamedTuple):
    """Where work is attributed: stack, phase and source line."""

    stack: int
    phase: str
    source: SourceLine


class UnseenRecorder(Protocol):
    """The part of the Recorder that UnseenWork uses."""

    storages: list[tuple[Any, ...]]
    storage_indices: dict[int, int]

    @property
    def length(self) -> int: ...
    def has_ops_since(self, length: int) -> bool: ...
    def thread_state(self) -> ThreadState: ...
    def stack_and_phase(self) -> tuple[int, str]: ...
    def storage_of(self, tensor: torch.Tensor, origin: str) -> int: ...
    def storages_of(self, values: Any) -> tuple[int, ...]: ...
    def innermost_region(self, stack: int) -> Region: ...
    def append_unseen(self, signature: Signature, stack: int, phase: str, writes: tuple[int, ...]) -> None: ...
