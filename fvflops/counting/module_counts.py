"""Counts by module name, in which an unknown name is an error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any


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

    # Counter's operators read missing keys of both operands.
    def __eq__(self, other: object) -> bool:
        return dict(self) == other if not isinstance(other, Counter) else Counter(self) == Counter(other)

    __hash__ = None  # type: ignore[assignment]

    def __add__(self, other: Any) -> Any:
        return Counter(self) + Counter(other)

    def __radd__(self, other: Any) -> Any:
        return Counter(other) + Counter(self)

    def __sub__(self, other: Any) -> Any:
        return Counter(self) - Counter(other)

    def __rsub__(self, other: Any) -> Any:
        return Counter(other) - Counter(self)

    def __or__(self, other: Any) -> Any:
        return Counter(self) | Counter(other)

    def __ror__(self, other: Any) -> Any:
        return Counter(other) | Counter(self)

    def __and__(self, other: Any) -> Any:
        return Counter(self) & Counter(other)

    __rand__ = __and__
    __iadd__ = __add__
    __isub__ = __sub__
    __ior__ = __or__
    __iand__ = __and__
