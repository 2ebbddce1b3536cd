"""A mapping by object identity, which does not call `__eq__` and `__hash__`, since classes may override them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, ValuesView
from typing import Any, TypeVar

Key = TypeVar("Key")
Item = TypeVar("Item")


class IdentityMapping(Mapping[Key, Item]):
    """A mapping keyed by identity, in insertion order; the first of several pairs with one key wins.

    >>> first, second = [], []
    >>> mapping = IdentityMapping([(first, 1), (second, 2), (first, 3)])
    >>> list(mapping.values()), list(mapping.items())
    ([1, 2], [([], 1), ([], 2)])
    """

    def __init__(self, pairs: Iterable[tuple[Key, Item]]) -> None:
        # Includes the key, to keep it alive: ids are reused.
        self._pairs: dict[int, tuple[Key, Item]] = {}
        for pair in pairs:
            self._pairs.setdefault(id(pair[0]), pair)

    def __getitem__(self, key: Key) -> Item:
        return self._pairs[id(key)][1]

    def __iter__(self) -> Iterator[Key]:
        return iter([key for key, _ in self._pairs.values()])

    def __len__(self) -> int:
        return len(self._pairs)

    def __contains__(self, key: object) -> bool:
        return id(key) in self._pairs

    def get(self, key: Any, default: Any = None) -> Any:
        pair = self._pairs.get(id(key))
        return default if pair is None else pair[1]

    def items(self) -> ValuesView[tuple[Key, Item]]:  # type: ignore[override]
        return self._pairs.values()
