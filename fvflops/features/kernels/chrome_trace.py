"""Annotate torch.profiler's chrome trace with modules, FLOPs and FLOP/s in its events' args."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from fvflops.reports.files.frames import dump

# torch.profiler writes an event over several lines: first its category and name, then its args in one line.
_CATEGORY = re.compile(r'"cat": "([^"]*)"')
_NAME = re.compile(r'^\s*"name": "(.*)",$')
_NUMBER = re.compile(r'^(\s*)"External id": (\d+)')
_EVENTS = re.compile(r'^(\s*)"traceEvents": \[')

ArgsOf = Callable[[str, str, int], Mapping[str, Any]]


def annotate(lines: Iterable[str], args_of: ArgsOf, about: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of torch.profiler's chrome trace with more args in its events; each line is read once.

    `args_of` gives the args to add for an event's category, name and External id. `about` is written at the head of the
    file under "fvflops".

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
        found = _CATEGORY.search(line)
        if found is not None:
            category = found.group(1)
        found = _NAME.match(line)
        if found is not None:
            name = found.group(1)
        number = _NUMBER.match(line)
        if number is not None:
            args = args_of(category, name, int(number.group(2)))
            if args:
                blank = number.group(1)
                line = f"{blank}{dump(dict(args))[1:-1]},{line[len(blank) :]}"
        elif about and _EVENTS.match(line):
            yield f'    "fvflops": {dump(dict(about))},\n'
        yield line
