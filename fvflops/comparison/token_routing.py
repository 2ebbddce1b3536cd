"""Rows that a run selected by value, the tokens they came from, and the MACs of a weight with them."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

from fvflops.trace import TensorSpec, Value, tensors_in

ALL = Fraction(1)


@dataclass(eq=False, slots=True)
class ModuleCall:
    """One call of a module: the stack of regions under which its ops ran, the index of its first event, its inputs."""

    path: tuple[int, ...]
    start: int = -1
    inputs: tuple[Value, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenSelection:
    """Rows that were selected from a storage by value.

    `source` is the storage and `spec` the tensor that was read, `call` the call of the module that selected, and
    `caller` the enclosing call, at whose end the selection expires. `of_weights` means that experts' weights were
    selected instead of tokens.

    >>> call = ModuleCall((0,), inputs=(TensorSpec((2, 15, 8)),))
    >>> TokenSelection(3, TensorSpec((60, 8)), call, call, of_weights=False).tokens()  # each token is in it twice
    30
    """

    source: int
    spec: TensorSpec
    call: ModuleCall
    caller: ModuleCall
    of_weights: bool

    @property
    def width(self) -> int:
        """The number of elements of a row."""
        return self.spec.shape[-1] if self.spec.shape else 1

    def tokens(self) -> int:
        """Return how many rows enter the selecting call, before any is duplicated."""
        specs = floats_in(self.call.inputs)
        for spec in specs:
            if spec.shape[-1] == self.width:
                return rows_of(spec)
            if spec.ndim > 3 and spec.shape[1] == self.width:  # an image, channels first
                return spec.numel // self.width if spec.numel else 0
        input_rows = max(map(rows_of, specs), default=0)
        source_rows = rows_of(self.spec)
        # The source can contain each input row several times; otherwise it was computed from something else.
        return input_rows if self.of_weights or (input_rows and source_rows % input_rows == 0) else source_rows


@dataclass(slots=True)
class ExpertStack:
    """The use of a weight that stacks several experts: its MACs, and the selection of each call."""

    macs: Fraction = field(default_factory=Fraction)
    selections: dict[ModuleCall, TokenSelection | None] = field(default_factory=dict)

    def share(self, elements: int) -> Fraction:
        """Return the share of its elements that is active for an average token."""
        tokens = 0
        for call, selection in self.selections.items():
            tokens += next(map(rows_of, floats_in(call.inputs)), 0) if selection is None else selection.tokens()
        return min(ALL, self.macs / (elements * tokens)) if elements and tokens else ALL


def floats_in(values: tuple[Value, ...]) -> list[TensorSpec]:
    """Return the floating-point and complex tensors among some values, without 0-d tensors."""
    return [spec for spec in tensors_in(values) if is_float(spec) and spec.shape]


def is_float(spec: TensorSpec) -> bool:
    """Return whether a tensor is floating-point or complex."""
    return spec.is_floating_point or spec.is_complex


def is_batch(spec: TensorSpec) -> bool:
    """Return whether a tensor is a batch of several matrices."""
    return spec.ndim > 2 and spec.shape[0] > 1


def rows_of(spec: TensorSpec) -> int:
    """Return how many rows a tensor has along its last axis.

    >>> rows_of(TensorSpec((2, 15, 8)))
    30
    """
    return spec.numel // spec.shape[-1] if spec.numel and spec.shape else 0
