"""Read a chrome trace event by event, so that a file of gigabytes never is one object."""

from __future__ import annotations

import codecs
import gzip
import json
import math
import re
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from typing import IO, Any, cast

from fvflops import paths
from fvflops.text import truncate
from fvflops.trace import TraceError

_GZIP = b"\x1f\x8b"
_BLOCK = 1 << 22  # bytes that are decoded at once
_LONGEST = 1 << 26  # characters of one event, or of another value of the file
_skip_space = re.compile(r"[\s,]*").match
_is_cut = re.compile(r"[\d.eE+-]*\Z").match  # of a number, and its end
# A value is parsed in C, one at a time: as fast as libraries for streams. Names may contain control characters.
_scan = json.JSONDecoder(strict=False).scan_once  # type: ignore[attr-defined]


class TraceStream:
    """The events of a chrome trace, a .json or .json.gz file or URI, in the order of the file.

    `header` has the other values of the file, such as "deviceProperties", once all events are read. A file may also be
    the list of events alone. One that is no trace, is cut off, or has more characters or items, which are objects and
    lists, than it may, raises TraceError.
    """

    def __init__(self, path: str, *, max_characters: float = math.inf, max_items: float = math.inf) -> None:
        self.path = path
        self.header: dict[str, Any] = {}
        self._left = [max_characters, max_items]
        most = f"at most {max_characters:,} characters and {max_items:,} objects"
        self._excess = f"{path}: a chrome trace has {most}, and this has more: profile fewer steps"
        self._text = ""
        self._position = 0
        self._blocks: Iterator[str] = iter(())

    def __iter__(self) -> Iterator[dict[str, Any]]:
        with ExitStack() as stack:
            self._blocks = self._decode(stack.enter_context(paths.open_bytes(self.path)))
            first = self._peek()
            found = first == "["
            if found:
                yield from self._events()
            elif first == "{":
                self._position += 1
                while self._peek() != "}":
                    key = self._value()
                    if self._peek() != ":":
                        raise self._error(f"it has no value for {truncate(repr(key))}")
                    self._position += 1
                    if key == "traceEvents" and self._peek() == "[":
                        found = True
                        yield from self._events()
                    else:
                        self.header[str(key)] = self._value()
            if not found:
                raise self._error('it has no "traceEvents"')

    def _events(self) -> Iterator[dict[str, Any]]:
        self._position += 1
        while True:
            # Most events are in the text that is there; the slow path reads more.
            try:
                start = _skip_space(self._text, self._position).end()  # type: ignore[union-attr]
                event, self._position = _scan(self._text, start)
            except (StopIteration, ValueError, RecursionError):
                if self._peek() == "]":
                    self._position += 1
                    return
                event = self._value()
            if not isinstance(event, dict):
                raise self._error('an item of "traceEvents" is not an object')
            yield event

    def _peek(self) -> str:
        """Return the next character that is not space, "" at the end of the file."""
        while True:
            self._position = _skip_space(self._text, self._position).end()  # type: ignore[union-attr]
            if self._position < len(self._text):
                return self._text[self._position]
            if not self._read_more():
                return ""

    def _value(self) -> Any:
        if not self._peek():
            raise self._error("it is cut off")
        while True:
            try:
                value, end = _scan(self._text, self._position)
                if isinstance(value, (int, float)) and _is_cut(self._text, end) and self._read_more():
                    continue  # the number may go on in this block
                self._position = min(end, len(self._text))
                return value
            except StopIteration:
                reason = "a value is missing"
            except ValueError as error:
                reason = str(error)
            except RecursionError:
                raise self._error("it is nested too deeply") from None
            if len(self._text) - self._position > _LONGEST:
                raise self._error(reason)
            if not self._read_more():
                raise self._error(f"it is cut off, or no JSON: {reason}")

    def _read_more(self) -> bool:
        block = next(self._blocks, "")
        self._text = self._text[self._position :] + block
        self._position = 0
        self._left[0] -= len(block)
        self._left[1] -= max(block.count("{") + block.count("["), block.count(",") // 8)
        if min(self._left) < 0:
            raise TraceError(self._excess)
        return bool(block)

    def _decode(self, file: IO[bytes]) -> Iterator[str]:
        # Names of kernels may contain bytes that are not UTF-8.
        decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        magic = file.read(2)
        file.seek(0)
        source = cast(IO[bytes], gzip.GzipFile(fileobj=file)) if magic == _GZIP else file
        try:
            while block := source.read(_BLOCK):
                if text := decoder.decode(block):
                    yield text
            if text := decoder.decode(b"", final=True):
                yield text
        except (OSError, EOFError, zlib.error) as error:
            if source is file:
                raise
            raise TraceError(f"{self.path} cannot be decompressed: {error}") from None

    def _error(self, reason: str) -> TraceError:
        return TraceError(f"{self.path} is not a chrome trace: {reason}")
