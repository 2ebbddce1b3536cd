"""Defer signals during set-up and teardown of a run, and let them through while the model runs.

Python calls a signal handler between any two bytecodes of the main thread. An exception of the handler (Ctrl-C's
KeyboardInterrupt, a time limit by SIGALRM) leaves the interrupted code half done: an `__enter__` without its
`__exit__`, a `finally` that ends at its first line. Blocking signals by pthread_sigmask is not enough: the kernel then
delivers them to another thread, of which torch has many, and Python still calls the handler in the main thread. So
during a run each Python handler is wrapped by one that calls it immediately or later.

Not deferred: exceptions injected by another thread with PyThreadState_SetAsyncExc, and handlers outside Python, which
end the process or do not touch Python.
"""

from __future__ import annotations

import _signal
import _thread
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from threading import get_ident
from types import CodeType, FrameType, FunctionType
from typing import Any, TypeVar

from fvflops.capture.restore.forks import at_fork

# The functions of `signal` create an enum for each value, which takes ten times as long.
_handler_of, _set_handler = _signal.getsignal, _signal.signal
# A recording wraps the attribute.
_start_thread = _thread.start_new_thread
# Retries when handlers raise while the handlers of several signals are replaced.
_RETRIES = 8
# Exceptions in finalizers and weak reference callbacks are printed and discarded: a signal that arrives there is sent
# again after this many seconds.
_RESEND_SECONDS = 0.001
_WEAKREF_FILES = frozenset({weakref.__file__, sys.modules["_weakrefset"].__file__})
_callbacks: set[CodeType] = set()

Function = TypeVar("Function")


class deferred:
    """A context that defers signal handlers to its end, or to an `allowed` context inside.

    Overhead is about 5 µs in the main thread, and none in others, where Python calls no handlers.
    """

    __slots__ = ("_before", "_handlers")

    def __init__(self) -> None:
        self._handlers: _Handlers | None = None
        self._before: tuple[bool, bool] | None = None

    def __enter__(self) -> None:
        global _handlers
        if get_ident() != threading.main_thread().ident:
            return
        handlers = _handlers
        if handlers is None:
            handlers = _Handlers()
            handlers.install()
            self._handlers = _handlers = handlers
        else:
            before = handlers.open, handlers.may_open
            handlers.open = False
            handlers.may_open = before[0]
            self._handlers, self._before = handlers, before

    def __exit__(self, *_: object) -> None:
        global _handlers
        handlers = self._handlers
        if handlers is None:
            return
        handlers.open = False
        if self._before is None:
            _handlers = None
            handlers.uninstall()
            return
        # In this order: once open, a handler may raise.
        handlers.may_open = self._before[1]
        handlers.open = self._before[0]
        if handlers.open:
            handlers.deliver()


class allowed:
    """A context inside `deferred` in which handlers are called immediately, for the model's run.

    After a handler has raised, no other is called until the exception has left `deferred`, unless the model catches it.
    """

    __slots__ = ("_handlers",)

    def __init__(self) -> None:
        self._handlers: _Handlers | None = None

    def __enter__(self) -> None:
        handlers = _handlers
        if handlers is None or not handlers.may_open or get_ident() != handlers.thread:
            return
        handlers.deliver()
        self._handlers = handlers
        handlers.open = True
        handlers.deliver()  # signals that arrived in between

    def __exit__(self, *_: object) -> None:
        if self._handlers is not None:
            self._handlers.open = False


def is_interrupt(error: BaseException) -> bool:
    """Return whether a signal handler raised an error or its cause: then it must propagate to the caller."""
    handlers = _handlers
    return handlers is not None and handlers.raised is not None and _is_caused_by(error, handlers.raised)


class _Handlers:
    """The wrapping handlers, installed while the outermost `deferred` lasts.

    `open`: handlers may be called now. `may_open`: `allowed` may set `open`. `raised`: a handler's exception.
    """

    def __init__(self) -> None:
        self.thread = get_ident()
        self.open = False
        self.may_open = True
        self.raised: BaseException | None = None
        self._pending: dict[int, FrameType | None] = {}
        self._originals: dict[int, Any] = {}
        self._error: BaseException | None = None
        self._ended = False

    def install(self) -> None:
        """Wrap each Python handler; if one raises meanwhile, restore all and raise its exception."""
        signals = [number for number in range(1, signal.NSIG) if callable(_handler_of(number))]
        self._originals = {number: _handler_of(number) for number in signals}
        self._retry(self._wrap_handlers)
        if self._error is not None:
            self.uninstall()

    def uninstall(self) -> None:
        """Restore the handlers, call pending ones, and raise the first exception."""
        try:
            for step in (self._call_pending, self._set_originals, self._call_pending):
                self._retry(step)
            if self._error is not None:
                raise self._error
        finally:
            self._ended = True
            self.raised = self._error = None  # their frames refer to this object

    def _wrap_handlers(self) -> None:
        for number in self._originals:
            if _handler_of(number) != self.handle:
                _set_handler(number, self.handle)

    def _set_originals(self) -> None:
        for number, original in self._originals.items():
            if _handler_of(number) == self.handle:  # not if the model has set another, which remains
                _set_handler(number, original)

    def _retry(self, function: Callable[[], None], times: int = _RETRIES) -> None:
        """Call a function, again after each exception of a signal handler in it, and store the first of them.

        Python calls handlers at function entry, after calls and at loop back edges, and before it sets another one, so
        that a loop around `try` would itself be unprotected: each call here is protected by the one outside it.
        """
        if times:
            try:
                self._retry(function, times - 1)
                return
            except BaseException as error:
                if self._error is None:
                    self._error = error
        function()

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Call a signal's handler, or make it pending."""
        if self._ended:
            self._originals[number](number, frame)
            return
        self._pending[number] = frame
        if not self.open:
            return
        self.open = False  # for signals that arrive meanwhile
        try:
            if self.raised is not None and _is_caused_by(sys.exc_info()[1], self.raised):
                return
            if _discards_exceptions(frame):
                while self._pending:
                    _start_thread(_resend, (self._pending.popitem()[0],))
                return
            self.deliver()
        finally:
            frame = None
            self.open = True

    def deliver(self) -> None:
        """Call the pending handlers until one raises; the exception propagates, the others stay pending."""
        if not self._pending:
            return
        was_open, self.open = self.open, False
        try:
            self._call_pending()
        except BaseException as error:
            self.raised = error
            raise
        finally:
            self.open = was_open

    def _call_pending(self) -> None:
        while self._pending:
            number = next(iter(self._pending))
            self._originals[number](number, self._pending.pop(number))


_handlers: _Handlers | None = None


def _is_caused_by(error: BaseException | None, origin: BaseException) -> bool:
    pending, visited = [error], set()
    while pending:
        error = pending.pop()
        if error is origin:
            return True
        if error is not None and id(error) not in visited:
            visited.add(id(error))
            pending += [error.__cause__, error.__context__]
    return False


def _discards_exceptions(frame: FrameType | None) -> bool:
    """Return whether Python discards exceptions in a frame: in a finalizer or a weak reference callback."""
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__del__" or code in _callbacks:
            return True
        if code.co_filename in _WEAKREF_FILES and code.co_name in ("remove", "_remove"):
            return True
        frame = frame.f_back
    return False


def weak_callback(function: Function) -> Function:
    """Mark a weak reference callback: a signal that arrives in it is sent again later."""
    assert isinstance(function, FunctionType)
    _callbacks.add(function.__code__)
    return function


def _resend(number: int) -> None:
    time.sleep(_RESEND_SECONDS)
    _thread.interrupt_main(signal.Signals(number))


def _restore_in_child() -> None:
    """In a forked child, restore handlers wrapped by a thread that does not exist there."""
    global _handlers
    for number in range(1, signal.NSIG):
        handler = _handler_of(number)
        handlers = getattr(handler, "__self__", None)
        if isinstance(handlers, _Handlers) and handlers.thread != get_ident():
            _set_handler(number, handlers._originals[number])
    if _handlers is not None and _handlers.thread != get_ident():
        _handlers = None


at_fork(_restore_in_child)
