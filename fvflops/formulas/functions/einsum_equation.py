"""Parse an einsum equation with its shapes, as numpy and torch do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

# An index of an equation: a letter, or the position of a dimension under an ellipsis, counted from the right.
Index = str


@dataclass(frozen=True, slots=True)
class Equation:
    """An einsum equation: the indices of each operand and of the output, and the size of each index.

    The size of an index is its maximum over all operands, since a dimension of 1 broadcasts.
    """

    operands: tuple[tuple[Index, ...], ...]
    output: tuple[Index, ...]
    sizes: dict[Index, int]


def read_equation(text: str, shapes: Sequence[tuple[int, ...]]) -> Equation:
    """Parse an equation; one that does not match the operands' shapes raises ValueError.

    Without an arrow the output has the ellipsis, then the letters that occur once, sorted.

    >>> equation = read_equation("...ij, jk", [(7, 2, 3), (3, 4)])
    >>> equation.output, equation.sizes["j"]
    (('.0', 'i', 'k'), 3)
    """
    left, arrow, right = text.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(shapes):
        raise ValueError(f"the equation {text!r} has {len(terms)} operands, but there are {len(shapes)} tensors")
    operands = tuple(_indices(term, len(shape), text) for term, shape in zip(terms, shapes, strict=True))
    sizes: dict[Index, int] = {}
    for term, shape in zip(operands, shapes, strict=True):
        for index, size in zip(term, shape, strict=True):
            previous = sizes.setdefault(index, size)
            if 1 not in (previous, size) and previous != size:
                raise ValueError(
                    f"the equation {text!r} does not match {list(map(list, shapes))}: {index} is {previous} and {size}"
                )
            sizes[index] = size if previous == 1 else previous
    dots = sorted({index for term in operands for index in term if index[0] == "."}, reverse=True)
    if arrow:
        before, ellipsis, after = right.partition("...")
        output = (*before, *(dots if ellipsis else ()), *after)
        if len(set(output)) < len(output) or not sizes.keys() >= set(output):
            raise ValueError(
                f"the equation {text!r} has the output {right!r}: write each index once, from the operands"
            )
        return Equation(operands, output, sizes)
    occurrences = Counter(left)
    return Equation(
        operands,
        (*dots, *sorted(letter for letter in occurrences if letter.isalpha() and occurrences[letter] == 1)),
        sizes,
    )


def _indices(term: str, rank: int, text: str) -> tuple[Index, ...]:
    before, ellipsis, after = term.partition("...")
    hidden = rank - len(before) - len(after)
    if hidden < 0 or (hidden and not ellipsis) or not (before + after + "a").isalpha():
        raise ValueError(f"the equation {text!r} has the operand {term!r} for a tensor of {rank} dimensions")
    return (*before, *(f".{position}" for position in reversed(range(hidden))), *after)
