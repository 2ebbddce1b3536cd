"""Counts by module name, in which an unknown name is an error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from operator import add, and_, eq, or_, sub
from typing import Any


def _plain(operation: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return an operation on Counters; those of Counter itself read missing keys of both operands."""

    def operate(own: Counter[str], other: object) -> Any:
        return operation(Counter(own), Counter(other) if isinstance(other, Counter) else other)

    return operate


class ModuleCounts(Counter[str]):
    """A Counter of module name → count that raises KeyError with the closest match for a name that no module has.

    Another name of a shared module is that module, as in `total`. Arithmetic, copies and pickles are plain Counters,
    which answer 0 for a missing name.
    """

    def __init__(self, counts: Mapping[str, int], canonical_name: Callable[[str], str]) -> None:
        """Store the counts; `canonical_name` returns the name under which a module is counted, or raises KeyError."""
        super().__init__(counts)
        self._canonical_name = canonical_name

    def __missing__(self, name: str) -> int:
        """Return the count of another name of a module."""
        return self.get(self._canonical_name(name), 0)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a Counter."""
        return Counter, (dict(self),)

    def __repr__(self) -> str:
        """Return the text of a Counter."""
        return repr(Counter(self))

    def copy(self) -> Counter[str]:  # type: ignore[override]
        """Return a Counter."""
        return Counter(self)

    __eq__ = _plain(eq)
    __hash__ = None  # type: ignore[assignment]
    __add__ = __iadd__ = _plain(add)
    __radd__ = _plain(lambda own, other: other + own)
    __sub__ = __isub__ = _plain(sub)
    __rsub__ = _plain(lambda own, other: other - own)
    __or__ = __ior__ = _plain(or_)
    __ror__ = _plain(lambda own, other: other | own)
    __and__ = __rand__ = __iand__ = _plain(and_)
