"""Exact polynomials in named sizes, with rational coefficients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from fvflops.text import short_repr

Exponents = tuple[int, ...]
Number = int | Fraction
Terms = dict[Exponents, Fraction]

_SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True, slots=True, repr=False)
class Polynomial:
    """A sum of products of powers of its `variables`; `terms` are (exponents, coefficient), highest degree first.

    Made by `Polynomial.of`, so that no coefficient is zero and equal polynomials are equal. Called with a value for
    each variable, it returns an int where the value is integral, else a Fraction.

    >>> cost = Polynomial.of(("seq", "width"), {(1, 2): 6, (2, 1): 2})
    >>> print(cost, "|", cost.write({"seq": "S", "width": "d"}))
    2·seq²·width + 6·seq·width² | 2·S²·d + 6·S·d²
    >>> cost(seq=3, width=5)
    540
    """

    variables: tuple[str, ...]
    terms: tuple[tuple[Exponents, Fraction], ...]

    @staticmethod
    def of(variables: Iterable[str], terms: Mapping[Exponents, Number]) -> Polynomial:
        """Return the polynomial with the coefficients that `terms` gives to exponents, one for each variable.

        >>> print(Polynomial.of("x", {(2,): Fraction(1, 2), (0,): -3, (1,): 0}))
        1/2·x² - 3
        """
        nonzero = [(exponents, Fraction(factor)) for exponents, factor in terms.items() if factor]
        nonzero.sort(key=lambda term: (sum(term[0]), term[0]), reverse=True)
        return Polynomial(tuple(variables), tuple(nonzero))

    def __call__(self, **values: int) -> Number:
        """Return the value; a missing and an unknown variable raise TypeError."""
        if values.keys() != set(self.variables):
            names = ", ".join(self.variables)
            raise TypeError(f"the variables of this polynomial must be {names}; got {', '.join(values) or 'none'}")
        return self.at([values[name] for name in self.variables])

    def at(self, values: Iterable[int]) -> Number:
        """Return the value for values in the order of the variables."""
        point = tuple(values)
        value = sum((factor * math.prod(map(pow, point, exponents)) for exponents, factor in self.terms), Fraction(0))
        return value.numerator if value.denominator == 1 else value

    def degree(self, variable: str | None = None) -> int:
        """Return the highest exponent of a variable, or of all together; zero has the degree 0."""
        if variable is None:
            return max((sum(exponents) for exponents, _ in self.terms), default=0)
        index = self.variables.index(variable)
        return max((exponents[index] for exponents, _ in self.terms), default=0)

    def __add__(self, other: Polynomial | Number) -> Polynomial:
        variables, terms, others = self._aligned(other)
        return Polynomial.of(
            variables, {key: terms.get(key, 0) + others.get(key, 0) for key in terms.keys() | others.keys()}
        )

    def __neg__(self) -> Polynomial:
        return self * -1

    def __sub__(self, other: Polynomial | Number) -> Polynomial:
        return self + other * -1

    def __mul__(self, other: Polynomial | Number) -> Polynomial:
        variables, terms, others = self._aligned(other)
        product: dict[Exponents, Number] = {}
        for left, factor in terms.items():
            for right, other_factor in others.items():
                key = tuple(map(int.__add__, left, right))
                product[key] = product.get(key, 0) + factor * other_factor
        return Polynomial.of(variables, product)

    __radd__ = __add__
    __rmul__ = __mul__

    def __rsub__(self, other: Number) -> Polynomial:
        return self * -1 + other

    def __pow__(self, exponent: int) -> Polynomial:
        power = Polynomial.of(self.variables, {(0,) * len(self.variables): 1})
        for _ in range(exponent):
            power = power * self
        return power

    def substitute(self, **values: Polynomial | Number) -> Polynomial:
        """Return the polynomial with numbers or polynomials in place of some variables.

        >>> square = Polynomial.of("x", {(2,): 1})
        >>> print(square.substitute(x=Polynomial.of("xy", {(1, 0): 1, (0, 1): -1})))
        x² - 2·x·y + y²
        """
        remaining = [name for name in self.variables if name not in values]
        bases: list[Any] = [values.get(name, Polynomial.of((name,), {(1,): 1})) for name in self.variables]
        products: list[Polynomial] = [
            math.prod(map(pow, bases, exponents), start=Polynomial.of((), {(): factor}))
            for exponents, factor in self.terms
        ]
        return sum(products, start=Polynomial.of(remaining, {}))

    def sum_over(self, variable: str, first: Polynomial | Number, count: Polynomial | Number) -> Polynomial:
        """Return the sum over `count` values of a variable, from `first` on, as a polynomial.

        Holds for a count of 0 and more (Faulhaber's formula).
        """
        offset = Polynomial.of(("",), {(1,): 1})  # a name that no argument has
        shifted = offset * 0 + self.substitute(**{variable: offset + first})
        steps = count if isinstance(count, Polynomial) else Polynomial.of((), {(): count})
        powers = _sums_of_powers(steps, shifted.degree(""))
        total = Polynomial.of(shifted.variables[1:], {})
        for (power, *others), factor in shifted.terms:
            total = total + Polynomial.of(total.variables[: len(others)], {tuple(others): factor}) * powers[power]
        return total

    def write(self, symbols: Mapping[str, str] | None = None) -> str:
        """Return the polynomial as text, with `symbols` in place of its variables' names."""
        if not self.terms:
            return "0"
        names = [(symbols or {}).get(name, name) for name in self.variables]
        text = ""
        for exponents, factor in self.terms:
            sign = ("-" if factor < 0 else "") if not text else (" - " if factor < 0 else " + ")
            text += sign + _write_term(names, exponents, abs(factor))
        return text

    def __str__(self) -> str:
        return self.write()

    def __repr__(self) -> str:
        return short_repr(self, "", self.write())

    def _aligned(self, other: Polynomial | Number) -> tuple[tuple[str, ...], Terms, Terms]:
        """Return the variables of both, and the terms of each with exponents of these variables."""
        if not isinstance(other, Polynomial):
            other = Polynomial.of((), {(): other})
        variables = tuple(dict.fromkeys((*self.variables, *other.variables)))
        return variables, self._terms_in(variables), other._terms_in(variables)

    def _terms_in(self, variables: tuple[str, ...]) -> Terms:
        indices = [self.variables.index(name) if name in self.variables else -1 for name in variables]
        return {
            tuple(exponents[index] if index >= 0 else 0 for index in indices): factor
            for exponents, factor in self.terms
        }


def _sums_of_powers(count: Polynomial, highest: int) -> list[Polynomial]:
    """Return 0^k + 1^k + ... + (count - 1)^k for each k up to the highest."""
    sums: list[Polynomial] = []
    for power in range(highest + 1):
        remainder = count ** (power + 1)
        for lower, lower_sum in enumerate(sums):
            remainder = remainder - lower_sum * math.comb(power + 1, lower)
        sums.append(remainder * Fraction(1, power + 1))
    return sums


def _write_term(names: list[str], exponents: Exponents, factor: Fraction) -> str:
    powers = [
        name + (str(exponent).translate(_SUPERSCRIPTS) if exponent > 1 else "")
        for name, exponent in zip(names, exponents, strict=True)
        if exponent
    ]
    return "·".join([write_number(factor), *powers] if factor != 1 or not powers else powers)


def write_number(value: Number) -> str:
    """Return a rational number as text.

    >>> write_number(Fraction(7000, 3))
    '7,000/3'
    """
    return f"{value.numerator:,}" + (f"/{value.denominator:,}" if value.denominator > 1 else "")
