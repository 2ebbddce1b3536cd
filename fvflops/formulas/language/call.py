"""Argument of a formula: one op or region call as plain data."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from fvflops.text import shown_by_fields
from fvflops.trace import Signature, TensorSpec, Value, tensors_in

_EMPTY: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True, repr=False)
@shown_by_fields
class Call:
    """One call, as passed to a formula (`return Cost(macs=call.out.numel)`) or a handle (`return call.out.numel`).

    `op` is the full name (`aten::addmm`). `arguments` maps every argument name of the op's schema to its value,
    defaults filled in: a tensor is a `TensorSpec` (`.shape`, `.numel`, `.ndim`, `.dtype`), a list is a tuple, an absent
    one is None. `outputs` has one value for each result, and `schema` is the text of the op's schema. A module or an
    `autograd.Function` has its input tensors as arguments `input`, `input_1`, `input_2` ... `attributes` are a module's
    public numbers, strings and parameters by name, empty for everything else; `constants` are the table's, such as the
    cost of an exponential.

    >>> spec = TensorSpec((2, 3))
    >>> call = Call("aten::relu", {"self": spec}, (spec,), "aten::relu(Tensor self) -> Tensor")
    >>> call.shape("self"), call.out.numel, call.operands
    ((2, 3), 6, ('self',))
    """

    op: str
    arguments: Mapping[str, Value]
    outputs: tuple[Value, ...]
    schema: str = ""
    attributes: Mapping[str, Value] = field(default_factory=lambda: _EMPTY)
    constants: Mapping[str, int] = field(default_factory=lambda: _EMPTY)

    @staticmethod
    def of(signature: Signature, constants: Mapping[str, int] = _EMPTY) -> Call:
        """Return the call that a signature describes; an op without a schema has `argument_0`, `argument_1` ..."""
        arguments, schema = dict(zip(signature.names, signature.inputs, strict=False)), signature.schema
        if signature.inputs and not signature.names:
            arguments, schema = _name_by_index(signature.op, "argument_{}", signature.inputs)
        return Call(signature.op, arguments, signature.outputs, schema, constants=constants)

    @staticmethod
    def of_region(
        name: str,
        inputs: Sequence[Value],
        outputs: Sequence[Value],
        attributes: Mapping[str, Value] = _EMPTY,
        constants: Mapping[str, int] = _EMPTY,
    ) -> Call:
        """Return the call of a module or an `autograd.Function`."""
        arguments, schema = _name_by_index(name, "input_{}", inputs)
        arguments = {"input" if key == "input_0" else key: value for key, value in arguments.items()}
        return Call(name, arguments, tuple(outputs), schema.replace("input_0", "input", 1), attributes, constants)

    @property
    def out(self) -> TensorSpec:
        """The first tensor among the results; a call without one raises ValueError."""
        for spec in tensors_in(self.outputs):
            return spec
        raise ValueError(f"{self.op} returned no tensor, so it has no `out`")

    @property
    def operands(self) -> tuple[str, ...]:
        """Names of the arguments of type Tensor or Tensor? in schema order, passed or not; without lists."""
        return operands_of(self.schema)

    def tensor(self, name: str) -> TensorSpec:
        """Return a tensor argument; an unknown name, or a value that is not a tensor, raises ValueError."""
        if name not in self.arguments:
            raise ValueError(f"{self.op} has no argument {name!r}: it has {', '.join(self.arguments) or 'none'}")
        value = self.arguments[name]
        if not isinstance(value, TensorSpec):
            raise ValueError(f"the argument {name!r} of {self.op} is {value!r}, not a tensor")
        return value

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor argument; errors are as for `tensor`."""
        return self.tensor(name).shape

    def integer(self, name: str) -> int:
        """Return an integer argument.

        >>> Call("aten::softmax.int", {"dim": 1}, ()).integer("dim")
        1
        """
        return int(self.arguments[name])  # type: ignore[arg-type]


@lru_cache(maxsize=4096)
def operands_of(schema: str) -> tuple[str, ...]:
    """Return the names of the arguments of type Tensor or Tensor? in the text of a schema.

    >>> operands_of("aten::lstm.input(Tensor input, Tensor[] hx, bool train, Tensor? mask=None) -> (Tensor, Tensor)")
    ('input', 'mask')
    """
    arguments = schema.partition("(")[2].rpartition(") -> ")[0]
    return tuple(re.findall(r"\bTensor(?:\([^)]*\))?\?? (\w+)", arguments))


def _name_by_index(op: str, template: str, inputs: Sequence[Value]) -> tuple[dict[str, Value], str]:
    arguments = {template.format(index): value for index, value in enumerate(inputs)}
    parts = [("Tensor " if isinstance(value, TensorSpec) else "Value ") + name for name, value in arguments.items()]
    return arguments, f"{op}({', '.join(parts)}) -> (...)"
