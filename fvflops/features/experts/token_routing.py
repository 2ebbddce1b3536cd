"""The picks: rows that a run took by a choice, how many tokens they were taken from, and what they did to a weight."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

from fvflops.trace import TensorSpec, Value, tensors_in

ALL = Fraction(1)


@dataclass(eq=False, slots=True)
class ModuleCall:
    """One call of a module: the stack under which its ops ran, when it began, what went in."""

    path: tuple[int, ...]
    began: int = -1
    inputs: tuple[Value, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenSelection:
    """Rows that were picked of a storage.

    `source` is the storage and `spec` the tensor that it was seen as, `call` the call of the module that picked, and
    `around` the call around that one, after which nothing is done with the rows any more. `of_weights` says that it
    was experts' weights that were picked, not tokens.

    >>> call = ModuleCall((0,), inputs=(TensorSpec((2, 15, 8)),))
    >>> TokenSelection(3, TensorSpec((60, 8)), call, call, of_weights=False).tokens()  # each token stands there twice
    30
    """

    source: int
    spec: TensorSpec
    call: ModuleCall
    around: ModuleCall
    of_weights: bool

    @property
    def width(self) -> int:
        """The elements of a row."""
        return self.spec.shape[-1] if self.spec.shape else 1

    def tokens(self) -> int:
        """Return how many rows enter the call that picks, before any is picked twice."""
        specs = floats_in(self.call.inputs)
        for spec in specs:
            if spec.shape[-1] == self.width:
                return rows_of(spec)
            if spec.ndim > 3 and spec.shape[1] == self.width:  # an image, channels first
                return spec.numel // self.width if spec.numel else 0
        entering = max(map(rows_of, specs), default=0)
        rows = rows_of(self.spec)
        # What is picked of can hold each row several times; else it was made inside, of something else.
        return entering if self.of_weights or (entering and rows % entering == 0) else rows


@dataclass(slots=True)
class ExpertStack:
    """What a weight that is a stack of experts did: its multiply-adds, and the tokens of each call that picked."""

    macs: Fraction = field(default_factory=Fraction)
    picks: dict[ModuleCall, TokenSelection | None] = field(default_factory=dict)

    def share(self, elements: int) -> Fraction:
        """Return the part of its elements that works on a token."""
        tokens = 0
        for call, pick in self.picks.items():
            tokens += next(map(rows_of, floats_in(call.inputs)), 0) if pick is None else pick.tokens()
        return min(ALL, self.macs / (elements * tokens)) if elements and tokens else ALL


def floats_in(values: tuple[Value, ...]) -> list[TensorSpec]:
    """Return the tensors of floating point among some values, scalars left out."""
    return [spec for spec in tensors_in(values) if is_float(spec) and spec.shape]


def is_float(spec: TensorSpec) -> bool:
    """Return whether the elements of a tensor are numbers to compute with."""
    return spec.is_floating_point or spec.is_complex


def is_batch(spec: TensorSpec) -> bool:
    """Return whether a tensor holds several matrices."""
    return spec.ndim > 2 and spec.shape[0] > 1


def rows_of(spec: TensorSpec) -> int:
    """Return how many rows a tensor has along its last axis.

    >>> rows_of(TensorSpec((2, 15, 8)))
    30
    """
    return spec.numel // spec.shape[-1] if spec.numel and spec.shape else 0
