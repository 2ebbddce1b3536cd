"""Cache of what is computed from a signature, by the identity of the Signature object."""

from __future__ import annotations

from typing import Generic, TypeVar

from fvflops.trace import Signature

Result = TypeVar("Result")

_MAX_SIZE = 1 << 14


class SignatureCache(Generic[Result]):
    """Results by signature. Shape execution reuses Signature objects, and hashing one takes longer than most results.

    >>> cache = SignatureCache[str]()
    >>> signature = Signature("aten::relu", (), (), ())
    >>> cache.get(signature), cache.put(signature, "relu"), cache.get(signature)
    (None, 'relu', 'relu')
    """

    def __init__(self) -> None:
        self._items: dict[int, tuple[Signature, Result]] = {}

    def get(self, signature: Signature) -> Result | None:
        """Return the result of a signature, None where there is none."""
        item = self._items.get(id(signature))
        return item[1] if item is not None and item[0] is signature else None

    def put(self, signature: Signature, result: Result) -> Result:
        """Keep a result, and return it; where there are too many the others are forgotten."""
        if len(self._items) >= _MAX_SIZE:
            self._items.clear()
        self._items[id(signature)] = signature, result
        return result
