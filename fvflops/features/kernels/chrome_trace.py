"""Annotate torch.profiler's chrome trace with modules, FLOPs and FLOP/s in its events' args."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from fvflops.reports.files.frames import dump

# torch.profiler writes an event over several lines: first its category and name, then its args in one line.
_CATEGORY = re.compile(r'"cat": "([^"]*)"')
_NAME = re.compile(r'^\s*"name": "(.*)",$')
_EXTERNAL_ID = re.compile(r'^(\s*)"External id": (\d+)')
_EVENTS = re.compile(r'^(\s*)"traceEvents": \[')

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
