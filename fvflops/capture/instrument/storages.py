"""Record storages that a program resizes, as FSDP2 does to free and reallocate gathered parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from fvflops.capture.instrument.patching import Patch, Wrapper
from fvflops.capture.recorder.recorder import Recorder

_RESIZE = Patch(torch.UntypedStorage, "resize_")


def resized_storages(recorder: Recorder) -> Iterator[Wrapper]:
    """Yield the wrapper that records resized storages of real tensors; shape tensors record theirs."""

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        def resize_(storage: torch.UntypedStorage, nbytes: int) -> Any:
            result = original(storage, nbytes)
            if recorder.recording and not recorder.paused:
                recorder.record_resized(storage)
            return result

        return resize_

    yield _RESIZE, around
