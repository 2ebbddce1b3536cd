"""Values of the expressions in command_lines.yaml, written so that a diff shows what changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

import fvflops
from fvflops import zoo
from goldens.jobs import attempt, expand, read_cases

_MAX_DEPTH = 8
_MAX_LINE = 110  # characters


def evaluate(kind: str, **names: Any) -> str:
    """Return the values of the expressions of a kind under their texts, or the errors that they raise."""
    known = {"fvflops": fvflops, "zoo": zoo, "torch": torch, "nn": nn, "partial": partial, **names}
    texts = read_cases()["expressions"][kind].splitlines()
    return sections((text, partial(eval, text, known)) for line in texts for text in expand(line))


def sections(texts: Iterable[tuple[str, Callable[[], Any]]]) -> str:
    """Return each title with its value, or with the error that computing it raises."""
    return "\n".join(f"=== {title}\n{attempt(partial(_show_made, make))}\n" for title, make in texts)


def _show_made(make: Callable[[], Any]) -> str:
    return show(make())


def quieten(analysis: Any) -> Any:
    return analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False)


def break_lines(text: str) -> str:
    """Break one-line JSON into many lines; without the line ends it is the same, byte for byte."""
    if "\n" in text:
        return text
    for found in ("],", "},", ":{", ":["):
        text = text.replace(found, found + "\n")
    return text


def show(value: Any) -> str:
    """Return a text as it is, dataclasses by field, mappings by key, sequences by item; nothing is left out.

    >>> print(show({"a": (1, 2)}))
    a: (1, 2)
    """
    return value if isinstance(value, str) else "\n".join(_lines(value, 0))


def _lines(value: Any, depth: int) -> Iterator[str]:
    short = _short(value)
    if short is not None or depth > _MAX_DEPTH:
        yield repr(value) if short is None else short
        return
    for name, item in _parts(value):
        inner = list(_lines(item, depth + 1))
        if len(inner) == 1 and len(inner[0]) <= _MAX_LINE:
            yield f"{name}: {inner[0]}"
        else:
            yield f"{name}:"
            yield from (f"  {line}" for line in inner)


def _short(value: Any) -> str | None:
    """Return the text of a value that fits on one line, None for others."""
    if isinstance(value, str):
        return repr(value) if "\n" not in value else None
    if _is_record(value) or isinstance(value, Mapping):
        return None if value or _is_record(value) else "{}"
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [_short(item) for item in _ordered(value)]
        text = "(" + ", ".join(map(str, items)) + ")"
        return text if None not in items and len(text) <= _MAX_LINE else None
    return repr(value)


def _is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _ordered(value: Any) -> Any:
    return sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, str):
        yield from ((f"{number}", line) for number, line in enumerate(value.splitlines()))
    elif _is_record(value):
        names = [field.name for field in dataclasses.fields(value) if field.repr and not field.name.startswith("_")]
        yield from ((f"{type(value).__name__}.{name}", getattr(value, name)) for name in names)
    elif isinstance(value, Mapping):
        yield from ((str(key) or "(model)", item) for key, item in value.items())
    elif hasattr(value, "_fields"):
        yield from ((name, getattr(value, name)) for name in value._fields)
    else:
        yield from ((f"[{number}]", item) for number, item in enumerate(_ordered(value)))
