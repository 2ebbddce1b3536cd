"""Formula tables: the cost of every call by one convention, read from YAML, which is never executed.

    description: one line
    extends: default            # a shipped table, a path relative to this file, or a URI; entries here take precedence
    multiply_add: 1             # FLOPs of one multiply-add
    opaque: false               # true: composite ops and functions are counted as a whole, not by the ops inside
    constants: {exp: 8}         # names for expressions; entries here take precedence
    floating_point_only: false  # true: integer arithmetic is zero-FLOP, except matrix products
    ignore_inherited: false     # true: ops that the extended table counts are ignored here
    registered_formulas: true   # use formulas registered with torch.utils.flop_counter for ops without a row, see below
    zero_flop: [aten::view]     # short for `aten::view: zero_flop`
    ignored: [aten::add]
    families:                   # rows for several ops
      - {flops: numel(out)*exp, ops: [aten::exp, aten::exp2], example: "2 3 = 48"}
    ops:
      aten::mm: {shapes: "m k, k n", macs: m*k*n, activations: numel(out), example: "4 5, 5 6 = 120"}
      aten::convolution: {use: convolution, label: conv, source: "..."}
      aten::conv2d: decompose   # count the ops inside; zero_flop and ignored are written in the same form
      prim::PythonOp.Swish: {flops: 4*numel(out)}
    modules:                    # counted instead of the ops inside; with `covers: false` in addition to them
      torch.nn.LSTM: {macs: "numel(input) * hidden_size"}

Names in an expression are the op's arguments, the names bound by `shapes`, `out` (the first result) and `outputs`. A
function and a module have `input`, `input_1` ... instead of arguments, a module also its public numbers, strings and
parameters by name. See `fvflops.formulas.language.expression`, `pattern` and `example`.

An op without a row is unsupported, unless the program registered a formula with torch's `register_flop_formula` and the
table has `registered_formulas`. That is the default, except for tables with `opaque` or `ignore_inherited`: these
reproduce tools that do not use registered formulas.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fvflops.formulas.cost import OpCost
from fvflops.formulas.functions.attention import SKIPS, skip_masked
from fvflops.formulas.language.call import Call
from fvflops.formulas.rows import Row, cost_of_call, default_label
from fvflops.formulas.schema import KNOWN_NAMESPACES
from fvflops.formulas.torch_registry import count_registered
from fvflops.formulas.yaml_document import TableError
from fvflops.text import short_repr
from fvflops.trace import ModuleInfo, RegionSignature, Signature, Status, StopsAt, TensorSpec, Value, tensors_in
from fvflops.trace.calls import packet_of
from fvflops.trace.notebook_table import write_text_table
from fvflops.units import format_quantity

# Kind of a row → its name in text.
_KINDS = {
    "counted": "counted",
    "zero_flop": "zero-FLOP",
    "ignored": "ignored",
    "decompose": "counted by the ops inside",
}
FUNCTION_PREFIX = "prim::PythonOp."


@dataclass(frozen=True, slots=True, repr=False)
class FormulaTable:
    """A convention: rows of ops, functions and module classes.

    `name` is a shipped table's, or the path; `multiply_add` the FLOPs of one multiply-add. With `opaque`,
    composite ops and functions are counted as a whole; with `floating_point_only`, integer arithmetic is zero-FLOP,
    except matrix products; with `registered_formulas`, formulas registered with torch's flop counter apply to ops
    without a row. `constants` are names for expressions and formulas; `stops_at` are the composite ops and regions that
    a recording must not decompose for this table. `cost_caches` contains costs by metric.

    >>> from fvflops.formulas import load_table
    >>> table = load_table("default")
    >>> table.row("aten::relu_").kind, table.row("mylib::scan")
    ('zero_flop', None)
    """

    name: str
    description: str = ""
    multiply_add: int = 1
    opaque: bool = False
    rows: Mapping[str, Row] = field(default_factory=dict)
    modules: Mapping[str, Row] = field(default_factory=dict)
    constants: Mapping[str, int] = field(default_factory=dict)
    floating_point_only: bool = False
    registered_formulas: bool = True
    stops_at: StopsAt = field(init=False)
    cost_caches: dict[Any, Any] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stops_at", _stops(self.rows, self.opaque))

    def __repr__(self) -> str:
        return short_repr(
            self, self.name, f"{len(self.rows):,} ops", format_quantity(self.multiply_add, "FLOP") + " per MAC"
        )

    def __str__(self) -> str:
        """Return the description, and the numbers of ops that are counted, zero-FLOP, ignored and decomposed."""
        kinds = Counter(row.kind for row in self.rows.values())
        listed = [
            ("FLOPs per multiply-add", self.multiply_add),
            *((f"ops {text}", kinds[kind]) for kind, text in _KINDS.items() if kinds[kind]),
            ("module classes", len(self.modules)),
        ]
        rows = [[text, f"{count:,}"] for text, count in listed]
        return write_text_table(f"{self.name}: {self.description}".rstrip(": "), ["convention", ""], rows)

    def row(self, op: str) -> Row | None:
        """Return the row of an overload, else of the op; for an in-place form, else of the out-of-place op.

        An overload `reduce_out` uses the row of the overload `reduce` before the op's.
        """
        for name in _names_of(op):
            if name in self.rows:
                return self.rows[name]
        return None

    def module_row(self, classes: Iterable[str]) -> Row | None:
        """Return the row of the first of the qualified class names that has one."""
        name = find_class(self.modules, classes)
        return None if name is None else self.modules[name]

    def price(self, signature: Signature) -> OpCost:
        """Return the cost of an op call, UNSUPPORTED without a row; a row that does not match raises TableError."""
        row = self.row(signature.op)
        if row is None:
            return self._cost_without_row(signature)
        if self.floating_point_only and row.macs is None and row.use is None and not _has_floats(signature):
            return OpCost(row.label, Status.ZERO_FLOP)
        try:
            cost = self._cost_of_parts(row, signature) or cost_of_call(
                row, Call.of(signature, self.constants), self.multiply_add
            )
            return skip_masked(cost, signature, self.multiply_add) if self.constants.get(SKIPS) else cost
        except TableError:
            # Another library of that namespace, or another release of it, with a different schema.
            if row.is_shipped and signature.op.partition("::")[0] not in KNOWN_NAMESPACES:
                return OpCost(row.label, Status.UNSUPPORTED)
            raise

    def _cost_of_parts(self, row: Row, signature: Signature) -> OpCost | None:
        """Return the cost of a call on nested tensors: the sum over their parts, without padding.

        None where no argument is nested, their numbers of parts differ, or the row does not match the parts.
        """
        nested = [spec for spec in tensors_in(signature.inputs) if spec.layout == "nested"]
        parts = nested[0].shape[0] if nested else 0
        if row.kind != "counted" or any(len(spec.parts()) != parts for spec in nested) or not parts:
            return None
        try:
            costs = [
                cost_of_call(row, Call.of(part, self.constants), self.multiply_add)
                for part in (_part_of(signature, index) for index in range(parts))
            ]
        except TableError:
            return None
        activations = [cost.activations for cost in costs if cost.activations is not None]
        return OpCost.in_flops(
            row.label,
            row.status,
            self.multiply_add,
            sum(cost.macs for cost in costs),
            sum(cost.flops for cost in costs),
            sum(activations) if activations else None,
            sum(cost.recomputed for cost in costs),
        )

    def _cost_without_row(self, signature: Signature) -> OpCost:
        label = default_label(signature.op)
        cost = count_registered(signature) if self.registered_formulas else None
        if cost is None:
            return OpCost(label, Status.UNSUPPORTED)
        return OpCost.in_flops(label, Status.COUNTED, self.multiply_add, cost.macs, cost.flops)

    def price_function(self, name: str, signature: RegionSignature) -> OpCost | None:
        """Return the cost of a call of an `autograd.Function` by class name, or None to count the ops in it.

        A function without a row is counted by its ops, or UNSUPPORTED if the table is opaque; so is one that a shipped
        row does not match, since another class may have the same name. A user's row that does not match raises
        TableError.
        """
        op = FUNCTION_PREFIX + name.removeprefix(FUNCTION_PREFIX)
        without_row = OpCost(default_label(op), Status.UNSUPPORTED) if self.opaque else None
        row = self.rows.get(op)
        if row is None or row.kind == "decompose":
            return without_row if row is None else None
        try:
            call = Call.of_region(op, signature.inputs, signature.outputs, constants=self.constants)
            return cost_of_call(row, call, self.multiply_add)
        except TableError:
            if row.is_shipped:
                return without_row
            raise

    def price_module(self, row: Row, module: ModuleInfo, signature: RegionSignature) -> OpCost:
        """Return the cost of a module call by a row that `module_row` returned; errors as in `price`."""
        attributes = attributes_of(module)
        call = Call.of_region(row.name, signature.inputs, signature.outputs, attributes, self.constants)
        return cost_of_call(row, call, self.multiply_add)


def find_class(names: Collection[str], classes: Iterable[str]) -> str | None:
    """Return the name in `names` that matches the first of the qualified class names, None without a match.

    A name may omit inner packages: `torch.nn.LSTM` is the class `torch.nn.modules.rnn.LSTM`.
    """
    for qualified in classes if names else ():
        if qualified in names:
            return qualified
        matching = [name for name in names if is_short_for(name, qualified)]
        if matching:
            return max(matching, key=len)
    return None


def attributes_of(module: ModuleInfo) -> dict[str, Value]:
    """Return a module's public numbers and strings, parameters and buffers by name, for formulas."""
    tensors = {item.name.rpartition(".")[2]: item.spec for item in (*module.parameters, *module.buffers)}
    return {**module.attributes, **tensors}


def _has_floats(signature: Signature) -> bool:
    specs = tensors_in((*signature.inputs, *signature.outputs))
    return any(spec.is_floating_point or spec.is_complex for spec in specs)


def _part_of(signature: Signature, index: int) -> Signature:
    """Return the call on the part at `index` of each nested tensor among the arguments and results."""

    def part(value: Value) -> Value:
        if isinstance(value, tuple):
            return tuple(part(item) for item in value)
        return value.parts()[index] if isinstance(value, TensorSpec) and value.parts() else value

    inputs, outputs = (tuple(part(value) for value in values) for values in (signature.inputs, signature.outputs))
    return replace(signature, inputs=inputs, outputs=outputs)


def _names_of(op: str) -> Iterable[str]:
    yield op
    packet = packet_of(op)
    if op.endswith("_out"):  # an out= variant costs the same
        yield op[: -len("_out")]
    yield packet
    if packet.endswith("_") and not packet.endswith("__"):
        yield packet[:-1] + op[len(packet) :]
        yield packet[:-1]


def _stops(rows: Mapping[str, Row], opaque: bool) -> StopsAt:
    values = {name: row.values for name, row in rows.items() if row.values}
    if opaque:
        return StopsAt(frozenset(name for name, row in rows.items() if row.kind == "decompose"), True, values)
    names = {name for name, row in rows.items() if row.kind != "decompose"}
    # Looking up `aten::relu_` falls back to `aten::relu`, so a recording must decompose neither.
    in_place = {_in_place(name) for name in names} - rows.keys()
    return StopsAt(frozenset(names | in_place), values=values)


def _in_place(name: str) -> str:
    """Return the name of an op's in-place form; an in-place op is returned unchanged."""
    packet, dot, overload = name.partition(".")
    return name if packet[-1] == "_" else f"{packet}_{dot}{overload}"


def is_short_for(key: str, name: str) -> bool:
    """Return whether a class name in a table is a qualified name without its inner packages.

    >>> is_short_for("torch.nn.LSTM", "torch.nn.modules.rnn.LSTM")
    True
    """
    packages, _, last = key.rpartition(".")
    return name.rpartition(".")[2] == last and (not packages or name.startswith(packages + "."))
