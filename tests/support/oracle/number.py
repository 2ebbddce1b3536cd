"""Numbers, real or complex, that tell a tally of every operation on them; numpy's arrays of objects hold them."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# Operations that are more than one flop each.
_FLOPS = {"mac": 2}


def each(function: Callable[..., Any], *operands: Any, results: int = 1) -> Any:
    """Return what a function makes of each element of arrays, which broadcast; of several results, an array of each."""
    return np.frompyfunc(function, len(operands), results)(*operands)


def plus_product(total: Any, left: Any, right: Any) -> Any:
    """Return numbers plus products: a multiply-add each."""
    return each(lambda number, x, y: number.plus_product(x, y), total, left, right)


def minus_product(total: Any, left: Any, right: Any) -> Any:
    return each(lambda number, x, y: number.minus_product(x, y), total, left, right)


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

    def number(self, value: float) -> Number:
        return Number(float(value), self)

    def numbers(self, tensor: Any) -> Any:
        """Return a tensor or array as an array of counting numbers."""
        return each(self._count, np.array(tensor.tolist(), dtype=object).reshape(tuple(tensor.shape)))

    def _count(self, value: complex) -> Number | Complex:
        is_complex = isinstance(value, complex)
        return Complex(self.number(value.real), self.number(value.imag)) if is_complex else self.number(value)

    def zeros(self, *shape: int) -> Any:
        return np.full(shape, self.number(0), dtype=object)[()]

    def sum(self, numbers: Any, axis: int | tuple[int, ...] | None = None) -> Any:
        """Return sums: an addition for each number, since the accumulator begins at 0."""
        return np.sum(np.asarray(numbers, dtype=object), axis, initial=self.number(0))

    def largest(self, numbers: Any, start: float = -math.inf) -> Any:
        """Return the largest numbers along the last axis: a compare-select each, the accumulator begins below all."""
        return np.frompyfunc(Number.max, 2, 1).reduce(np.asarray(numbers, object), -1, initial=self.number(start))

    def dot(self, left: Any, right: Any, start: Any = None) -> Any:
        """Return sums of products along the last axis: a multiply-add for each pair; the other axes broadcast."""
        left, right = (np.moveaxis(np.asarray(array, dtype=object), -1, 0) for array in (left, right))
        total = self.zeros(*np.broadcast_shapes(left.shape[1:], right.shape[1:])) if start is None else start
        for one, other in zip(left, right, strict=True):
            total = plus_product(total, one, other)
        return total


def _told(kind: str, function: Callable[[float, float], float]) -> Callable[[Any, Any], Any]:
    """Return an operation on two real numbers that the tally counts; numpy applies it to each element of an array."""

    def operate(self: Number, other: Any) -> Any:
        if isinstance(other, (np.ndarray, Complex)):
            return NotImplemented
        result = self.tell(kind, function(self.value, other.value if isinstance(other, Number) else float(other)))
        return result.value if kind == "compare" else result

    return operate


@dataclass(frozen=True, slots=True, eq=False)
class Number:
    """A real number; arithmetic with it is told to its tally."""

    value: float
    tally: Tally

    def tell(self, kind: str, value: float) -> Number:
        self.tally.done[kind] += 1
        return Number(value, self.tally)

    __add__ = __radd__ = _told("add", operator.add)
    __sub__ = _told("add", operator.sub)
    __rsub__ = _told("add", lambda own, other: other - own)
    __mul__ = __rmul__ = _told("mul", operator.mul)
    __truediv__ = _told("div", operator.truediv)
    __rtruediv__ = _told("div", lambda own, other: other / own)
    __lt__ = _told("compare", operator.lt)
    __le__ = _told("compare", operator.le)
    __eq__ = _told("compare", operator.eq)
    __ne__ = _told("compare", operator.ne)
    max = _told("max", max)
    min = _told("max", min)

    def __neg__(self) -> Number:
        return self.tell("neg", -self.value)

    def __abs__(self) -> Number:
        return self.tell("abs", abs(self.value))

    def call(self, name: str, function: Callable[[float], float]) -> Number:
        """Return an elementary function of the number, told under its name: `x.call("erf", math.erf)`."""
        return self.tell(name, function(self.value))

    # numpy calls these for each number of an array: np.exp(array).
    def sqrt(self) -> Number:
        return self.call("sqrt", math.sqrt)

    def exp(self) -> Number:
        return self.call("exp", math.exp)

    def log(self) -> Number:
        return self.call("log", math.log)

    def tanh(self) -> Number:
        return self.call("tanh", math.tanh)

    def plus_product(self, left: Any, right: Any) -> Any:
        """Return the number plus a product: one multiply-add; a product of complex numbers makes the sum complex."""
        if isinstance(left, Complex) or isinstance(right, Complex):
            return Complex(self, self.tally.number(0)).plus_product(left, right)
        return self.tell("mac", self.value + left.value * (right.value if isinstance(right, Number) else right))

    def minus_product(self, left: Number, right: Number) -> Number:
        return self.tell("mac", self.value - left.value * right.value)


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

    def __radd__(self, other: Number) -> Complex:
        """Return the sum with a real accumulator, which becomes complex."""
        return self + Complex(other, other.tally.number(0))

    def __sub__(self, other: Complex) -> Complex:
        return Complex(self.real - other.real, self.imag - other.imag)

    def __mul__(self, other: Complex | float) -> Complex:
        if not isinstance(other, Complex):
            return Complex(self.real * other, self.imag * other)
        return Complex(self.real * other.real - self.imag * other.imag, self.real * other.imag + self.imag * other.real)

    def __truediv__(self, other: Complex | Number) -> Complex:
        """Return the product with the conjugate over the other's square: 6 + 3 + 2 operations."""
        if isinstance(other, Number):
            return Complex(self.real / other, self.imag / other)
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
        real = self.real.minus_product(left.real, right.real).plus_product(left.imag, right.imag)
        imag = self.imag.minus_product(left.real, right.imag)
        return Complex(real, imag.minus_product(left.imag, right.real))


def values(numbers: Any) -> Any:
    """Return the values of an array of counting numbers, or of nested lists of them, as nested lists."""
    found = each(operator.attrgetter("value"), np.array(numbers, dtype=object))
    return found.tolist() if isinstance(found, np.ndarray) else found


def matmul(tally: Tally, left: Any, right: Any) -> Any:
    """Return a matmul as numpy's: batches broadcast, a vector is one row on the left and one column on the right."""
    wide, tall = left if left.ndim > 1 else left[None], right if right.ndim > 1 else right[:, None]
    result = tally.dot(wide[..., :, None, :], np.swapaxes(tall, -1, -2)[..., None, :, :])
    result = result if left.ndim > 1 else result[..., 0, :]
    return result if right.ndim > 1 else result[..., 0]


def linear(tally: Tally, x: Any, weight: Any, bias: Any = None) -> Any:
    """Return x @ weight.T + bias, of an input of any number of dimensions."""
    products = matmul(tally, x, weight.T)
    return products if bias is None else products + bias


def scaled(x: Any, factor: float) -> Any:
    """Return a multiple; a factor of 1 is not an operation."""
    return x if factor == 1 else x * factor


def indexes(shape: Sequence[int]) -> np.ndindex:
    """Iterate over every index of a shape."""
    return np.ndindex(*shape)
