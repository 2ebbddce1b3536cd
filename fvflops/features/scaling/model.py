"""The scaling: what a cost comes to as a function of sizes, and the sizes at which it was counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fvflops.features.scaling.polynomial import Number, Polynomial

Sizes = tuple[int, ...]

# Name of a size → the letters that the field writes for it, the first that is free.
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
    """Sizes that cannot be varied, that a model does not take, or of which a cost is not known."""


@dataclass(frozen=True, slots=True)
class Axis:
    """A size that is varied, from `first` to `last` (which it holds) by `step`.

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
            raise ScalingError(f"{self}: a size is at least 1, and its steps too")
        if self.first > self.last:
            raise ScalingError(f"{self} is empty: write the smaller size first")
        last = self.first + (len(self) - 1) * self.step
        if len(self) == 1:
            raise ScalingError(f"{self} holds one size alone: to vary it, give it more, or write the number itself")
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
        """Return in words which sizes these are."""
        if self.step == 1:
            return f"{self.name} from {self.first:,} to {self.last:,}"
        if self.first % self.step == 0:
            return f"{self.name} a multiple of {self.step}, from {self.first:,} to {self.last:,}"
        return f"{self.name} = {self.first:,}, {self[1]:,} ... {self.last:,} (steps of {self.step})"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class CostExpression:
    """A count of a model, or of a module or operator of it, as a function of sizes.

    `axes` are the sizes that were varied, and `polynomial` what the count is for all sizes of `holds_on`, which are the
    axes, or those of their sizes that are larger than some, or multiples of a number; None where it is no
    polynomial. It was made from the sizes in `fitted` and agreed with the count at those in `held_out`; `without`
    names the sizes in which there is none. `counted` is sizes → what was counted at them. `unknown` is op → calls,
    of ops that the table does not know, which are missing from the counts.

    It is called with sizes, and gives what the polynomial says, or what was counted where that was; sizes outside of
    `axes` raise ScalingError, as do others that are not known. Two are equal whose polynomials, with the sizes for
    which they hold, are equal, or, if there are none, whose counts are. Its text is the polynomial, in the letters
    of `symbols`.

    >>> square = Polynomial.of(("seq",), {(2,): 4})
    >>> cost = CostExpression("flops", (Axis("seq", 1, 99),), square, (Axis("seq", 1, 99),))
    >>> print(cost, cost(seq=5))
    4·S² 100
    """

    metric: str
    axes: tuple[Axis, ...]
    polynomial: Polynomial | None
    holds_on: tuple[Axis, ...]
    counted: Mapping[Sizes, int] = field(default_factory=dict)
    fitted: tuple[Sizes, ...] = ()
    held_out: tuple[Sizes, ...] = ()
    without: tuple[str, ...] = ()
    unknown: Mapping[str, int] = field(default_factory=dict)
    modules: Mapping[str, CostExpression] = field(default_factory=dict)
    operators: Mapping[str, CostExpression] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the sizes."""
        return tuple(axis.name for axis in self.axes)

    @property
    def symbols(self) -> dict[str, str]:
        """The letters that are written for the sizes: name → letter, or the name itself."""
        return choose_symbols(self.names)

    @property
    def everywhere(self) -> bool:
        """Whether the polynomial holds for all sizes of the axes."""
        return self.polynomial is not None and self.holds_on == self.axes

    def __call__(self, **sizes: int) -> Number:
        """Return the count at sizes, one for each name; an int, as every count is."""
        if sizes.keys() != set(self.names):
            raise TypeError(f"this cost takes the sizes {', '.join(self.names)}, not {', '.join(sizes) or 'none'}")
        point = tuple(sizes[name] for name in self.names)
        if point in self.counted:
            return self.counted[point]
        for axis, size in zip(self.axes, point, strict=True):
            if size not in axis:
                raise ScalingError(f"{axis.name}={size!r} was not varied over: {axis.describe()} was; vary it further")
        if self.polynomial is None:
            raise ScalingError(
                f"{format_sizes(self.names, point)} was not counted, and there is no polynomial to tell what it costs"
            )
        for axis, size in zip(self.holds_on, point, strict=True):
            if size not in axis:
                raise ScalingError(
                    f"{axis.name}={size} was not counted, and the polynomial holds for {axis.describe()}"
                )
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
        return self._law() == other._law()

    def __hash__(self) -> int:
        return hash((self.metric, self.names, self.polynomial))

    def __str__(self) -> str:
        if self.polynomial is None:
            return f"no polynomial in {' and '.join(self.without or self.names)}"
        text = self.polynomial.write(self.symbols)
        if self.everywhere:
            return text
        narrowed = [axis.describe() for axis, whole in zip(self.holds_on, self.axes, strict=True) if axis != whole]
        return f"{text} for {' and '.join(narrowed)}"

    def __repr__(self) -> str:
        return f"<{self.metric}: {self}>"

    def _law(self) -> tuple[object, ...]:
        kept = [
            (axis.step, axis.first % axis.step, axis.first if axis.first > whole.first + axis.step else 0)
            for axis, whole in zip(self.holds_on, self.axes, strict=True)
        ]
        known = tuple(sorted(self.counted.items())) if self.polynomial is None else (self.polynomial, tuple(kept))
        return self.metric, self.names, known


@dataclass(frozen=True, slots=True)
class GenerationCost:
    """What a language model's generation costs: `new` tokens after a prompt of `prompt`, for `batch` texts at once.

    `prefill` is the run over the prompt (size: prompt), which gives the first new token; `decode` is one further token
    with so many tokens in the cache before it (size: cache), of which there are `new` - 1. `total` is the whole, and
    `whole` that as a polynomial in prompt and new, None where a part is none. Tokens with less than `counted_up_to` in
    the cache were each counted, the others added up by the polynomial.
    """

    metric: str
    batch: int
    prompt: int
    new: int
    prefill: CostExpression
    decode: CostExpression
    whole: Polynomial | None
    total: int
    counted_up_to: int

    @property
    def symbols(self) -> dict[str, str]:
        """The letters that are written for the sizes of the whole."""
        return choose_symbols(("prompt", "new"))


def choose_symbols(names: Sequence[str]) -> dict[str, str]:
    """Return name → the letter that the field writes for such a size, or the name itself where none is free.

    >>> choose_symbols(("batch", "seq", "width")), choose_symbols(("height", "width")), choose_symbols(("n_groups",))
    ({'batch': 'B', 'seq': 'S', 'width': 'd'}, {'height': 'H', 'width': 'W'}, {'n_groups': 'n_groups'})
    """
    letters = {**_LETTERS, **({"width": "W"} if "height" in names else {})}
    chosen: dict[str, str] = {}
    for name in names:
        taken = {*chosen.values(), *names}
        chosen[name] = next((letter for letter in letters.get(name, "") if letter not in taken), name)
    return chosen


def format_sizes(names: Sequence[str], sizes: Sequence[int]) -> str:
    """Return sizes with their names, in one line.

    >>> format_sizes(("batch", "seq"), (2, 128))
    'batch=2, seq=128'
    """
    return ", ".join(f"{name}={size}" for name, size in zip(names, sizes, strict=True))
