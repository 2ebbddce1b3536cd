"""Chrome traces of torch.profiler: read event by event, read and write whole, and add work to their events' args."""

from __future__ import annotations

import codecs
import gzip
import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import IO, Any, cast

from fvflops import paths
from fvflops.measure.kernels.kernel_sums import divide_work
from fvflops.measure.kernels.matching import KernelMatch
from fvflops.measure.kernels.recorded_calls import Work
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
    the list of events alone. One that is not a trace, is truncated, or has more characters or items (objects and lists)
    than it may, raises TraceError.
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
            raise self._error("it is truncated")
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
                raise self._error(f"it is truncated, or not JSON: {reason}")

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


ChromeTrace = dict[str, Any]

# Categories of the file's events.
DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
_HAS_EXTERNAL_ID = ("cpu_op", "user_annotation")
_MAX_CHARACTERS = 1 << 30  # Python needs some ten times as much
_MAX_ITEMS = 1 << 24  # objects and lists: an event has two or three
_MAX_NESTING = 8  # of events with one name
_encode = json.JSONEncoder(separators=(",", ":")).encode


def read_document(path: str) -> ChromeTrace:
    """Return a chrome trace, from .json or .json.gz; any other file, and a larger one, raises TraceError."""
    stream = TraceStream(path, max_characters=_MAX_CHARACTERS, max_items=_MAX_ITEMS)
    events = list(stream)
    return {**stream.header, "traceEvents": events}


def write_document(document: ChromeTrace, path: str) -> None:
    """Write a chrome trace, compressed if the path ends with .gz."""
    if path.endswith(".gz"):
        paths.write_bytes(path, gzip.compress("".join(_lines(document)).encode(), compresslevel=6))
    else:
        paths.write_text(path, _lines(document))


def _lines(document: ChromeTrace) -> Iterator[str]:
    yield "{\n"
    yield from (f"{_encode(key)}: {_encode(value)},\n" for key, value in document.items() if key != "traceEvents")
    yield '"traceEvents": [\n'
    separator = ""
    for event in document["traceEvents"]:
        yield separator + _encode(event)
        separator = ",\n"
    yield "\n]}\n"


def annotate(
    document: ChromeTrace, match: KernelMatch, positions: Mapping[int, int], metadata: Mapping[str, Any]
) -> ChromeTrace:
    """Return a chrome trace with more args in its events, and with `metadata` at the top level under "fvflops".

    `positions` maps the positions of events in the file to their indexes in the run.
    Events get "module" and "phase", and where known "MACs", "FLOPs" (2 per multiply-add and all other operations),
    "FLOP/s" by their device time, else by their CPU time, and "bytes" (memory traffic without cache reuse or fusion).
    The work of an op is divided over its kernels by their time, so that all kernels add up to it.
    """
    kernels, has_modules = divide_work(match), match.trace is not None or any(match.modules)
    events = list(document["traceEvents"])
    for position, event_index in positions.items():
        event, added = events[position], _args_of(match, event_index, kernels, has_modules)
        events[position] = {**event, "args": {**(event.get("args") or {}), **added}}
    return {**document, "fvflops": dict(metadata), "traceEvents": events}


def find_by_id(document: ChromeTrace, match: KernelMatch) -> dict[int, int]:
    """Return position → index of the events of torch.profiler's own export of a run, by their ids."""
    events = match.run.events
    on_cpu = {event.event_id: index for index, event in enumerate(events) if event.kind != "device"}
    on_device = {event.event_id: index for index, event in enumerate(events) if event.kind == "device"}

    def find(event: Mapping[str, Any]) -> int | None:
        args = event.get("args", {})
        category = event.get("cat")
        if category in DEVICE_CATEGORIES:
            return on_device.get(args.get("correlation"))
        external_id = args.get("External id")
        if category not in _HAS_EXTERNAL_ID or external_id is None:
            return None
        # torch.profiler merges an event with its only nested event of the same name.
        for outer_id in range(external_id, external_id - _MAX_NESTING, -1):
            event_index = on_cpu.get(outer_id)
            if event_index is not None:
                return event_index if outer_id == external_id or events[event_index].name == event["name"] else None
        return None

    found = {position: find(event) for position, event in enumerate(document["traceEvents"])}
    return {position: event_index for position, event_index in found.items() if event_index is not None}


def _args_of(match: KernelMatch, event_index: int, kernels: Mapping[int, Work], has_modules: bool) -> dict[str, Any]:
    event = match.run.events[event_index]
    args: dict[str, Any] = {"module": match.modules[event_index]} if has_modules else {}
    args["phase"] = match.phases[event_index]
    work, time = match.work[event_index], event.device_ns or event.duration_ns
    if event.kind == "device":
        work, time = kernels.get(event_index), event.duration_ns
        if event.parent >= 0:
            args["launched by"] = match.run.events[event.parent].name
    if work is not None:
        args |= {"MACs": work.macs, "FLOPs": work.flops}
        if time:
            args["FLOP/s"] = round(work.flops * 1_000_000_000 / time)
    if event_index in match.nbytes:
        args["bytes"] = match.nbytes[event_index]
    if event.before is not None and event.after is not None and event.peak is not None:
        args |= {"memory before": event.before, "memory after": event.after, "memory peak": event.peak}
    return args
