"""Rows of a sweep that has not written its output yet: JSON lines in a locked file beside it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from fvflops import paths
from fvflops.sweep.model_count import ModelCount
from fvflops.sweep.result_files import ResultError, encode_row, parse_rows


class Journal:
    """Rows of a sweep beside the file that its output is or, as a symbolic link, leads to.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     journal = Journal(f"{folder}/results.parquet")
    ...     with journal.open() as append:
    ...         append(ModelCount("zoo:lenet5", flops=416520))
    ...     [row.flops for row in journal.read().values()]
    [416520]
    """

    def __init__(self, output: str) -> None:
        self.path = f"{os.path.realpath(output)}.journal"

    def read(self) -> dict[str, ModelCount]:
        """Return model → its last row; an incomplete last line, of a sweep that was killed, is ignored."""
        try:
            data = self._read_lines()
        except FileNotFoundError:
            return {}
        return {row.model: row for row in parse_rows(self.path, data)}

    @contextmanager
    def open(self) -> Iterator[Callable[[ModelCount], None]]:
        """Yield a function that appends a row: once it returns, the row outlives this process.

        While another sweep has the journal open, raise ResultError.
        """
        with _open_locked(self.path) as file:
            os.truncate(file.fileno(), len(self._read_lines()))

            def append(row: ModelCount) -> None:
                file.write(encode_row(row))
                file.flush()

            yield append

    def remove(self) -> None:
        """Remove the journal, whose rows are in the output."""
        with suppress(FileNotFoundError):
            os.remove(self.path)

    def _read_lines(self) -> bytes:
        data = paths.read_bytes(self.path)
        return data[: data.rfind(b"\n") + 1]


def _open_locked(path: str) -> TextIO:
    """Return a file that is locked until it is closed; a holder of the lock may remove the file before it closes it."""
    while True:
        file = paths.open_text(path, "a")
        try:
            _lock(file, path)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                    return file
        except BaseException:
            file.close()
            raise
        file.close()


def _lock(file: TextIO, path: str) -> None:
    """Lock a file where the system has such locks; they end with the process."""
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ResultError(f"{path} is open in another sweep: wait until it ends, or choose another --output") from None
    except OSError as error:
        raise ResultError(f"{path} cannot be locked ({error.strerror}): choose an --output on another disk") from None
