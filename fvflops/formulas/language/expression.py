"""Arithmetic expressions of tables: checked against a whitelist and interpreted, never run as Python code."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from fvflops.formulas.language.functions import FUNCTIONS, FunctionError, UnknownValues, as_integer, as_list
from fvflops.text import suggest, truncate
from fvflops.trace import Symbol, TensorSpec, Value

MAX_LENGTH = 1000
MAX_DEPTH = 100
MAX_BITS = 512
MAX_EXPONENT = 8

_FORBIDDEN = ("\\", "#", "'''", '"""')
_TEXT = re.compile(r"'[^']*'|\"[^\"]*\"")
# Python reads `1if` as two tokens, with a warning on standard error.
_ADJACENT_TOKENS = re.compile(r"(?<!\w)\d[\d_]*\.?[A-Za-z]+|\w+\"")

_ARITHMETIC: Mapping[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Div: operator.floordiv,  # only where it leaves no remainder
    ast.Pow: operator.pow,  # only with a small constant exponent
}
_COMPARISONS: Mapping[type[ast.AST], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


class ExpressionError(ValueError):
    """An expression that is not allowed, or whose value for a call is not an integer >= 0."""


class UnknownValuesError(ExpressionError):
    """An expression that needs the values of a tensor which a recording does not have."""


@dataclass(frozen=True, slots=True)
class Expression:
    """A parsed expression: its text and its free names.

    Supported are integers, names, `+ - * // %`, `/` without remainder, `**` with a constant exponent up to 8,
    comparisons, `and or not`, `a if b else c`, `list[0]`, strings in comparisons, True, False, None, and the functions
    of `fvflops.formulas.language.functions`.

    >>> Expression.parse("2*m*k*n if training else m*k*n").names == {"m", "k", "n", "training"}
    True
    """

    text: str
    names: frozenset[str]
    tree: ast.expr = field(repr=False, compare=False)

    @staticmethod
    @lru_cache(maxsize=4096)
    def parse(text: str) -> Expression:
        """Parse an expression; one that is not allowed raises ExpressionError.

        >>> Expression.parse("__import__('os')")
        Traceback (most recent call last):
        fvflops.formulas.language.expression.ExpressionError: unknown function __import__ in "__import__('os')": ...
        """
        if len(text) > MAX_LENGTH:
            raise ExpressionError(
                f"an expression has at most {MAX_LENGTH} characters, this has {len(text):,}: {truncate(text)!r}"
            )
        line = " ".join(text.split())
        if not line.isascii() or not line.isprintable() or any(mark in line for mark in _FORBIDDEN):
            raise ExpressionError(f"an expression is plain ASCII without {' '.join(_FORBIDDEN)}: {text!r}")
        adjacent = _ADJACENT_TOKENS.search(_TEXT.sub('""', line))
        if adjacent:
            raise ExpressionError(f"{adjacent[0]} in {line!r}: a number has only digits; separate names by spaces")
        try:
            tree = ast.parse(line, mode="eval").body
        except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
            reason = error.msg if isinstance(error, SyntaxError) else "it is nested too deep"
            raise ExpressionError(f"not an expression ({reason}): {line!r}") from None
        try:
            names = frozenset(_check(tree, 0))
        except FunctionError as error:
            raise ExpressionError(f"{error} in {line!r}{_hint(tree, error)}") from None
        return Expression(line, names, tree)

    def evaluate(self, names: Mapping[str, Value]) -> int:
        """Return the value for a call, an integer >= 0; anything else raises ExpressionError.

        >>> Expression.parse("numel(out) * 5").evaluate({"out": TensorSpec((2, 3))})
        30
        """
        try:
            value = _walk(self.tree, names)
            if not isinstance(value, int) or isinstance(value, bool):
                raise FunctionError(f"the result is {_show(value)}, not an integer")
            if value < 0:
                raise FunctionError(f"the result is negative: {value}")
        except FunctionError as error:
            kind = UnknownValuesError if isinstance(error, UnknownValues) else ExpressionError
            raise kind(f"{error} in {self.text!r}") from None
        return value


@dataclass(frozen=True, slots=True)
class _Source:
    """Text of a subexpression, created only for an error: unparsing takes longer than evaluating."""

    node: ast.AST

    def __str__(self) -> str:
        return ast.unparse(self.node)


def _hint(tree: ast.expr, error: FunctionError) -> str:
    if not str(error).startswith("unknown function"):
        return ""
    name = str(error).rsplit(" ", 1)[-1]
    return suggest(name, FUNCTIONS, quote=False) or f": available are {' '.join(FUNCTIONS)}"


def _check(node: ast.AST, depth: int, in_comparison: bool = False) -> Iterator[str]:
    """Yield the free names of a tree; a node that is not allowed raises FunctionError."""
    if depth > MAX_DEPTH:
        raise FunctionError(f"more than {MAX_DEPTH} levels of nesting")
    if isinstance(node, ast.Name):
        yield node.id
        return
    if isinstance(node, ast.Constant):
        _check_constant(node, in_comparison)
        return
    for part in _parts(node):
        yield from _check(part, depth + 1, isinstance(node, ast.Compare))


def _check_constant(node: ast.Constant, in_comparison: bool) -> None:
    if isinstance(node.value, str) and not in_comparison:
        raise FunctionError(f"the string {node.value!r} is outside of a comparison")
    if not (node.value is None or isinstance(node.value, (bool, int, str))):
        raise FunctionError(f"the constant {ast.unparse(node)} is not an integer")
    if isinstance(node.value, int):
        _bound(node.value)


def _parts(node: ast.AST) -> list[ast.expr]:
    """Return the child nodes of an allowed node; one that is not allowed raises FunctionError."""
    match node:
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            exponent = _index(right)
            if exponent is None or not 0 <= exponent <= MAX_EXPONENT:
                raise FunctionError(f"the exponent {ast.unparse(right)} is not a constant from 0 to {MAX_EXPONENT}")
            return [left]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            return [left, right]
        case ast.UnaryOp(op=ast.USub() | ast.Not(), operand=operand):
            return [operand]
        case ast.BoolOp(values=values):
            return values
        case ast.Compare(left=left, ops=ops, comparators=rest) if all(type(op) in _COMPARISONS for op in ops):
            return [left, *rest]
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return [test, body, orelse]
        case ast.Subscript(value=value, slice=index) if _index(index) is not None:
            return [value]
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in FUNCTIONS:
            low, high = FUNCTIONS[name].arity
            if len(args) < low or len(args) > high or any(isinstance(arg, ast.Starred) for arg in args):
                raise FunctionError(f"{FUNCTIONS[name].usage} does not fit {ast.unparse(node)}")
            return args
        case ast.Call(func=ast.Name(id=name)) if name not in FUNCTIONS:
            raise FunctionError(f"unknown function {name}")
    raise FunctionError(f"{ast.unparse(node)} is not allowed")


def _walk(node: ast.AST, names: Mapping[str, Value]) -> Value:
    return _WALKS[type(node)](node, names)


def _negate(node: Any, names: Mapping[str, Value]) -> Value:
    value = _walk(node.operand, names)
    if isinstance(node.op, ast.Not):
        return not _truth(value, node.operand)
    return -as_integer(value, _Source(node.operand))


def _join(node: Any, names: Mapping[str, Value]) -> Value:
    # `or` is decided by the first true operand, `and` by the first false one.
    deciding = isinstance(node.op, ast.Or)
    return any(_truth(_walk(value, names), value) == deciding for value in node.values) == deciding


def _choose(node: Any, names: Mapping[str, Value]) -> Value:
    return _walk(node.body if _truth(_walk(node.test, names), node.test) else node.orelse, names)


def _call(node: Any, names: Mapping[str, Value]) -> Value:
    result = FUNCTIONS[node.func.id].function(*((_walk(arg, names), _Source(arg)) for arg in node.args))
    return _bound(result) if isinstance(result, int) else result


def _look_up(node: Any, names: Mapping[str, Value]) -> Value:
    name = node.id
    if name in names:
        return names[name]
    hint = suggest(name, names, separator="", quote=False) or f"available are {' '.join(names)}"
    raise FunctionError(f"unknown name {name} ({hint})")


def _compute(node: Any, names: Mapping[str, Value]) -> int:
    left = as_integer(_walk(node.left, names), _Source(node.left))
    right = as_integer(_walk(node.right, names), _Source(node.right))
    if isinstance(node.op, (ast.Div, ast.FloorDiv, ast.Mod)) and right == 0:
        raise FunctionError(f"division by zero: {ast.unparse(node.right)} is 0")
    if isinstance(node.op, ast.Div) and left % right:
        raise FunctionError(f"{ast.unparse(node)} is {left}/{right}, which is not an integer (// rounds down)")
    return _bound(_ARITHMETIC[type(node.op)](left, right))


def _compare(node: Any, names: Mapping[str, Value]) -> bool:
    left = _name_of_symbol(_walk(node.left, names))
    for op, part in zip(node.ops, node.comparators, strict=True):
        right = _name_of_symbol(_walk(part, names))
        try:
            satisfied = _COMPARISONS[type(op)](left, right)
        except TypeError:
            raise FunctionError(f"{_show(left)} and {_show(right)} have no order") from None
        if not satisfied:
            return False
        left = right
    return True


def _name_of_symbol(value: Value) -> Value:
    # A dtype or a layout compares equal to its name: `out_dtype == 'float32'`.
    return value.name if isinstance(value, Symbol) else value


def _truth(value: Value, node: ast.AST) -> bool:
    if isinstance(value, (bool, int)) or value is None:
        return bool(value)
    raise FunctionError(f"{ast.unparse(node)} is {_show(value)}, neither true nor false")


def _item(node: Any, names: Mapping[str, Value]) -> Value:
    value, index = as_list(_walk(node.value, names), _Source(node.value)), _index(node.slice)
    if index is None or not -len(value) <= index < len(value):
        raise FunctionError(f"{ast.unparse(node)} does not exist: {ast.unparse(node.value)} has {len(value)} items")
    return value[index]


def _index(node: ast.AST) -> int | None:
    match node:
        case ast.Constant(value=int() as value) if not isinstance(value, bool):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() as value)):
            return -value
    return None


def _bound(value: int) -> int:
    if value.bit_length() > MAX_BITS:
        raise FunctionError(f"a number has more than {MAX_BITS} bits")
    return value


def _show(value: Value) -> str:
    return f"the tensor {value}" if isinstance(value, TensorSpec) else repr(value)


_WALKS: Mapping[type[ast.AST], Callable[[Any, Mapping[str, Value]], Value]] = {
    ast.Name: _look_up,
    ast.Constant: lambda node, names: node.value,
    ast.BinOp: _compute,
    ast.UnaryOp: _negate,
    ast.BoolOp: _join,
    ast.Compare: _compare,
    ast.IfExp: _choose,
    ast.Subscript: _item,
    ast.Call: _call,
}
