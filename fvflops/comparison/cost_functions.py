"""Costs as functions of sizes, as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fvflops.comparison.polynomial import Number, Polynomial
from fvflops.counting.metrics import METRICS
from fvflops.reports.display import Displayed
from fvflops.text import short_repr
from fvflops.units import format_short

Sizes = tuple[int, ...]
_MAX_REPR = 119  # characters

# Name of a size → its usual letters; the first that no other size has is used.
_LETTERS = {
    "batch": "BN",
    "seq": "ST",
    "sequence": "ST",
    "tokens": "T",
    "length": "L",
    "cache": "L",
    "prompt": "P",
    "new": "N",
    "target": "T",
    "width": "dW",
    "dim": "d",
    "hidden": "d",
    "depth": "Nl",
    "layers": "Nl",
    "heads": "h",
    "vocab": "V",
    "experts": "E",
    "channels": "C",
    "size": "R",
    "height": "H",
    "frames": "F",
    "samples": "T",
    "features": "F",
}


class ScalingError(ValueError):
    """Sizes that cannot be varied, that a model does not accept, or at which a cost is not known."""


@dataclass(frozen=True, slots=True)
class Axis:
    """A size that is varied, from `first` to `last` inclusive by `step`.

    >>> Axis("image", 32, 128, 32), len(Axis("image", 32, 128, 32))
    (Axis(name='image', first=32, last=128, step=32), 4)
    >>> print(Axis("batch", 1, 64))
    batch=1..64
    """

    name: str
    first: int
    last: int
    step: int = 1

    def __post_init__(self) -> None:
        if self.first < 1 or self.step < 1:
            raise ScalingError(f"{self}: sizes and steps must be at least 1")
        if self.first > self.last:
            raise ScalingError(f"{self} is empty: write the smaller size first")
        last = self.first + (len(self) - 1) * self.step
        if len(self) == 1:
            raise ScalingError(f"{self} has one size: vary it over more, or write the number instead of a name")
        object.__setattr__(self, "last", last)

    def __len__(self) -> int:
        return (self.last - self.first) // self.step + 1

    def __contains__(self, size: object) -> bool:
        return isinstance(size, int) and self.first <= size <= self.last and not (size - self.first) % self.step

    def __getitem__(self, index: int) -> int:
        return self.first + range(len(self))[index] * self.step

    def __str__(self) -> str:
        return f"{self.name}={self.first}..{self.last}" + (f":{self.step}" if self.step > 1 else "")

    def describe(self) -> str:
        """Return the range of sizes as text."""
        if self.step == 1:
            return f"{self.name} from {self.first:,} to {self.last:,}"
        if self.first % self.step == 0:
            return f"{self.name} a multiple of {self.step}, from {self.first:,} to {self.last:,}"
        return f"{self.name} = {self.first:,}, {self[1]:,} ... {self.last:,} (steps of {self.step})"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class CostExpression:
    """A count of a model, or of a module or operator of it, as a function of sizes.

    `axes` are the sizes that were varied, and `polynomial` is the count for all sizes in `domain`: the axes, or their
    sizes above a minimum, or their multiples of a step; None where there is no polynomial. It was fitted to the counts
    at `fitted` and verified at `held_out`; `without` names the sizes in which there is none. `counted` is sizes →
    count. `unsupported` is unsupported op → calls, which the counts lack; `about` describes the runs, as in a Trace.

    Called with sizes, it returns the count there, or the polynomial's value; sizes outside of `axes`, and unknown
    costs, raise ScalingError. Two are equal if their polynomials and domains are equal or, without polynomials, their
    counts. Its text is the polynomial in the letters of `symbols`.

    >>> square = Polynomial.of(("seq",), {(2,): 4})
    >>> cost = CostExpression("flops", (Axis("seq", 1, 99),), square, (Axis("seq", 1, 99),))
    >>> print(cost, cost(seq=5))
    4·S² 100
    """

    metric: str
    axes: tuple[Axis, ...]
    polynomial: Polynomial | None
    domain: tuple[Axis, ...]
    counted: Mapping[Sizes, int] = field(default_factory=dict)
    fitted: tuple[Sizes, ...] = ()
    held_out: tuple[Sizes, ...] = ()
    without: tuple[str, ...] = ()
    unsupported: Mapping[str, int] = field(default_factory=dict)
    about: Mapping[str, str] = field(default_factory=dict)
    modules: Mapping[str, CostExpression] = field(default_factory=dict)
    operators: Mapping[str, CostExpression] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the sizes."""
        return tuple(axis.name for axis in self.axes)

    @property
    def symbols(self) -> dict[str, str]:
        """Name of a size → its letter, or the name itself."""
        return choose_symbols(self.names)

    @property
    def everywhere(self) -> bool:
        """Whether the domain of the polynomial is all sizes of the axes."""
        return self.polynomial is not None and self.domain == self.axes

    def __call__(self, **sizes: int) -> Number:
        """Return the count at sizes, one for each name; an int, as every count is."""
        if sizes.keys() != set(self.names):
            raise TypeError(f"the sizes of this cost must be {', '.join(self.names)}; got {', '.join(sizes) or 'none'}")
        point = tuple(sizes[name] for name in self.names)
        if point in self.counted:
            return self.counted[point]
        for axis, size in zip(self.axes, point, strict=True):
            if size not in axis:
                problem = f"{axis.name}={size!r} is outside the varied range, {axis.describe()}"
                raise ScalingError(f"{problem}: vary it further")
        if self.polynomial is None:
            raise ScalingError(f"{format_sizes(self.names, point)} was not counted, and there is no polynomial")
        for axis, size in zip(self.domain, point, strict=True):
            if size not in axis:
                problem = f"{axis.name}={size} was not counted"
                raise ScalingError(f"{problem}, and the polynomial holds for {axis.describe()}")
        return self.polynomial.at(point)

    def by_module(self) -> dict[str, CostExpression]:
        """Return module name → its cost, "" being the model."""
        return dict(self.modules)

    def by_operator(self) -> dict[str, CostExpression]:
        """Return operator label → its cost."""
        return dict(self.operators)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CostExpression):
            return NotImplemented
        return self._equality_key() == other._equality_key()

    def __hash__(self) -> int:
        return hash((self.metric, self.names, self.polynomial))

    def __str__(self) -> str:
        if self.polynomial is None:
            return f"no polynomial in {' and '.join(self.without or self.names)}"
        text = self.polynomial.write(self.symbols)
        if self.everywhere:
            return text
        narrowed = [axis.describe() for axis, varied in zip(self.domain, self.axes, strict=True) if axis != varied]
        return f"{text} for {' and '.join(narrowed)}"

    def __repr__(self) -> str:
        text = f"<{self.metric}: {self}>"
        return text if len(text) <= _MAX_REPR else f"{text[: _MAX_REPR - 2]}…>"

    def _equality_key(self) -> tuple[object, ...]:
        if self.polynomial is None:
            return self.metric, self.names, tuple(sorted(self.counted.items()))
        domain = tuple(
            (axis.step, axis.first % axis.step, axis.first if axis.first > varied.first + axis.step else 0)
            for axis, varied in zip(self.domain, self.axes, strict=True)
        )
        return self.metric, self.names, self.polynomial, domain


@dataclass(frozen=True, slots=True, repr=False)
class GenerationCost(Displayed):
    """Cost of generating `new` tokens after a prompt of `prompt`, for a batch of `batch` sequences.

    `prefill` is the pass over the prompt (size: prompt), which gives the first new token; `decode` is one of the `new`
    - 1 further tokens by the length of its KV cache (size: cache). `total` is the sum, and `polynomial` the sum in
    prompt and new, None where a part has none. Tokens with a cache below `counted_up_to` were counted one by one, the
    others summed by the polynomial.
    """

    _report = "fvflops.comparison.scaling_report:generation_report"

    metric: str
    batch: int
    prompt: int
    new: int
    prefill: CostExpression
    decode: CostExpression
    polynomial: Polynomial | None
    total: int
    counted_up_to: int

    def __repr__(self) -> str:
        tokens = f"{self.new:,} tokens after {self.prompt:,}"
        total = f"{format_short(self.total)} {METRICS[self.metric].short}"
        return short_repr(self, tokens, total, f"batch {self.batch}")

    @property
    def symbols(self) -> dict[str, str]:
        """The letters of the prompt and the new tokens."""
        return choose_symbols(("prompt", "new"))


def choose_symbols(names: Sequence[str]) -> dict[str, str]:
    """Return name → the usual letter of such a size, or the name itself if other sizes have its letters.

    >>> choose_symbols(("batch", "seq", "width")), choose_symbols(("height", "width")), choose_symbols(("n_groups",))
    ({'batch': 'B', 'seq': 'S', 'width': 'd'}, {'height': 'H', 'width': 'W'}, {'n_groups': 'n_groups'})
    """
    letters = {**_LETTERS, **({"width": "W"} if "height" in names else {})}
    symbols: dict[str, str] = {}
    for name in names:
        used = {*symbols.values(), *names}
        symbols[name] = next((letter for letter in letters.get(name, "") if letter not in used), name)
    return symbols


def format_sizes(names: Sequence[str], sizes: Sequence[int]) -> str:
    """Return sizes with their names, in one line.

    >>> format_sizes(("batch", "seq"), (2, 128))
    'batch=2, seq=128'
    """
    return ", ".join(f"{name}={size}" for name, size in zip(names, sizes, strict=True))
