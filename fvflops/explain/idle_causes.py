"""Why a GPU was idle: the host's activity before it launched the next kernel."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from fvflops.explain.trace_columns import OP, PYTHON, RUNTIME, TraceColumns

_SYNCHRONISES = re.compile(r"(Stream|Device|Event|Ctx)Synchronize|^(cuda|hip|cu)Memcpy(?!.*Async)")
_SLOW_CALLS = re.compile(
    r"Malloc|Free|HostAlloc|HostRegister|Module(Load|Unload)|Library(Load|Unload)|GraphInstantiate"
)
# Cause → spans in which the host does other work than a step's, with ops or without; the first that matches.
_OTHER_WORK = {
    "data": re.compile(r"DataLoader\w*[).]|torch/utils/data/|_next_data"),
    "compilation": re.compile(
        r"\(dynamo_timed\)|^entire_frame_compile$|^dynamo$|torch/_dynamo/convert_frame|triton/compiler/|: _do_compile$"
    ),
    "garbage": re.compile(r"gc\.collect|function collect>|gc_collect"),
    "saving": re.compile(
        r"torch/serialization|torch/distributed/checkpoint/.*save|torch\.save|: \w*(save_(\w+_)?checkpoint|_save)$"
    ),
}
_SLOW_NS = 100_000  # a launch takes some 5 µs
# Python frames that are not the program's own.
_OF_LIBRARIES = re.compile(r"^(torch/|<built-in|<string>|nn\.Module: |threading\.py|contextlib\.py)|site-packages")


class IdlePiece(NamedTuple):
    """A part of a gap: its cause, a key of CAUSES, and the op, frame or call at which the host was."""

    cause: str
    name: str
    ns: int


class IdleCauses:
    """Causes of the idle times of a trace."""

    def __init__(self, columns: TraceColumns) -> None:
        self._columns = columns
        self._known: dict[int, tuple[str, str]] = {-1: ("host", "outside of recorded events")}
        self._other = {
            number: cause
            for number, name in enumerate(columns.names.values)
            for cause, pattern in reversed(_OTHER_WORK.items())
            if pattern.search(str(name))
        }

    def of_gap(self, start: int, end: int, launch: int) -> Iterator[IdlePiece]:
        """Yield the parts of a gap before the kernel that the runtime call `launch` launched, -1 if none is known."""
        host = self._columns.host
        if launch < 0:
            yield IdlePiece("unknown", "", end - start)
            return
        launched = host.start[launch]
        if launched > start:
            yield from self.on_host(start, min(launched, end), host.thread[launch])
        name, returned = self._columns.names[host.name[launch]], min(host.end[launch], end)
        if start < launched < returned:  # the first launch of a kernel loads it
            yield IdlePiece("runtime" if returned - launched > _SLOW_NS else "launch", name, returned - launched)
            launched = returned
        if launched < end:
            yield IdlePiece("start" if launched > start else "queue", name, end - max(launched, start))

    def on_host(self, start: int, end: int, thread: int) -> Iterator[IdlePiece]:
        """Yield the activities of a thread of the host in an interval.

        If the host was waiting for the GPU when that ran out of work, all that it does until the next launch is due to
        this synchronisation, except for work that is not the step's.
        """
        waited = ""
        for position, (begin, stop, span) in enumerate(self._columns.host.pieces(thread, start, end)):
            cause, name = self._of_span(span)
            if position == 0 and cause == "synchronisation":
                waited = name
            if waited and cause not in _OTHER_WORK:
                cause, name = "synchronisation", waited
            yield IdlePiece(cause, name, stop - begin)

    def is_other_work(self, span: int) -> bool:
        """Return whether a span is in work that is not the step's, such as data loading or compilation."""
        return bool(self._other) and self._of_span(span)[0] in _OTHER_WORK

    def _of_span(self, span: int) -> tuple[str, str]:
        if span not in self._known:
            self._known[span] = self._find(span)
        return self._known[span]

    def _find(self, span: int) -> tuple[str, str]:
        host, names = self._columns.host, self._columns.names
        around = list(host.ancestors(span))
        chain = [(host.kind[index], str(names[host.name[index]])) for index in around]
        kind, name = chain[0]
        for index in around:
            if cause := self._other.get(host.name[index]):
                return cause, str(names[host.name[index]])
        frames = [frame for kind_around, frame in chain if kind_around == PYTHON]
        frame = next((frame for frame in frames if not _OF_LIBRARIES.search(frame)), frames[0] if frames else "")
        ops = [op for kind_around, op in chain if kind_around == OP]
        if kind == RUNTIME and _SYNCHRONISES.search(name):
            return "synchronisation", " in ".join([name, *ops[-1:]]) + (f" at {frame}" if frame else "")
        if kind == RUNTIME and _SLOW_CALLS.search(name):
            return "runtime", name
        if ops:
            return "launch", ops[0]
        return "host", frame or name
