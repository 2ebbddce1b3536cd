"""What loading a hostile file must not do: run a program, open a connection, or write a file."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

# Audit events that are one of these whatever their arguments.
_FORBIDDEN = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "pty.spawn")
_CONNECTIONS = ("socket.connect", "socket.bind", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname")
_seen = None  # None: not watching


class ForbiddenAction(BaseException):
    """A forbidden action was attempted; no `except Exception` of a library swallows it."""


@contextmanager
def forbidding_actions(folder: Path) -> Iterator[list[str]]:
    """Deny forbidden actions of Python code, and record them; files that native code writes into `folder` too."""
    global _seen
    _install()
    before = _list_files(folder)
    _seen = seen = []
    try:
        yield seen
    finally:
        _seen = None
        seen += [f"file {name}" for name in sorted(_list_files(folder) ^ before)]


def _list_files(folder: Path) -> set[tuple[str, int]]:
    return {(str(path), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


@cache
def _install():
    sys.addaudithook(_hook)  # it cannot be removed


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _seen is None:
        return
    is_written = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
    if event in _FORBIDDEN or event in _CONNECTIONS or (is_written and not _is_scratch(arguments[0])):
        _seen.append(f"{event} {arguments!r:.200}")
        raise ForbiddenAction(_seen[-1])


def _is_scratch(path: Any) -> bool:
    """Return whether a file is one of the system's, or of Python's own caches."""
    name = os.fsdecode(path) if isinstance(path, (str, bytes)) else ""
    return name.startswith(("/dev/", "/proc/")) or "__pycache__" in name or not name
