"""Expressions of a saved program, of sizes and of guards: torch evaluates them as Python, so few forms are allowed."""

from __future__ import annotations

import ast
import re

_MAX_LENGTH = 20_000  # characters
_MAX_DEPTH = 100
_MAX_NUMBER = 1 << 64
_MAX_POWER = 64
_SYMBOL = re.compile(r"[a-z]{1,3}\d{1,9}")
_FLOAT = re.compile(r"-?\d{1,40}(\.\d{0,40})?(e[+-]?\d{1,3})?")
_KEY = re.compile(r"[\w.:/ -]*")
# Functions of sympy and torch in sizes, written as sympy's srepr does.
_SIZE_FUNCTIONS = frozenset(
    (
        *("Add", "Mul", "Integer", "Rational", "Max", "Min", "Abs", "floor", "ceiling", "sqrt", "log", "exp"),
        *("Equality", "Unequality", "GreaterThan", "LessThan", "StrictGreaterThan", "StrictLessThan"),
        *("Eq", "Ne", "Gt", "Ge", "Lt", "Le", "And", "Or", "Not", "Piecewise", "ExprCondPair", "Tuple"),
        *("FloorDiv", "ModularIndexing", "Where", "PythonMod", "Mod", "CleanDiv", "CeilToInt", "FloorToInt", "CeilDiv"),
        *("FloatTrueDiv", "IntTrueDiv", "TruncToFloat", "TruncToInt", "RoundToInt", "RoundDecimal", "ToFloat"),
        *("Identity", "IsNonOverlappingAndDenseIndicator", "RShift", "OpaqueUnaryFn_sqrt", "OpaqueUnaryFn_exp"),
        *("OpaqueUnaryFn_log", "OpaqueUnaryFn_log2", "BitwiseFn_bitwise_and", "BitwiseFn_bitwise_or"),
    )
)
_POWERS = frozenset(("Pow", "PowByNatural", "FloatPow", "LShift"))
_GUARD_FUNCTIONS = frozenset(("max", "min", "int", "float", "abs", "round", "bool", "cast_symbool_to_symint_guardless"))
_MATH_FUNCTIONS = frozenset(("trunc", "ceil", "floor", "sqrt", "log2", "log", "exp"))
_METHODS = frozenset(("size", "stride", "storage_offset", "dim"))
_CONSTANTS = frozenset(("true", "false", "oo", "int_oo", "inf", "nan"))
_FORMS = (
    *(ast.Expression, ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub, ast.UAdd, ast.Invert, ast.BinOp),
    *(ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.LShift, ast.RShift, ast.BitAnd),
    *(ast.BitOr, ast.BitXor, ast.Compare, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.IfExp, ast.Load),
)


def is_size(text: str) -> bool:
    """Return whether a text is an expression of sizes: numbers, symbols, operators and known functions.

    >>> is_size("Add(Mul(Integer(2), Symbol('s0', positive=True)), Integer(1))"), is_size("2*s0 + FloorDiv(s1, 2)")
    (True, True)
    >>> is_size("__import__('os').system('true')"), is_size("Pow(Pow(Integer(9), Integer(64)), Integer(64))")
    (False, False)
    """
    return _is_allowed(text, guard=False)


def is_guard(text: str) -> bool:
    """Return whether a text is a condition on the sizes of a program's inputs.

    >>> is_guard("(L['x'].size()[0] % 2) == 0"), is_guard("L['x'].__class__ is None"), is_guard("print(1) == 0")
    (True, False, False)
    """
    return _is_allowed(text, guard=True)


def _is_allowed(text: str, *, guard: bool) -> bool:
    if len(text) > _MAX_LENGTH or not text.isascii() or not text.isprintable():
        return False
    try:
        return _check(ast.parse(text.strip(), mode="eval"), guard, 0)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def _check(node: ast.AST, guard: bool, depth: int) -> bool:
    if depth > _MAX_DEPTH:
        return False
    if isinstance(node, ast.Constant):
        return isinstance(node.value, (bool, int, float)) and abs(node.value) <= _MAX_NUMBER
    if isinstance(node, ast.Name):
        return node.id in _CONSTANTS or (node.id == "L" if guard else _SYMBOL.fullmatch(node.id) is not None)
    if _is_power(node) and not _is_small_power(node):
        return False
    if isinstance(node, ast.Call):
        return _check_call(node, guard, depth)
    if isinstance(node, ast.Subscript):
        return guard and _check(node.value, guard, depth + 1) and _is_index(node.slice)
    if isinstance(node, ast.Attribute):
        return guard and not node.attr.startswith("_") and _check(node.value, guard, depth + 1)
    return isinstance(node, _FORMS) and all(_check(item, guard, depth + 1) for item in ast.iter_child_nodes(node))


def _is_power(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in _POWERS
    return isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Pow, ast.LShift))


def _is_small_power(node: ast.AST) -> bool:
    """Return whether a power has a small constant exponent, and none inside: numbers would grow without limit."""
    if isinstance(node, ast.BinOp):
        parts = [node.left, node.right]
    else:
        parts = node.args if isinstance(node, ast.Call) else []
    if len(parts) != 2 or any(_is_power(item) for part in parts for item in ast.walk(part)):
        return False
    numbers = [item.value for item in ast.walk(parts[1]) if isinstance(item, ast.Constant)]
    names = {item.id for item in ast.walk(parts[1]) if isinstance(item, ast.Name)}
    return (
        len(numbers) in (1, 2)
        and all(isinstance(number, (int, float)) and number <= _MAX_POWER for number in numbers)
        and names <= {"Integer", "Rational"}
    )


def _check_call(node: ast.Call, guard: bool, depth: int) -> bool:
    function, arguments = node.func, node.args
    name = function.id if isinstance(function, ast.Name) else ""
    if name in ("Symbol", "Float") and not guard:
        return _is_number_or_symbol(name, node)
    if node.keywords or not all(_check(item, guard, depth + 1) for item in arguments):
        return False
    if name:
        return name in _GUARD_FUNCTIONS if guard else name in _SIZE_FUNCTIONS or name in _POWERS
    if not guard or not isinstance(function, ast.Attribute):
        return False
    owner = function.value
    if isinstance(owner, ast.Name) and owner.id == "math":
        return function.attr in _MATH_FUNCTIONS
    if isinstance(owner, ast.Name) and owner.id == "torch":
        return function.attr.startswith("sym_")
    return function.attr in _METHODS and _check(owner, guard, depth + 1)


def _is_number_or_symbol(name: str, node: ast.Call) -> bool:
    """Return whether a call is that of a symbol, such as Symbol('s0', positive=True), or of a Float('1.5')."""
    pattern = _SYMBOL if name == "Symbol" else _FLOAT
    text = node.args[0] if len(node.args) == 1 else None
    if not isinstance(text, ast.Constant) or not isinstance(text.value, str) or not pattern.fullmatch(text.value):
        return False
    options = {item.arg: item.value.value for item in node.keywords if isinstance(item.value, ast.Constant)}
    return (
        len(options) == len(node.keywords)
        and all(name is not None and isinstance(value, int) for name, value in options.items())
        and int(options.get("precision", 0)) <= _MAX_POWER  # type: ignore[arg-type]
    )


def _is_index(node: ast.AST) -> bool:
    """Return whether an index is a number, or a text that is no code in a message either."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        node = node.operand
    return isinstance(node, ast.Constant) and (
        isinstance(node.value, int) or (isinstance(node.value, str) and _KEY.fullmatch(node.value) is not None)
    )
