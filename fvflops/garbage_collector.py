"""Pause Python's garbage collector while many objects are created."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

# One for each pause that is to end with the collector switched on.
_PAUSES: set[object] = set()


@contextmanager
def gc_paused() -> Iterator[None]:
    """Keep the collector from walking what a burst of work makes, and with it all objects of torch: 50 ms and more."""
    collects = gc.isenabled()
    pause = object()
    try:
        if collects:
            _PAUSES.add(pause)
        gc.disable()
        yield
    finally:
        if collects:
            try:
                # What was made would start a collection at once, a full one where it is due: have the young ones only.
                if gc.get_count()[0] > gc.get_threshold()[0] > 0:
                    gc.collect(0)
            finally:
                gc.enable()  # first of all: a signal's handler may raise after any call
                _PAUSES.discard(pause)


def _resume_in_child() -> None:
    if _PAUSES:
        _PAUSES.clear()
        gc.enable()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_resume_in_child)
