"""A sequence of records that are constructed on access."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class LazyRecords(Sequence[T], Generic[T]):
    """A sequence of records stored as plain tuples of their first fields; the remaining fields are defaults.

    >>> from fvflops.trace import Event
    >>> events = LazyRecords(Event, [("op", 3), ("free", 0)])
    >>> events[0].item, len(events), events == LazyRecords(Event, [("op", 3, 0), ("free", 0)])
    (3, 2, True)
    """

    __slots__ = ("_make", "_rows")

    def __init__(self, make: Callable[..., T], rows: Sequence[tuple[Any, ...]]) -> None:
        self._make = make
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[T]:
        make = self._make
        return (make(*row) for row in self._rows)

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...

    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        if isinstance(index, slice):
            return LazyRecords(self._make, self._rows[index])
        return self._make(*self._rows[index])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (LazyRecords, tuple, list)):
            return NotImplemented
        return len(self) == len(other) and all(left == right for left, right in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"LazyRecords({getattr(self._make, '__name__', self._make)} × {len(self)})"
