"""Sequences and mappings of records that are constructed on access."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, Mapping, Sequence, ValuesView
from typing import Any, Generic, TypeVar

T = TypeVar("T")
Key = TypeVar("Key")


class LazyRecords(Sequence[T], Generic[T]):
    """A sequence of records stored as tuples of their first fields, made records when all or several are first read."""

    __slots__ = ("_state",)

    def __init__(self, make: Callable[..., T], rows: Sequence[tuple[Any, ...]]) -> None:
        # One attribute, since another thread may read at the same time; without `make` these are records.
        self._state: tuple[Callable[..., T] | None, Sequence[Any]] = make, rows

    def __len__(self) -> int:
        return len(self._state[1])

    def _read(self) -> Sequence[T]:
        make, rows = self._state
        if make is not None:
            rows = tuple([make(*row) for row in rows])
            self._state = None, rows
        return rows

    def __iter__(self) -> Iterator[T]:
        return iter(self._read())

    def __getitem__(self, index: Any) -> Any:
        make, rows = self._state
        if isinstance(index, slice):
            return self._read()[index]
        return rows[index] if make is None else make(*rows[index])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (LazyRecords, tuple, list)):
            return NotImplemented
        return len(self) == len(other) and all(left == right for left, right in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"LazyRecords({len(self)} records)"


class LazyMapping(Mapping[Key, T], Generic[Key, T]):
    """A mapping whose contents `make` creates on first access; pickled as a dict."""

    __slots__ = ("_contents", "_make")

    def __init__(self, make: Callable[[], dict[Key, T]]) -> None:
        self._make: Callable[[], dict[Key, T]] | None = make
        self._contents: dict[Key, T] = {}

    def _read(self) -> dict[Key, T]:
        make = self._make
        if make is not None:
            self._contents = make()
            self._make = None  # last: another thread may read at the same time
        return self._contents

    def __getitem__(self, key: Key) -> T:
        return self._read()[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())

    def items(self) -> ItemsView[Key, T]:
        return self._read().items()

    def values(self) -> ValuesView[T]:
        return self._read().values()

    def __repr__(self) -> str:
        return repr(self._read())

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (self._read(),)
