"""Pause Python's garbage collector while many objects are created."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# So many imported modules are most of what a pause creates.
_IMPORTED = 100
# Pauses in progress that will enable the collector again.
_PAUSES: set[object] = set()


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause the garbage collector: a burst of allocations would trigger it, and it traverses all of torch (50+ ms)."""
    was_enabled = gc.isenabled()
    pause, modules = object(), len(sys.modules)
    try:
        if was_enabled:
            _PAUSES.add(pause)
        gc.disable()
        yield
    finally:
        if was_enabled:
            try:
                # Enabling would trigger a collection, a full one if due: collect the youngest generation only, or, as
                # modules live on, make all objects old.
                if len(sys.modules) > modules + _IMPORTED and not gc.get_freeze_count():
                    gc.freeze()
                    gc.unfreeze()
                elif gc.get_count()[0] > gc.get_threshold()[0] > 0:
                    gc.collect(0)
            finally:
                gc.enable()  # first: a signal handler may raise after any call
                _PAUSES.discard(pause)


def _resume_in_child() -> None:
    if _PAUSES:
        _PAUSES.clear()
        gc.enable()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_resume_in_child)
