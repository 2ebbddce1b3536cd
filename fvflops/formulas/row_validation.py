"""Check the rows of a user's table against torch's schemas when it is loaded."""

from __future__ import annotations

import re
from collections.abc import Mapping

from fvflops.formulas import registry
from fvflops.formulas.functions.classes import may_exist, suggest_class
from fvflops.formulas.language.example import Example, ExampleError
from fvflops.formulas.language.expression import Expression, ExpressionError
from fvflops.formulas.language.pattern import Pattern, PatternError
from fvflops.formulas.rows import Row
from fvflops.formulas.schema import KNOWN_NAMESPACES, Overload, overloads_of, suggest_namespace, suggest_op
from fvflops.formulas.table import FUNCTION_PREFIX
from fvflops.formulas.yaml_document import Node, TableError
from fvflops.text import suggest
from fvflops.trace.calls import packet_of

_OP = re.compile(r"[A-Za-z_]\w*::[A-Za-z_]\w*(\.\w+)?", re.ASCII)
_INPUT = re.compile(r"input(_[1-9]\d*)?", re.ASCII)
_FUNCTION = re.compile(r"prim::PythonOp\.[A-Za-z_]\w*")


def check_op(row: Row, node: Node, constants: Mapping[str, int]) -> None:
    """Raise TableError where a row of an op or function refers to unknown names, or cannot be evaluated."""
    if _FUNCTION.fullmatch(row.name):
        if row.kind == "decompose":
            raise node.error(f"{row.name}: a function without a row is decomposed anyway")
        _check_texts(row, node, (), constants)
        return
    if row.name.startswith(FUNCTION_PREFIX):
        raise node.error(f"{row.name!r} is not the name of a function: {_correct_function(row.name)}")
    if not _OP.fullmatch(row.name):
        near = suggest_op("aten::" + re.split(r"::|\.", row.name.removesuffix(".default"))[-1])
        raise node.error(f"{row.name!r} is not an op name: write namespace::name; did you mean {near}?")
    overloads = overloads_of(row.name)
    if not overloads and row.name.partition("::")[0] in KNOWN_NAMESPACES:
        raise node.error(f"torch has no op {row.name}: did you mean {suggest_op(row.name)}?")
    namespace = "" if overloads else suggest_namespace(row.name)
    if namespace:
        near = f"{namespace}::{row.name.partition('::')[2]}"
        near = suggest_op(near) if namespace in KNOWN_NAMESPACES else near
        hint = f"did you mean {near}? If a library defines it, import that first"
        raise node.error(f"torch has no op {row.name}, and no op in that namespace: {hint}")
    if row.kind == "decompose":
        _check_decompose(row, node, overloads)
    if row.kind == "counted" and not row.name.endswith("_") and "." not in row.name:
        overloads += overloads_of(packet_of(row.name) + "_")
    _check_texts(row, node, overloads, constants)


def _correct_function(name: str) -> str:
    *_, owner, last = name.split(".")
    if last == "backward":
        return f"work in the backward of {owner} that PyTorch does not dispatch is unseen::{owner}.backward"
    return f"write {FUNCTION_PREFIX}{last}, with the name of its class alone"


def check_module(row: Row, node: Node, constants: Mapping[str, int]) -> None:
    """Raise TableError where the class of a row does not exist, or the row cannot be evaluated."""
    if row.kind == "decompose":
        raise node.error(f"{row.name}: a module without a row is decomposed anyway")
    if not all(part.isidentifier() for part in row.name.split(".")):
        raise node.error(f"{row.name!r} is not a class name: write its dotted name, as in torch.nn.LSTM")
    if not may_exist(row.name):
        hint = f"did you mean {suggest_class(row.name)}? If it is your own class, define it first"
        raise node.error(f"no module class is named {row.name}: {hint}")
    _check_texts(row, node, (), constants)


def _check_decompose(row: Row, node: Node, overloads: tuple[Overload, ...]) -> None:
    if "." in row.name:
        raise node.error(f"{row.name}: decompose applies to an op with all its overloads, {packet_of(row.name)}")
    if overloads and not any(overload.composite for overload in overloads):
        raise node.error(f"{row.name} is not a composite op, torch cannot decompose it: {overloads[0].schema}")


def _check_texts(row: Row, node: Node, overloads: tuple[Overload, ...], constants: Mapping[str, int]) -> None:
    if row.kind != "counted":
        return
    fields = node.fields(row.name)
    if "values" in fields:
        _check_values(row, fields["values"], overloads)
    bound: frozenset[str] = frozenset()
    if row.shapes is not None:
        bound = _check_shapes(row, fields["shapes"], overloads)
    for key in ("macs", "flops", "activations"):
        text = getattr(row, key)
        if text is not None:
            _check_expression(row, key, text, fields[key], bound.union(constants), overloads)
    if row.use is not None:
        try:
            registry.find_formula(row.use)
        except KeyError as error:
            raise fields["use"].error(f"{row.name}: {error.args[0]}") from None
    if row.example:
        try:
            Example.parse(row.example)
        except ExampleError as error:
            raise fields["example"].error(f"{row.name}: {error}") from None


def _check_values(row: Row, node: Node, overloads: tuple[Overload, ...]) -> None:
    """Raise TableError for an argument that is not a tensor of the op; a function's are input, input_1 ..."""
    tensors = dict.fromkeys(name for overload in overloads for name in overload.operands)
    for item in node.items(f"values of {row.name}"):
        name = item.name(f"values of {row.name}")
        if overloads and name not in tensors:
            raise item.error(f"values of {row.name}: no tensor {name}{_near(name, tensors)}; {overloads[0].schema}")
        if row.name.startswith(FUNCTION_PREFIX) and not _INPUT.fullmatch(name):
            raise item.error(f"values of {row.name}: {name} is not a tensor: write input, input_1, input_2 ...")


def _check_shapes(row: Row, node: Node, overloads: tuple[Overload, ...]) -> frozenset[str]:
    try:
        pattern = Pattern.parse(row.shapes or "")
    except PatternError as error:
        raise node.error(f"{row.name}: {error}") from None
    for name in sorted(pattern.names & {"out", "outputs"}):
        raise node.error(
            f"{row.name}: {pattern.text!r} binds {name}, which is the name of the results: choose another name"
        )
    if not overloads:
        return pattern.names
    # An out= overload has `out` among its tensor arguments, after the pattern's.
    operand_counts = [len(overload.operands) for overload in overloads if not overload.name.endswith("out")]
    if pattern.arguments is None and operand_counts and len(pattern.items) > max(operand_counts):
        raise node.error(f"{row.name}: {pattern.text!r} names more tensors than {overloads[0].schema} has")
    arguments = _arguments(overloads)
    for name in pattern.arguments or ():
        if name not in arguments:
            raise node.error(f"{row.name} has no argument {name}{_near(name, arguments)}; {overloads[0].schema}")
    for name in sorted(pattern.names & arguments.keys()):
        raise node.error(f"{row.name}: {pattern.text!r} binds {name}, which is an argument of {overloads[0].schema}")
    return pattern.names


def _check_expression(
    row: Row, key: str, text: str, node: Node, bound: frozenset[str], overloads: tuple[Overload, ...]
) -> None:
    try:
        expression = Expression.parse(text)
    except ExpressionError as error:
        raise _locate_error(row, node, key, str(error), overloads) from None
    if not expression.names:
        try:
            expression.evaluate({})
        except ExpressionError as error:
            raise _locate_error(row, node, key, str(error), overloads) from None
    known = {**_arguments(overloads), **dict.fromkeys((*bound, "out", "outputs"))}
    for name in sorted(expression.names - known.keys()) if overloads else ():
        raise _locate_error(row, node, key, f"unknown name {name} in {text!r}{_near(name, known)}", overloads)


def _locate_error(row: Row, node: Node, key: str, text: str, overloads: tuple[Overload, ...]) -> TableError:
    schema = f"; the schema is {overloads[0].schema}" if overloads else ""
    return node.error(f"{key} of {row.name}: {text}{schema}")


def _arguments(overloads: tuple[Overload, ...]) -> dict[str, None]:
    return {name: None for overload in overloads for name in overload.arguments}


def _near(name: str, names: Mapping[str, None]) -> str:
    return suggest(name, names, quote=False) or f": available are {', '.join(names)}"
