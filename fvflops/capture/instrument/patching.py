"""Change torch while a run lasts: wrap its functions, any number of times, and other process-wide changes."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from fvflops.capture.restore import interrupts
from fvflops.capture.restore.forks import at_fork
from fvflops.torch_internals import message_of_missing

Function = Callable[..., Any]
Wrap = Callable[[Function], Function]

_LOCK = threading.RLock()
# Patches with wrappers, by id.
_ACTIVE_PATCHES: dict[int, Patch] = {}


class Patch:
    """A function of a class or module, replaced by its wrapped version until the last wrapper is removed.

    `as_attribute` is `staticmethod` or `classmethod` if the function is one.

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
        # A message if this torch has no such function, else None.
        self.missing = message_of_missing(owner)
        self._name = name
        self._as_attribute = as_attribute
        self._wraps: list[Wrap] = []
        self._attribute: Any = None  # the unwrapped attribute of the owner, None if inherited
        self._original: Function = self._inherited

    def wrapped(self, wrap: Wrap) -> AbstractContextManager[None]:
        return wrapped([(self, wrap)])

    def _add(self, wrap: Wrap) -> None:
        if not self._wraps:
            self._attribute = vars(self._owner).get(self._name)
            self._original = self._inherited if self._attribute is None else getattr(self._owner, self._name)
            _ACTIVE_PATCHES[id(self)] = self
        self._wraps.append(wrap)
        self._apply()

    def _remove(self, wrap: Wrap) -> None:
        if wrap not in self._wraps:  # already removed in a forked child
            return
        self._wraps.remove(wrap)
        if self._wraps:
            self._apply()
        else:
            self._restore()

    def _apply(self) -> None:
        call = self._original
        for wrap in self._wraps:
            call = wrap(call)
        setattr(self._owner, self._name, call if self._as_attribute is None else self._as_attribute(call))

    def _restore(self) -> None:
        if self._attribute is not None:
            setattr(self._owner, self._name, self._attribute)
        elif self._name in vars(self._owner):
            delattr(self._owner, self._name)
        # The patch outlives the run: do not keep an original that may be another patch's wrapper.
        self._attribute, self._original = None, self._inherited
        _ACTIVE_PATCHES.pop(id(self), None)

    def _inherited(self, receiver: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(super(self._owner, receiver), self._name)(*args, **kwargs)


# A patch, and the function that wraps the patched function.
Wrapper = tuple[Patch, Wrap]


def calling(function: Function, applies: Callable[[], bool] = lambda: True) -> Wrap:
    """Return a wrap that calls `function(original, *args)` while `applies()` is true, else the original."""

    def wrap(original: Function) -> Function:
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs) if applies() else original(*args, **kwargs)

        return call

    return wrap


@contextmanager
def wrapped(wrappers: Iterable[Wrapper]) -> Iterator[None]:
    """Wrap functions while the context lasts (a run wraps 30); warn of features whose function torch lacks."""
    wrappers = list(wrappers)
    for message in {patch.missing: None for patch, _ in wrappers if patch.missing is not None}:
        warnings.warn(message, stacklevel=3)
    wrappers = [(patch, wrap) for patch, wrap in wrappers if patch.missing is None]
    try:
        with interrupts.deferred(), _LOCK:
            for patch, wrap in wrappers:
                patch._add(wrap)
        yield
    finally:
        with interrupts.deferred(), _LOCK:
            for patch, wrap in reversed(wrappers):
                patch._remove(wrap)


class Shared:
    """A process-wide change, in effect while at least one user needs it; undone in forked children."""

    def __init__(self, begin: Callable[[], object], end: Callable[[], object]) -> None:
        self._begin, self._end = begin, end
        self._lock = threading.Lock()
        self._users: set[object] = set()
        at_fork(self._end_in_child)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Add a user while the context lasts."""
        key = object()
        try:
            with interrupts.deferred(), self._lock:
                if not self._users:
                    try:
                        self._begin()
                    except BaseException:
                        self._end()
                        raise
                self._users.add(key)
            yield
        finally:
            with interrupts.deferred(), self._lock:
                if key in self._users:  # in a forked child it has been removed
                    self._users.remove(key)
                    if not self._users:
                        self._end()

    def _end_in_child(self) -> None:
        self._lock = threading.Lock()
        self._users.clear()
        self._end()


def _remove_all_in_child() -> None:
    """In a forked child, remove the wrappers that the parent's threads added."""
    global _LOCK
    _LOCK = threading.RLock()
    for patch in list(_ACTIVE_PATCHES.values()):
        patch._wraps.clear()
        patch._restore()


at_fork(_remove_all_in_child)
