"""Python's collector of cycles, paused where much is made and nothing is garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Keep the collector from walking what a burst of work makes, and with it all objects of torch: 50 ms and more."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            # What was made would start a collection at once, a full one where that is due: have the young ones only.
            if gc.get_count()[0] > gc.get_threshold()[0] > 0:
                gc.collect(0)
            gc.enable()
