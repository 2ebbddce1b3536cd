"""Hold signals back while a run is set up and taken down, and let them through while the model runs.

Python calls a signal's handler between any two bytecodes of the main thread, and what the handler raises (Ctrl-C's
KeyboardInterrupt, a time limit of SIGALRM) leaves whatever goes on there half done: an `__enter__` whose `__exit__`
nobody will call, a `finally` that ends at its first line. Blocking signals with pthread_sigmask is not enough: the
kernel then gives them to another thread, torch has many, and Python calls the handler in the main thread all the same.
So while a run lasts, a handler of ours stands before each handler in Python, and calls it now or later.

What cannot be held back: an exception that another thread injects with PyThreadState_SetAsyncExc, and handlers that are
not Python's, which end the process or touch nothing of Python.
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
from types import CodeType, FrameType, FunctionType, TracebackType
from typing import Any, TypeVar

from fvflops.capture.restore.forks import at_fork

# Those of `signal` make an enum of each value, which takes ten times as long.
_handler_of, _set_handler = _signal.getsignal, _signal.signal
# So many handlers may raise, one right after the other, while those of several signals are replaced.
_INTERRUPTED = 8
# What is raised in a finalizer or in a weak reference's callback is printed and lost: a signal that comes there comes
# again after so many seconds.
_AGAIN = 0.001
_WEAK = frozenset({weakref.__file__, sys.modules["_weakrefset"].__file__})
_callbacks: set[CodeType] = set()

Function = TypeVar("Function")


class deferred:
    """A context in which no handler of a signal is called, but where `allowed` lets it; those that wait are at the end.

    It costs some 5 µs in the main thread, and nothing in others, where Python calls no handlers.
    """

    __slots__ = ("_before", "_handlers")

    def __init__(self) -> None:
        self._handlers: _Handlers | None = None
        self._before: tuple[bool, bool] | None = None

    def __enter__(self) -> deferred:
        global _handlers
        if get_ident() != threading.main_thread().ident:
            return self
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
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        global _handlers
        handlers = self._handlers
        if handlers is None:
            return
        handlers.open = False
        if self._before is None:
            _handlers = None
            handlers.uninstall()
            return
        # In this order: once it is open, a handler may raise.
        handlers.may_open = self._before[1]
        handlers.open = self._before[0]
        if handlers.open:
            handlers.deliver()

    def deliver(self) -> None:
        """Raise now what the handlers of the signals that wait raise, unless this is inside another such context."""
        handlers = self._handlers
        if handlers is not None and handlers.may_open:
            handlers.deliver()


class allowed:
    """A context inside of `deferred` in which handlers are called at once: that of the model's run.

    Whatever the run was doing when a handler raised, no other is called until the exception has left `deferred`, unless
    the model catches it.
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
        handlers.deliver()  # what came in between

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._handlers is not None:
            self._handlers.open = False


def is_interrupt(error: BaseException) -> bool:
    """Return whether a signal's handler raised an error, or what it comes of: nothing but its caller may catch it."""
    handlers = _handlers
    return handlers is not None and handlers.raised is not None and _comes_of(error, handlers.raised)


class _Handlers:
    """The handlers of ours that are installed as long as the outermost `deferred` lasts.

    `open` says whether a handler may be called, `may_open` whether `allowed` may set that, `raised` is what one raised.
    """

    def __init__(self) -> None:
        self.thread = get_ident()
        self.open = False
        self.may_open = True
        self.raised: BaseException | None = None
        self._waiting: dict[int, FrameType | None] = {}
        self._originals: dict[int, Any] = {}
        self._problem: BaseException | None = None
        self._ended = False

    def install(self) -> None:
        """Put one before each handler in Python.

        To set a handler is one call into C, which first calls the handlers of signals that have come. Where there is
        one in Python, nearly always Ctrl-C's, nothing has changed then. Of several the others may raise in between: all
        are set first, then that is raised.
        """
        numbers = [number for number in range(1, signal.NSIG) if callable(_handler_of(number))]
        self._originals = {number: _handler_of(number) for number in numbers}
        if len(numbers) == 1:
            _set_handler(numbers[0], self.handle)
            return
        self._insist(self._set_ours, _INTERRUPTED)
        if self._problem is not None:
            self.uninstall()

    def uninstall(self) -> None:
        """Put the handlers back, call those that wait, and raise what the first to raise raised."""
        early = self._call_all()
        try:
            self._insist(self._set_originals, _INTERRUPTED)
            late = self._call_all()
            for problem in (early, self._problem, late):
                if problem is not None:
                    raise problem
        finally:
            self._ended = True
            self.raised = self._problem = problem = early = late = None  # whose frames hold this

    def _set_ours(self) -> None:
        for number in self._originals:
            if _handler_of(number) != self.handle:
                _set_handler(number, self.handle)

    def _set_originals(self) -> None:
        for number, original in self._originals.items():
            if _handler_of(number) == self.handle:  # else the model put another there, to stay
                _set_handler(number, original)

    def _insist(self, act: Callable[[], None], times: int) -> None:
        """Call a function again each time that a signal's handler raises in it, and keep the first error.

        Python calls handlers where a function begins, a call ends or a loop goes back. A loop around `try` would leave
        its own turn uncovered; of calls nested in one another each is covered by the one around.
        """
        if not times:
            act()
            return
        try:
            self._insist(act, times - 1)
            return
        except BaseException as error:
            if self._problem is None:
                self._problem = error
        self._insist(act, times - 1)

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Call the handler of a signal, or note that it waits."""
        if self._ended:
            self._originals[number](number, frame)
            return
        self._waiting[number] = frame
        if not self.open:
            return
        self.open = False  # for what comes while this decides
        try:
            if self.raised is not None and _comes_of(sys.exc_info()[1], self.raised):
                return
            if _is_thrown_away(frame):
                while self._waiting:
                    _thread.start_new_thread(_send_again, (self._waiting.popitem()[0],))
                return
            self.deliver()
        finally:
            frame = None
            self.open = True

    def deliver(self) -> None:
        """Call the handlers that wait; what one of them raises is raised, and the rest wait on."""
        if not self._waiting:
            return
        was_open, self.open = self.open, False
        error = None
        try:
            error = self._call_waiting()
            if error is not None:
                self.raised = error
                raise error
        finally:
            error = None
            self.open = was_open

    def _call_all(self) -> BaseException | None:
        """Call all handlers that wait, and return what the first to raise raised."""
        first = None
        try:
            while self._waiting:
                error = self._call_waiting()
                first = error if first is None else first
            return first
        finally:
            first = error = None

    def _call_waiting(self) -> BaseException | None:
        """Call the handlers that wait, up to the first that raises, and return what it raised."""
        while self._waiting:
            number = next(iter(self._waiting))
            frame = self._waiting.pop(number)
            try:
                self._originals[number](number, frame)
            except BaseException as error:
                return error
            finally:
                frame = None
        return None


_handlers: _Handlers | None = None


def _comes_of(error: BaseException | None, origin: BaseException) -> bool:
    waiting, seen = [error], set()
    while waiting:
        error = waiting.pop()
        if error is origin:
            return True
        if error is not None and id(error) not in seen:
            seen.add(id(error))
            waiting += [error.__cause__, error.__context__]
    return False


def _is_thrown_away(frame: FrameType | None) -> bool:
    """Return whether what a frame raises goes nowhere: a finalizer's, or that of a weak reference's callback."""
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__del__" or code in _callbacks:
            return True
        if code.co_filename in _WEAK and code.co_name in ("remove", "_remove"):
            return True
        frame = frame.f_back
    return False


def weak_callback(function: Function) -> Function:
    """Let a signal that comes in a function, the callback of weak references, come again after it."""
    assert isinstance(function, FunctionType)
    _callbacks.add(function.__code__)
    return function


def _send_again(number: int) -> None:
    time.sleep(_AGAIN)
    _thread.interrupt_main(signal.Signals(number))


def _leave_handlers() -> None:
    """In a forked child, put back the handlers that a thread which is not there has put ours before."""
    global _handlers
    for number in range(1, signal.NSIG):
        handler = _handler_of(number)
        handlers = getattr(handler, "__self__", None)
        if isinstance(handlers, _Handlers) and handlers.thread != get_ident():
            _set_handler(number, handlers._originals[number])
    if _handlers is not None and _handlers.thread != get_ident():
        _handlers = None


at_fork(_leave_handlers)
