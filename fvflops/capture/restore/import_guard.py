"""Keep imports out of a recording: a module's body runs once per process, whatever the model computes."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from fvflops.capture.restore import interrupts
from fvflops.capture.restore.forks import at_fork
from fvflops.capture.restore.torch_state import modes_removed

Imported = Callable[[], object]


class _Finder(MetaPathFinder):
    """Find modules as Python does, and run their bodies without dispatch modes while it has users.

    Users are called after each import that is not inside another one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: dict[object, Imported] = {}
        self._thread = threading.local()

    @contextmanager
    def used(self, imported: Imported) -> Iterator[None]:
        """Add a user while the context lasts."""
        user = object()
        try:
            with interrupts.deferred(), self._lock:
                self._users[user] = imported
                if self not in sys.meta_path:
                    sys.meta_path.insert(0, self)
            yield
        finally:
            with interrupts.deferred(), self._lock:
                self._users.pop(user, None)
                if not self._users and self in sys.meta_path:
                    sys.meta_path.remove(self)

    def restore_in_child(self) -> None:
        """In a forked child, remove all users."""
        self._lock = threading.Lock()
        self._users.clear()
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the spec that the other finders find."""
        finders = [finder for finder in sys.meta_path if finder is not self]
        specs = (finder.find_spec(name, path, target) for finder in finders)
        spec = next((spec for spec in specs if spec is not None), None)
        loader: Any = None if spec is None else spec.loader
        if hasattr(loader, "exec_module") and not isinstance(loader, type):  # classes load built-in modules

            def execute(module: ModuleType) -> None:
                vars(loader).pop("exec_module", None)
                self._execute(loader.exec_module, module)

            loader.exec_module = execute
        return spec

    def _execute(self, execute: Callable[[ModuleType], None], module: ModuleType) -> None:
        if getattr(self._thread, "is_importing", False):
            execute(module)
            return
        self._thread.is_importing = True
        try:
            with modes_removed():
                execute(module)
        finally:
            self._thread.is_importing = False
            with interrupts.deferred():
                for imported in list(self._users.values()):
                    imported()
            # Frames in reference cycles, of exceptions that an import handles, keep the model's tensors alive.
            gc.collect(1)


_FINDER = _Finder()
at_fork(_FINDER.restore_in_child)


@contextmanager
def imports_unrecorded(imported: Imported) -> Iterator[None]:
    """Run the bodies of modules that are imported meanwhile as if nothing were recorded.

    They would otherwise be part of the first recording of a process only, and their constants have no values.
    `imported` is called after each import.
    """
    with _FINDER.used(imported):
        yield
