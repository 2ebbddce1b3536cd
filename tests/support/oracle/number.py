"""The number: a Python number, real or complex, that tells a tally of every operation that is done with it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

# Operations that are more than one flop each.
_FLOPS = {"mac": 2}


class Tally:
    """How often each kind of operation was done: `add` (also subtraction), `mul`, `div`, `sqrt`, `max`, `exp` ...

    A product that is added to a sum, or taken from one, is a `mac`: a multiply-add, not a `mul` and an `add`.
    """

    def __init__(self):
        self.done = Counter()

    def flops(self, costs: dict[str, int]) -> int:
        return sum(costs.get(kind, _FLOPS.get(kind, 1)) * times for kind, times in self.done.items())

    @property
    def macs(self) -> int:
        return self.done["mac"]

    def numbers(self, tensor):
        return self._wrap(tensor.tolist())

    def zero(self) -> Number:
        return Number(0.0, self)

    def lowest(self) -> Number:
        """Return an accumulator that begins below every number."""
        return Number(-math.inf, self)

    def number(self, value: float) -> Number:
        return Number(float(value), self)

    def sum(self, numbers: Iterable[Number]) -> Number:
        """Return a sum: one addition for each number, since the accumulator begins at 0."""
        total = self.zero()
        for number in numbers:
            total = total + number
        return total

    def dot(self, left: Iterable[Any], right: Iterable[Any]) -> Any:
        """Return a sum of products: one multiply-add for each pair."""
        total = self.zero()
        for x, y in zip(left, right, strict=True):
            total = total.plus_product(x, y)
        return total

    def _wrap(self, value):
        if isinstance(value, list):
            return [self._wrap(item) for item in value]
        if isinstance(value, complex):
            return Complex(Number(value.real, self), Number(value.imag, self))
        return Number(float(value), self)


@dataclass(frozen=True, slots=True, eq=False)
class Number:
    """A real number; arithmetic with it is told to its tally."""

    value: float
    tally: Tally

    def _tell(self, kind: str, value: float) -> Number:
        self.tally.done[kind] += 1
        return Number(value, self.tally)

    def __add__(self, other: Number | float) -> Number:
        return self._tell("add", self.value + _plain(other))

    __radd__ = __add__

    def __sub__(self, other: Number | float) -> Number:
        return self._tell("add", self.value - _plain(other))

    def __rsub__(self, other: float) -> Number:
        return self._tell("add", other - self.value)

    def __mul__(self, other: Number | float) -> Number:
        return self._tell("mul", self.value * _plain(other))

    __rmul__ = __mul__

    def __truediv__(self, other: Number | float) -> Number:
        return self._tell("div", self.value / _plain(other))

    def __rtruediv__(self, other: float) -> Number:
        return self._tell("div", other / self.value)

    def __neg__(self) -> Number:
        return self._tell("neg", -self.value)

    def __abs__(self) -> Number:
        return self._tell("abs", abs(self.value))

    def max(self, other: Number | float) -> Number:
        return self._tell("max", max(self.value, _plain(other)))

    def min(self, other: Number | float) -> Number:
        return self._tell("max", min(self.value, _plain(other)))

    def equals(self, other: float) -> bool:
        """Return whether it is a plain number: one comparison."""
        return bool(self._tell("compare", self.value).value == other)

    def sqrt(self) -> Number:
        return self._tell("sqrt", math.sqrt(self.value))

    def plus_product(self, left, right):
        """Return the number plus a product: one multiply-add; a product of complex numbers makes the sum complex."""
        if isinstance(left, Complex) or isinstance(right, Complex):
            return Complex(self, Number(0.0, self.tally)).plus_product(left, right)
        return self._tell("mac", self.value + left.value * _plain(right))

    def minus_product(self, left: Number, right: Number) -> Number:
        """Return the number less a product: one multiply-add."""
        return self._tell("mac", self.value - left.value * right.value)

    def call(self, name: str, function: Callable[[float], float]) -> Number:
        """Return an elementary function of the number, told under its name: `x.call("exp", math.exp)`."""
        return self._tell(name, function(self.value))


@dataclass(frozen=True, slots=True, eq=False)
class Complex:
    """A complex number of two counting ones: an addition is 2 operations, a product 6, a multiply-add 4 real ones."""

    real: Number
    imag: Number

    @property
    def value(self) -> complex:
        return complex(self.real.value, self.imag.value)

    def __add__(self, other: Complex) -> Complex:
        return Complex(self.real + other.real, self.imag + other.imag)

    def __sub__(self, other: Complex) -> Complex:
        return Complex(self.real - other.real, self.imag - other.imag)

    def __mul__(self, other: Complex) -> Complex:
        return Complex(self.real * other.real - self.imag * other.imag, self.real * other.imag + self.imag * other.real)

    def __truediv__(self, other: Complex) -> Complex:
        """Return the product with the conjugate over the other's square: 6 + 3 + 2 operations."""
        square = other.real * other.real + other.imag * other.imag
        real = self.real * other.real + self.imag * other.imag
        return Complex(real / square, (self.imag * other.real - self.real * other.imag) / square)

    def __neg__(self) -> Complex:
        return Complex(-self.real, -self.imag)

    def __abs__(self) -> Number:
        """Return the length: the root of the sum of two squares, four operations."""
        return (self.real * self.real + self.imag * self.imag).sqrt()

    def plus_product(self, left: Complex, right: Complex) -> Complex:
        """Return the number plus a product: two multiply-adds for the real part and two for the imaginary one."""
        real = self.real.plus_product(left.real, right.real).minus_product(left.imag, right.imag)
        imag = self.imag.plus_product(left.real, right.imag)
        return Complex(real, imag.plus_product(left.imag, right.real))

    def minus_product(self, left: Complex, right: Complex) -> Complex:
        """Return the number less a product: four multiply-adds, as `plus_product`."""
        real = self.real.minus_product(left.real, right.real).plus_product(left.imag, right.imag)
        imag = self.imag.minus_product(left.real, right.imag)
        return Complex(real, imag.minus_product(left.imag, right.real))

    def conjugate(self) -> Complex:
        """Return the conjugate: one negation."""
        return Complex(self.real, -self.imag)


def values(numbers):
    """Return nested lists of counting numbers as nested lists of floats, to compare with torch's own result."""
    return [values(item) for item in numbers] if isinstance(numbers, (list, tuple)) else numbers.value


def _plain(value: Number | float) -> float:
    return value.value if isinstance(value, Number) else float(value)
