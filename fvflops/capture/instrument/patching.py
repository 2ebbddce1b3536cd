"""The patch: a function of torch, wrapped by all who watch its calls, who may come and go in any order."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from fvflops.capture.restore.forks import at_fork
from fvflops.capture.restore.interrupts import deferred
from fvflops.torch_internals import message_of_missing

Function = Callable[..., Any]
Wrap = Callable[[Function], Function]

_LOCK = threading.RLock()
# The patches that are wrapped just now.
_WRAPPED: dict[int, Patch] = {}


class Patch:
    """One attribute of a class or a module that calls go through; as long as nobody watches, it is torch's own.

    `as_attribute` makes an attribute of a function: `staticmethod` or `classmethod`, where it is one.

    >>> class Door:
    ...     def open(self):
    ...         return "open"
    >>> patch = Patch(Door, "open")
    >>> with patch.wrapped(lambda call: lambda self: "wide " + call(self)):
    ...     Door().open()
    'wide open'
    >>> Door().open()
    'open'
    """

    def __init__(self, owner: Any, name: str, as_attribute: Callable[[Function], Any] | None = None) -> None:
        self._owner = owner
        # What is lost, where this torch has no such function.
        self.lost = message_of_missing(owner)
        self._name = name
        self._as_attribute = as_attribute
        self._wraps: list[Wrap] = []
        self._own: Any = None
        self._original: Function = self._inherited

    def wrapped(self, wrap: Wrap) -> AbstractContextManager[None]:
        """Wrap the function for as long as the context lasts; `wrap` makes a function of the one to be called."""
        return wrapped([(self, wrap)])

    def _add(self, wrap: Wrap) -> None:
        if not self._wraps:
            self._own = vars(self._owner).get(self._name)
            self._original = self._inherited if self._own is None else getattr(self._owner, self._name)
            _WRAPPED[id(self)] = self
        self._wraps.append(wrap)
        self._put()

    def _drop(self, wrap: Wrap) -> None:
        if wrap not in self._wraps:  # a forked child has dropped it
            return
        self._wraps.remove(wrap)
        if self._wraps:
            self._put()
        else:
            self._put_back()

    def leave(self) -> None:
        """Let nobody watch any more."""
        self._wraps.clear()
        self._put_back()

    def _put(self) -> None:
        call = self._original
        for wrap in self._wraps:
            call = wrap(call)
        setattr(self._owner, self._name, call if self._as_attribute is None else self._as_attribute(call))

    def _put_back(self) -> None:
        if self._own is not None:
            setattr(self._owner, self._name, self._own)
        elif self._name in vars(self._owner):
            delattr(self._owner, self._name)
        _WRAPPED.pop(id(self), None)

    def _inherited(self, receiver: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(super(self._owner, receiver), self._name)(*args, **kwargs)


# A function, and what makes of the one to be called the one that is called in its place.
Wrapping = tuple[Patch, Wrap]


@contextmanager
def wrapped(wrappings: Iterable[Wrapping]) -> Iterator[None]:
    """Wrap functions for as long as the context lasts, all in one step and back in another: a run wraps some 30.

    One that this torch does not have is left out, with a warning that says what is lost.
    """
    wrappings = list(wrappings)
    for lost in {patch.lost: None for patch, _ in wrappings if patch.lost is not None}:
        warnings.warn(lost, stacklevel=3)
    wrappings = [(patch, wrap) for patch, wrap in wrappings if patch.lost is None]
    try:
        with deferred(), _LOCK:
            for patch, wrap in wrappings:
                patch._add(wrap)
        yield
    finally:
        with deferred(), _LOCK:
            for patch, wrap in reversed(wrappings):
                patch._drop(wrap)


def _leave_all() -> None:
    """In a forked child, leave what the threads of the parent watch."""
    global _LOCK
    _LOCK = threading.RLock()
    for patch in list(_WRAPPED.values()):
        patch.leave()


at_fork(_leave_all)
