"""The table: a convention, which puts a price on every call; read from YAML, which is data and runs nothing.

    description: one line
    extends: default            # a shipped table, a path relative to this file, or a URI; the nearer entry wins
    multiply_add: 1             # flops that one multiply-add counts for
    opaque: false               # true: composite ops and functions count where they are called, nobody looks inside
    free: [aten::view]          # short for `aten::view: free`
    omitted: [aten::add]
    ops:
      aten::mm: {shapes: "m k, k n", macs: m*k*n, activations: numel(out), example: "4 5, 5 6 = 120"}
      aten::convolution: {use: convolution, label: conv, source: "..."}
      aten::conv2d: decompose   # look inside; free and omitted are said the same way
      prim::PythonOp.Swish: {flops: 4*numel(out)}
    modules:
      torch.nn.LSTM: {macs: "numel(input) * hidden_size"}

Names in an expression are the op's arguments, what `shapes` binds, `out` (the first result) and `outputs`. A function
and a module have `input`, `input_1` ... instead of arguments, a module also its numbers, texts and parameters by name.
The parts are described in `fvflops.formulas.expression`, `pattern` and `example`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fvflops.formulas.call import Call
from fvflops.formulas.row import Price, Row, default_label, price_call
from fvflops.trace import ModuleInfo, RegionSignature, Signature, Status, StopsAt, Value
from fvflops.trace.signature import packet_of

FUNCTION_PREFIX = "prim::PythonOp."


@dataclass(frozen=True, slots=True)
class FormulaTable:
    """A convention: a row for each op, function and module class that it knows.

    `name` is that of a shipped table, or the path; `multiply_add` the flops that one multiply-add counts for; `opaque`
    says that composite ops and functions are counted where they are called; `stops_at` what a recorder must not look
    into for this table. In `memo` those that use a table keep what they made of it.

    >>> from fvflops.formulas import load_table
    >>> table = load_table("default")
    >>> table.row("aten::relu_").kind, table.row("mylib::scan")
    ('free', None)
    """

    name: str
    description: str = ""
    multiply_add: int = 1
    opaque: bool = False
    rows: Mapping[str, Row] = field(default_factory=dict)
    modules: Mapping[str, Row] = field(default_factory=dict)
    stops_at: StopsAt = field(init=False)
    memo: dict[Any, Any] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stops_at", _stops(self.rows, self.opaque))

    def row(self, op: str) -> Row | None:
        """Return the row of an op, else that of all its overloads, else that of the op it is the in-place form of.

        Before that of all overloads, an overload `reduce_out` has the row of the overload `reduce`.
        """
        for name in _names_of(op):
            if name in self.rows:
                return self.rows[name]
        return None

    def module_row(self, classes: Iterable[str]) -> Row | None:
        """Return the row of the first class that has one, by qualified names.

        A table may leave out inner packages: `torch.nn.LSTM` is the class `torch.nn.modules.rnn.LSTM`.
        """
        if not self.modules:
            return None
        for name in classes:
            if name in self.modules:
                return self.modules[name]
            near = [key for key in self.modules if is_short_for(key, name)]
            if near:
                return self.modules[max(near, key=len)]
        return None

    def price(self, signature: Signature) -> Price:
        """Return what a call costs; an op that has no row is UNKNOWN, and a row that does not fit raises TableError."""
        row = self.row(signature.op)
        if row is None:
            return Price(Status.UNKNOWN, default_label(signature.op))
        return price_call(row, Call.of(signature))

    def price_function(self, name: str, signature: RegionSignature) -> Price:
        """Return what a call of the `autograd.Function` of a class name costs, as `price` does."""
        op = FUNCTION_PREFIX + name.removeprefix(FUNCTION_PREFIX)
        row = self.rows.get(op)
        if row is None:
            return Price(Status.UNKNOWN, default_label(op))
        return price_call(row, Call.of_region(op, signature.inputs, signature.outputs))

    def price_module(self, row: Row, module: ModuleInfo, signature: RegionSignature) -> Price:
        """Return what a call of a module costs by a row that `module_row` returned, as `price` does."""
        attributes: dict[str, Value] = dict(module.attributes)
        for parameter in (*module.parameters, *module.buffers):
            attributes[parameter.name.rpartition(".")[2]] = parameter.spec
        return price_call(row, Call.of_region(row.name, signature.inputs, signature.outputs, attributes))


def _names_of(op: str) -> Iterable[str]:
    yield op
    packet = packet_of(op)
    if op.endswith("_out"):  # what writes its result to an argument costs the same
        yield op[: -len("_out")]
    yield packet
    if packet.endswith("_") and not packet.endswith("__"):
        yield packet[:-1] + op[len(packet) :]
        yield packet[:-1]


def _stops(rows: Mapping[str, Row], opaque: bool) -> StopsAt:
    if opaque:
        return StopsAt(frozenset(name for name, row in rows.items() if row.kind == "decompose"), everything=True)
    names = {name for name, row in rows.items() if row.kind != "decompose"}
    # Looking up `aten::relu_` falls back to `aten::relu`, so a recorder must stop at both.
    in_place = {_in_place(name) for name in names} - rows.keys()
    return StopsAt(frozenset(names | in_place))


def _in_place(name: str) -> str:
    """Return the name of an op's in-place form, or of an op that is one already the name itself."""
    packet, dot, overload = name.partition(".")
    return name if packet[-1] == "_" else f"{packet}_{dot}{overload}"


def is_short_for(key: str, name: str) -> bool:
    """Return whether a table's name of a class leaves out inner packages of a qualified one.

    >>> is_short_for("torch.nn.LSTM", "torch.nn.modules.rnn.LSTM")
    True
    """
    packages, _, last = key.rpartition(".")
    return name.rpartition(".")[2] == last and (not packages or name.startswith(packages + "."))
