"""Shape patterns: names for the dimensions of a call's tensors, such as "*b k, n k"."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from keyword import iskeyword

from fvflops.formulas.language.call import Call
from fvflops.text import suggest, truncate
from fvflops.trace import TensorSpec, Value

MAX_LENGTH = 1000
MAX_DIGITS = 18

_TOKEN = re.compile(r"\*?[A-Za-z]\w*|\d+|\.\.\.", re.ASCII)


class PatternError(ValueError):
    """A pattern that cannot be parsed, or that does not match the shapes of a call."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """Shapes of an op's tensors, one item for each.

    A comma-separated text applies to the op's arguments of type Tensor or Tensor? in schema order, and may omit
    trailing tensors; a mapping goes from argument name to item. An item has tokens separated by spaces: a name binds
    the size of a dimension, which must be the same everywhere; a number is that size; `*b` matches any number of
    dimensions and binds their product; `...` matches any number and binds nothing. The item `_` skips a tensor, present
    or not, and `()` is a 0-dimensional tensor.

    >>> Pattern.parse("*b k, n k").names == {"b", "k", "n"}
    True
    """

    text: str
    items: tuple[tuple[str, ...] | None, ...]
    arguments: tuple[str, ...] | None
    names: frozenset[str]

    @staticmethod
    def parse(text: str | Mapping[str, str]) -> Pattern:
        """Parse a text, or a mapping of argument name to text; a syntax error raises PatternError."""
        return _parse(text if isinstance(text, str) else tuple(text.items()))

    def match(self, call: Call) -> dict[str, int]:
        """Return name → size; shapes that do not match raise PatternError, which quotes both.

        >>> matrix = TensorSpec((2, 3, 8))
        >>> call = Call("aten::linear", {"x": matrix, "w": TensorSpec((5, 8))}, (), "l(Tensor x, Tensor w) -> Tensor")
        >>> Pattern.parse("*b k, n k").match(call)
        {'b': 6, 'k': 8, 'n': 5}
        """
        names = call.operands if self.arguments is None else self.arguments
        if len(names) < len(self.items):
            raise PatternError(f"{self.text!r} names {len(self.items)} tensors, and {call.op} has {len(names)}")
        bound: dict[str, int] = {}
        for name, tokens in zip(names, self.items, strict=False):
            if tokens is not None:
                self._bind(bound, tokens, name, call)
        return bound

    def _bind(self, bound: dict[str, int], tokens: tuple[str, ...], name: str, call: Call) -> None:
        if name not in call.arguments:
            hint = suggest(name, call.arguments, quote=False, cutoff=0.5)
            raise PatternError(f"{self.text!r} names {name}, which {call.op} lacks{hint}")
        shape = _shape_of(call.arguments[name])
        if shape is None:
            raise PatternError(f"{self.text!r} needs {name}, which is {call.arguments[name]!r}")
        wildcard = next((index for index, token in enumerate(tokens) if token[0] in "*."), None)
        if len(shape) != len(tokens) if wildcard is None else len(shape) < len(tokens) - 1:
            raise PatternError(self._mismatch(call, f"{name} is {len(shape)}-D, not {' '.join(tokens) or '()'!r}"))
        for token, size in _pairs(tokens, shape, wildcard):
            expected = int(token) if token.isdigit() else bound.setdefault(token, size)
            if expected != size:
                raise PatternError(self._mismatch(call, f"{token} is {expected}, but {size} in {name}"))

    def _mismatch(self, call: Call, detail: str) -> str:
        names = call.operands if self.arguments is None else self.arguments
        shapes = ", ".join(f"{name} {_show(call.arguments.get(name))}" for name in names)
        return f"{self.text!r} does not match {shapes}: {detail}"


def _pairs(tokens: tuple[str, ...], shape: tuple[int, ...], wildcard: int | None) -> Iterable[tuple[str, int]]:
    if wildcard is None:
        return zip(tokens, shape, strict=True)
    after = len(tokens) - wildcard - 1
    middle = shape[wildcard : len(shape) - after]
    pairs = [
        *zip(tokens[:wildcard], shape, strict=False),
        *zip(tokens[wildcard + 1 :], shape[len(shape) - after :], strict=True),
    ]
    if tokens[wildcard] != "...":
        pairs.insert(wildcard, (tokens[wildcard][1:], math.prod(middle)))
    return pairs


@lru_cache(maxsize=4096)
def _parse(given: str | tuple[tuple[str, str], ...]) -> Pattern:
    if isinstance(given, str):
        text, parts, arguments = given, given.split(","), None
    else:
        text = ", ".join(f"{name}: {item}" for name, item in given)
        parts, arguments = [item for _, item in given], tuple(name for name, _ in given)
    if len(text) > MAX_LENGTH:
        raise PatternError(f"a pattern has at most {MAX_LENGTH} characters, this has {len(text):,}: {truncate(text)!r}")
    items = tuple(_parse_item(item, text) for item in parts)
    tokens = {token.removeprefix("*") for item in items for token in item or () if not token.isdigit()}
    return Pattern(text, items, arguments, frozenset(tokens - {"..."}))


def _parse_item(item: str, text: str) -> tuple[str, ...] | None:
    tokens = tuple(item.split())
    if tokens == ("_",):
        return None
    if tokens == ("()",):
        return ()
    if not tokens:
        raise PatternError(f"the pattern {text!r} has an empty item: write _ to skip a tensor, () for no dimensions")
    if "_" in tokens:
        raise PatternError(f"the pattern {text!r} has _ in {item.strip()!r}: _ skips a tensor, so name the dimension")
    for token in tokens:
        if not _TOKEN.fullmatch(token):
            raise PatternError(f"the pattern {text!r} has {token!r}: write a name, a number, *name or ...")
        if iskeyword(token.removeprefix("*")):
            raise PatternError(f"the pattern {text!r} has {token!r}, a Python keyword: choose another name")
        if token.isdigit() and len(token) > MAX_DIGITS:
            raise PatternError(f"the pattern {truncate(text)!r} has a number of more than {MAX_DIGITS} digits")
    if sum(token[0] in "*." for token in tokens) > 1:
        raise PatternError(f"the pattern {text!r} may match any number of dimensions only once in {item.strip()!r}")
    return tokens


def _shape_of(value: Value) -> tuple[int, ...] | None:
    # torch passes a Python number where the schema says Tensor, as in add(x, 1.0).
    if isinstance(value, (bool, int, float, complex)):
        return ()
    return value.shape if isinstance(value, TensorSpec) else None


def _show(value: Value) -> str:
    return str(list(value.shape)) if isinstance(value, TensorSpec) else repr(value)
