"""The memo of shape execution: what each op gave for each way in which it was called, for the life of the process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fvflops.capture.metadata import Metadata, forget_metadata, interned
from fvflops.capture.signature import OpSchema, describe_op
from fvflops.trace import Signature, StopsAt

# Past this many outcomes or metadata everything is forgotten: a process that meets new shapes for ever stays small.
_LIMIT = 1 << 16


class Output(NamedTuple):
    """One result of an op: a new tensor, a view of the argument tensor `source`, or (`same`) that argument itself.

    `metadata` is None for a result that is no tensor, whose value is then `value`. `row` is the storage of a new tensor,
    which may be larger than the tensor: some kernels shrink what they allocated.
    """

    metadata: Metadata | None
    source: int | None = None
    same: bool = False
    value: Any = None
    row: tuple[int, str, str] | None = None


class Outcome:
    """What one way of calling an op gives: its signature and how its results are made.

    `build` is None where the op has one result, else what makes its results from a list of them. `grown` are argument
    tensors whose metadata the op changes. `concrete` says that the op runs for real, because all that goes in is known
    and small; its signature is then None where its result's shape depends on values. `fresh` is the metadata of the
    result where that is one new tensor, `row` that of its storage; where it is one of the arguments or a view of it, `source` is that argument and
    `view` the metadata of the view. They are None where more happens than that. An outcome that depends on values
    otherwise is not `remembered`.
    """

    __slots__ = (
        "build",
        "concrete",
        "fresh",
        "grown",
        "outputs",
        "remembered",
        "row",
        "signature",
        "source",
        "view",
        "written",
    )

    def __init__(
        self,
        signature: Signature | None,
        outputs: tuple[Output, ...] = (),
        build: Callable[[list[Any]], Any] | None = None,
        grown: tuple[tuple[int, Metadata], ...] = (),
        written: tuple[int, ...] = (),
        concrete: bool = False,
    ) -> None:
        self.signature = signature
        self.outputs = outputs
        self.build = build
        self.grown = grown
        self.written = written
        self.concrete = concrete
        self.remembered = True
        self._find_shortcuts()

    def run_for_real(self) -> None:
        """Let the op be computed, instead of its results being made."""
        self.concrete = True
        self._find_shortcuts()

    def _find_shortcuts(self) -> None:
        build, outputs, grown, written, concrete = self.build, self.outputs, self.grown, self.written, self.concrete
        simple = build is None and len(outputs) == 1 and not grown and not concrete
        only = outputs[0] if simple else None
        self.fresh = only.metadata if only is not None and only.source is None and not written else None
        self.row = None if only is None else only.row
        self.source = only.source if only is not None and written in ((), (only.source,)) else None
        self.view = None if only is None or only.same else only.metadata


class KnownOp:
    """What is known of one op: its schema, the outcomes met so far, and what kind of op it is.

    It can make a tensor from none (`factory`), name a process group (`grouped`), be `random`, write to its arguments,
    or take lists of which one item is an int and another is not (`mixes`).

    `expansions` are outcomes too, for each set of stops, of a composite op that comes down to one call of another op on
    the same tensors.
    """

    __slots__ = ("expansions", "factory", "grouped", "mixes", "outcomes", "random", "schema", "writes")

    def __init__(self, func: Any) -> None:
        self.schema: OpSchema = describe_op(func)
        self.random = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        self.outcomes: dict[tuple[Any, ...], Outcome] = {}
        self.expansions: dict[StopsAt, dict[tuple[Any, ...], Outcome]] = {}
        self.factory = "device" in self.schema.position
        self.grouped = self.schema.group is not None
        self.writes = bool(self.schema.written)
        arguments = getattr(getattr(func, "_schema", None), "arguments", None)
        self.mixes = arguments is None or any("List[number]" in str(argument.type) for argument in arguments)


_OPS: dict[Any, KnownOp] = {}
_SIGNATURES: dict[Signature, Signature] = {}


def known_op(func: Any) -> KnownOp:
    """Return what is known of an op."""
    op = _OPS.get(func)
    if op is None:
        op = _OPS[func] = KnownOp(func)
    return op


def intern_signature(signature: Signature) -> Signature:
    """Return the one object that stands for a signature."""
    return _SIGNATURES.setdefault(signature, signature)


def outcomes() -> int:
    """Return how many outcomes are remembered."""
    return sum(len(op.outcomes) for op in _OPS.values())


def clear_memo() -> None:
    """Forget every outcome, so that the next run is as in a new process; not to be called during a run."""
    _OPS.clear()
    _SIGNATURES.clear()
    forget_metadata()


def trim_memo() -> None:
    """Forget everything if it has grown past the limit."""
    if interned() > _LIMIT or outcomes() > _LIMIT:
        clear_memo()
