"""Undo the parent's runs in a forked child, which has only one of the parent's threads."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Undo = Callable[[], None]

_always: list[Undo] = []
_active: dict[object, Undo] = {}


def at_fork(undo: Undo) -> None:
    """Call a function in each forked child, for example to replace locks that missing threads may hold."""
    _always.append(undo)


@contextmanager
def undone_in_child(undo: Undo) -> Iterator[None]:
    """Call a function in a child forked while the context lasts; the end of the context must tolerate that.

    It must not compute on large tensors: torch would wait for threads that do not exist in the child.
    """
    key = object()
    _active[key] = undo
    try:
        yield
    finally:
        _active.pop(key, None)


def _undo_in_child() -> None:
    problem = None
    for undo in (*_always, *reversed(_active.values())):
        try:
            undo()
        except Exception as error:
            problem = error if problem is None else problem
    if _active:
        random.seed()  # as Python does in a child; `undo` may have restored the generator
    _active.clear()
    if problem is not None:
        raise problem  # Python prints it and continues


os.register_at_fork(after_in_child=_undo_in_child)
