"""Leave the runs of the parent in a forked child, which has one thread and a copy of all that the others were doing."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Undo = Callable[[], None]

_always: list[Undo] = []
_meanwhile: dict[object, Undo] = {}


def at_fork(undo: Undo) -> None:
    """Call a function in each forked child, such as one that makes new locks: who holds the old ones is not there."""
    _always.append(undo)


@contextmanager
def undone_in_child(undo: Undo) -> Iterator[None]:
    """Call a function in a child that is forked while the context lasts; what ends the context must bear that.

    It must not compute on large tensors: the threads that would do so are not there, and torch waits for them.
    """
    key = object()
    _meanwhile[key] = undo
    try:
        yield
    finally:
        _meanwhile.pop(key, None)


def _leave() -> None:
    problem = None
    for undo in (*_always, *reversed(_meanwhile.values())):
        try:
            undo()
        except Exception as error:
            problem = error if problem is None else problem
    if _meanwhile:
        random.seed()  # as Python does in a child, whose generator the undoing may have put back
    _meanwhile.clear()
    if problem is not None:
        raise problem  # Python prints it, and goes on


os.register_at_fork(after_in_child=_leave)
