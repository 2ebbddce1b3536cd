"""Annotate torch.profiler's chrome trace with modules, FLOPs and FLOP/s in its events' args."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from fvflops.features.kernels.matching import KernelMatch
from fvflops.reports.files.frames import dump
from fvflops.trace.kernel_events import KernelEvent

# torch.profiler writes an event over several lines: first its category and name, then its args in one line.
_CATEGORY = re.compile(r'"cat": "([^"]*)"')
_NAME = re.compile(r'^\s*"name": "(.*)",$')
_EXTERNAL_ID = re.compile(r'^(\s*)"External id": (\d+)')
_EVENTS = re.compile(r'^(\s*)"traceEvents": \[')

# Events of these categories have an External id of their own; a kernel has that of the op that launched it.
_HAS_EXTERNAL_ID = ("cpu_op", "user_annotation")
_MAX_NESTING = 8  # of events with one name

# (category, name, External id) → args
ArgsOf = Callable[[str, str, int], Mapping[str, Any]]


def annotate(lines: Iterable[str], args_of: ArgsOf, metadata: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of torch.profiler's chrome trace with more args in its events; each line is read once.

    `args_of` returns the args to add for an event's category, name and External id. `metadata` is written at the top
    level of the file under "fvflops".

    >>> lines = ['    "cat": "cpu_op",\\n', '    "args": {\\n', '      "External id": 7, "Ev Idx": 1\\n', '    }\\n']
    >>> print("".join(annotate(lines, lambda category, name, number: {"FLOPs": 6}, {})))
        "cat": "cpu_op",
        "args": {
          "FLOPs":6,"External id": 7, "Ev Idx": 1
        }
    <BLANKLINE>
    """
    category = name = ""
    for line in lines:
        if (match := _CATEGORY.search(line)) is not None:
            category = match.group(1)
        if (match := _NAME.match(line)) is not None:
            name = match.group(1)
        if (match := _EXTERNAL_ID.match(line)) is not None:
            args = args_of(category, name, int(match.group(2)))
            if args:
                indent = match.group(1)
                line = f"{indent}{dump(dict(args))[1:-1]},{line[len(indent) :]}"
        elif metadata and _EVENTS.match(line):
            yield f'    "fvflops": {dump(dict(metadata))},\n'
        yield line


class EventArgs:
    """The args that are added to each event of the chrome trace."""

    def __init__(self, match: KernelMatch) -> None:
        self._match = match
        events = match.run.events
        self._event_indexes = {
            event.event_id: event_index for event_index, event in enumerate(events) if event.kind != "device"
        }

    def of(self, category: str, name: str, external_id: int) -> dict[str, Any]:
        """Return the args of an event, by its category, name and External id."""
        event_index = self._event_indexes.get(external_id)
        if event_index is None:
            event_index = self._find_merged(name, external_id)
        if event_index is None:
            return {}
        match = self._match
        event = match.run.events[event_index]
        args: dict[str, Any] = {"module": match.modules[event_index], "phase": match.phases[event_index]}
        if category not in _HAS_EXTERNAL_ID:
            return {**args, "launched by": event.name}
        flops = match.flops[event_index]
        if flops is not None:
            args["FLOPs"] = flops
            time = event.device_ns or event.duration_ns
            if time:
                args["FLOP/s"] = round(flops * 1_000_000_000 / time)
        return args | _list_memory(event)

    def _find_merged(self, name: str, external_id: int) -> int | None:
        """Return the event of the same name into which torch.profiler merged its only nested event."""
        for outer_id in range(external_id - 1, external_id - _MAX_NESTING, -1):
            event_index = self._event_indexes.get(outer_id)
            if event_index is not None:
                return event_index if self._match.run.events[event_index].name == name else None
        return None


def _list_memory(event: KernelEvent) -> dict[str, int]:
    if event.before is None or event.after is None or event.peak is None:
        return {}
    return {"memory before": event.before, "memory after": event.after, "memory peak": event.peak}
