"""Results as text: any value of plain data, field by field and key by key, so that a diff shows what changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_DEEPEST = 8
_INLINE = 110  # characters


def show(value: Any) -> str:
    """Return a result as text: dataclasses by field, mappings by key, sequences by item; nothing is left out.

    >>> print(show({"a": (1, 2)}))
    a: (1, 2)
    """
    return "\n".join(_lines(value, 0))


def shown(make: Callable[..., Any], *args: Any, **options: Any) -> str:
    return show(make(*args, **options))


def _lines(value: Any, depth: int) -> Iterator[str]:
    short = _short(value)
    if short is not None or depth > _DEEPEST:
        yield repr(value) if short is None else short
        return
    for name, item in _parts(value):
        inner = list(_lines(item, depth + 1))
        if len(inner) == 1 and len(inner[0]) <= _INLINE:
            yield f"{name}: {inner[0]}"
        else:
            yield f"{name}:"
            yield from (f"  {line}" for line in inner)


def _short(value: Any) -> str | None:
    """Return a value that needs no lines of its own, None for others."""
    if isinstance(value, str):
        return repr(value) if "\n" not in value else None
    if _is_record(value) or isinstance(value, Mapping):
        return None if value or _is_record(value) else "{}"
    if isinstance(value, (list, tuple, set, frozenset)):
        items = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
        if any(_short(item) is None for item in items):
            return None
        text = "(" + ", ".join(str(_short(item)) for item in items) + ")"
        return text if len(text) <= _INLINE else None
    return repr(value)


def _is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


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
        items = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
        yield from ((f"[{number}]", item) for number, item in enumerate(items))
