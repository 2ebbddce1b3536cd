"""Check the examples of a table: run each call on the meta device, count it, and compare with the stated cost."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from fvflops import paths
from fvflops.capture.recorder.tensor_specs import describe, describe_call
from fvflops.capture.recorder.value_reader import find_value_arguments
from fvflops.formulas import Call, FormulaTable, Row, TableError
from fvflops.formulas.functions.classes import subclasses
from fvflops.formulas.language.example import Argument, Example, ExampleError
from fvflops.formulas.loading import PARTS
from fvflops.formulas.rows import cost_of_call
from fvflops.formulas.schema import KNOWN_NAMESPACES
from fvflops.formulas.table import FUNCTION_PREFIX
from fvflops.text import suggest
from fvflops.torch_internals import all_op_names
from fvflops.trace import Signature, Status, TensorSpec, Value
from fvflops.trace.calls import packet_of


class WrongExample(ValueError):
    """An example whose cost differs from the stated one; the message starts with FILE:LINE."""


class NotRunnable(WrongExample):
    """An example that this torch cannot run."""


def check_examples(table: FormulaTable, rows: Iterable[Row] | None = None) -> Iterator[tuple[Row, ValueError | None]]:
    """Yield each of some rows, by default in the table's own file, that has an example, with its error or None."""
    for row in own_rows(table) if rows is None else rows:
        problem: ValueError | None = None
        if row.example:
            try:
                check_example(row, table)
            except (WrongExample, TableError) as error:
                problem = error
            yield row, problem


def own_rows(table: FormulaTable) -> list[Row]:
    """Return the counted rows of ops in a table's own file, with the parts of the default table, not in others."""
    shipped = (table.name, *PARTS) if table.name == "default" else (table.name,)
    files = (table.name, *(f"{paths.SCHEME}{name}.yaml" for name in shipped))
    return [row for row in table.rows.values() if row.kind == "counted" and row.file in files]


def check_example(row: Row, table: FormulaTable) -> None:
    """Raise WrongExample if the example of a table's row cannot be run, or its cost differs from the stated one."""
    total = cost_example(row, table)
    if total != Example.parse(row.example).total:
        raise WrongExample(f"{row.file}:{row.line}: {row.name}: the example {row.example!r} costs {total}")


def cost_example(row: Row, table: FormulaTable) -> int:
    call = _call_of_row(row)
    _check_values(row, call)
    cost = cost_of_call(row, replace(call, constants=table.constants), table.multiply_add)
    if row.values and cost.status is Status.UNSUPPORTED:
        raise WrongExample(f"{row.file}:{row.line}: {row.name}: the example {row.example!r} lacks values after a colon")
    return cost.value


def _check_values(row: Row, call: Call) -> None:
    """Raise WrongExample for values that a recording does not keep."""
    kept = {item.name for item in find_value_arguments(row.name, tuple(call.arguments), row.values)}
    for name, value in call.arguments.items():
        if not isinstance(value, TensorSpec) or value.values is None:
            continue
        if name not in kept or value.is_floating_point:
            remedy = "make them integers" if name in kept else f"add it to the row's values, as values: [{name}]"
            raise WrongExample(
                f"{row.file}:{row.line}: {row.name}: the example {row.example!r} has values of {name}, which a "
                f"recording does not keep: {remedy}"
            )


def _call_of_row(row: Row) -> Call:
    try:
        if not row.name.startswith(FUNCTION_PREFIX):
            return Call.of(sign_example(row.name, row.example))
        _check_function(row.name.removeprefix(FUNCTION_PREFIX))
        example = Example.parse(row.example)
        if example.outputs is None:
            raise NotRunnable(
                f"the example {row.example!r} of {row.name} lacks the shapes of its results, since an "
                "autograd.Function is not run: write them after ->, such as '2 3 -> 2 3 = 6'"
            )
        tensors = [_build(value) for value in example.tensors]
        inputs = tuple(map(_add_values, map(describe, tensors), tensors))
        return Call.of_region(row.name, inputs, tuple(describe(_build(value)) for value in example.outputs or ()))
    except (NotRunnable, ExampleError) as problem:
        raise NotRunnable(f"{row.file}:{row.line}: {problem}") from None


def _check_function(name: str) -> None:
    """Raise NotRunnable for torch's name of the backward of a function that is defined."""
    defined = {cls.__name__ for cls in subclasses(torch.autograd.Function)}
    forward = name.removesuffix("Backward")
    if name not in defined and forward in defined:
        raise NotRunnable(
            f"no autograd.Function is called {name}, so this row is not used: the backward of {forward} is counted op "
            f"by op; work in it that PyTorch does not dispatch is unseen::{forward}.backward"
        )


def sign_example(op: str, text: str) -> Signature:
    """Return the signature of an example's call, by running the op unless the results are given."""
    example = Example.parse(text)
    outputs = None if example.outputs is None else tuple(_build(value) for value in example.outputs)
    if op.startswith("higher_order::"):
        inputs = tuple(describe(_build(value)) for value in example.tensors)
        return Signature(op, (), inputs, tuple(describe(output) for output in outputs or ()))
    problems = []
    for overload in overloads_of(op):
        values = bind_example(overload._schema, example)
        if values is None:
            problems.append(f"its arguments do not match {overload._schema}")
            continue
        try:
            results = overload(**values) if outputs is None else outputs
            args = () if outputs is None else [values.get(item.name) for item in overload._schema.arguments]
            signature = describe_call(overload, args, values if outputs is None else {}, results)
            return replace(
                signature, inputs=tuple(map(_add_values, signature.inputs, map(values.get, signature.names)))
            )
        except RuntimeError as error:
            problems.append(f"{overload} raised {' '.join(str(error).split())[:200]}")
    raise NotRunnable(f"the example {text!r} of {op} runs on no overload: {'; '.join(problems)}")


def overloads_of(op: str) -> list[Any]:
    """Return the overloads that a row's name matches; out= overloads only if it names one."""
    namespace, _, name = packet_of(op).partition("::")
    packet = getattr(getattr(torch.ops, namespace), name, None)
    if packet is None:
        if namespace in KNOWN_NAMESPACES:
            raise NotRunnable(f"this torch has no {op}")
        near = suggest(op, {name for name in all_op_names() if name.startswith(f"{namespace}::")})
        hint = near or ": import the module that registers it (fvflops ops --import MODULE)"
        raise NotRunnable(f"no op {op} is registered{hint}")
    overloads = [getattr(packet, name) for name in packet.overloads()]
    matching = [overload for overload in overloads if op in (packet_of(overload.name()), overload.name())]
    return [overload for overload in matching if op.endswith("out") or not overload.name().endswith("out")]


def bind_example(schema: Any, example: Example) -> dict[str, Any] | None:
    """Return argument name → value for one overload, or None if the example does not match its arguments."""
    kinds = ("Tensor", "Optional[Tensor]", "List[Tensor]")
    names = {argument.name for argument in schema.arguments}
    tensors = [argument.name for argument in schema.arguments if str(argument.type) in kinds]
    unbound = [name for name in tensors if name not in example.named]
    if not example.named.keys() <= names or len(example.tensors) > len(unbound):
        return None
    values = {name: _build(tensor) for name, tensor in zip(unbound, example.tensors, strict=False)}
    return values | {name: _build(value) for name, value in example.named.items()}


def _add_values(spec: Value, argument: Any) -> Value:
    """Return the spec of an argument with its values, which only a list has."""
    if isinstance(spec, TensorSpec) and isinstance(argument, torch.Tensor) and argument.device.type != "meta":
        return replace(spec, values=tuple(map(int, argument.flatten())))
    return spec


def _build(value: Argument) -> Any:
    """Return the Python value or tensor that an example describes, on the meta device unless it has values."""
    if isinstance(value, TensorSpec):
        dtype = getattr(torch, value.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise NotRunnable(f"this torch has no dtype {value.dtype!r}")
        if value.values is not None:
            return torch.tensor(value.values, dtype=dtype).reshape(value.shape)
        with warnings.catch_warnings():  # torch deprecates tensors of quantised dtypes, and tables have rows for them
            warnings.filterwarnings("ignore", message="torch.quantize_per_tensor")
            return torch.empty(value.shape, dtype=dtype, device="meta")
    return [_build(item) for item in value] if isinstance(value, tuple) else value
