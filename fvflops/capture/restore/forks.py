"""Undo the changes of unfinished runs in a forked child, where the parent's other threads do not exist."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Undo = Callable[[], None]

_permanent: list[Undo] = []
_active: dict[object, Undo] = {}


def at_fork(undo: Undo) -> None:
    """Call a function in each forked child, for example to replace locks that missing threads may hold."""
    _permanent.append(undo)


@contextmanager
def undone_in_child(undo: Undo) -> Iterator[None]:
    """Call a function in a child forked while the context lasts; the end of the context must tolerate that.

    The function must not compute on large tensors: torch would wait for threads that do not exist in the child.
    """
    key = object()
    _active[key] = undo
    try:
        yield
    finally:
        _active.pop(key, None)


@contextmanager
def undone(undo: Undo) -> Iterator[None]:
    """Call a function at the end of the context, and in a child forked while it lasts."""
    with undone_in_child(undo):
        try:
            yield
        finally:
            undo()


def _undo_in_child() -> None:
    first_error = None
    for undo in (*_permanent, *reversed(_active.values())):
        try:
            undo()
        except Exception as error:
            first_error = error if first_error is None else first_error
    if _active:
        random.seed()  # as Python does in a child; `undo` may have restored the generator
    _active.clear()
    if first_error is not None:
        raise first_error  # Python prints it and continues


os.register_at_fork(after_in_child=_undo_in_child)
