"""A mapping of objects by identity: `__eq__` and `__hash__`, which a class may redefine, are not called."""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Iterator, Mapping
from typing import Any, TypeVar

Key = TypeVar("Key")
Item = TypeVar("Item")


class ByIdentity(Mapping[Key, Item]):
    """A mapping whose keys are compared by identity, in the order given; of pairs with one key the first stays.

    >>> first, second = [], []
    >>> list(ByIdentity([(first, 1), (second, 2), (first, 3)]).values())
    [1, 2]
    """

    def __init__(self, pairs: Iterable[tuple[Key, Item]]) -> None:
        # With the key, so that nothing else gets its id.
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
        """Return what is kept under a key, or a default."""
        pair = self._pairs.get(id(key))
        return default if pair is None else pair[1]

    def items(self) -> ItemsView[Key, Item]:
        """Return the pairs, quicker than the mixin does."""
        return self._pairs.values()  # type: ignore[return-value]
