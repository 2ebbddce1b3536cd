"""Load programs of torch.export, after a check that nothing in their archives may run code."""

from __future__ import annotations

import ast
import io
import json
import os
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from fvflops.analysis.files.archive_checks import is_io_op, read_records, require_trust

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
    if len(text) > 20_000 or not text.isascii() or not text.isprintable():
        return False
    try:
        return _check(ast.parse(text.strip(), mode="eval"), guard, 0)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def _check(node: ast.AST, guard: bool, depth: int) -> bool:
    if depth > 100:
        return False
    if isinstance(node, ast.Constant):
        return isinstance(node.value, (bool, int, float)) and abs(node.value) <= 1 << 64
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
    parts = [node.left, node.right] if isinstance(node, ast.BinOp) else getattr(node, "args", [])
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
    """Return whether a call creates a symbol, such as Symbol('s0', positive=True), or a Float('1.5')."""
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
    """Return whether an index is a number, or a text without quotes and brackets."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        node = node.operand
    return isinstance(node, ast.Constant) and (
        isinstance(node.value, int) or (isinstance(node.value, str) and _KEY.fullmatch(node.value) is not None)
    )


_ENTRIES = re.compile(
    r"models/\w+\.json|data/weights/(weight_\d+|\w+_weights_config\.json)|data/sample_inputs/\w+\.pt"
    r"|data/constants/(tensor_\d+|\w+_constants_config\.json)"
    r"|archive_format|archive_version|byteorder|\.data/\w+|\.format_version|\.storage_alignment|extra/[\w./-]+"
)
_LEGACY = re.compile(r"(^|/)(serialized_\w+\.(json|pt)|version)$|(^|/)data/(weights|constants)/\w+\.pt$")
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
# Names of tensors, modules and keys: they are written into Python source between double quotes.
_UNQUOTED = re.compile(r"[^\"'`\\{}]*")
_ARITHMETIC = (
    *("eq", "ne", "le", "ge", "lt", "gt", "neg", "pos", "mul", "add", "sub", "floordiv", "mod", "pow", "truediv"),
    *("and_", "or_", "xor", "lshift", "rshift", "getitem"),
)
_FUNCTION = re.compile(rf"_operator\.({'|'.join(_ARITHMETIC)})|math\.(trunc|ceil|floor|sqrt)|torch\._?sym_\w+")
_OP = re.compile(r"torch\.ops\.([A-Za-z_]\w*)\.([A-Za-z_]\w*)(?:\.([A-Za-z_]\w*))?", re.ASCII)
_PREDISPATCH = re.compile(r"torch\._functorch\.predispatch\.(\w+)", re.ASCII)
# Ops that take graphs or other ops.
_HIGHER_ORDER = frozenset(
    (
        *("cond", "while_loop", "scan", "associative_scan", "map_impl", "flex_attention", "flex_attention_backward"),
        *("wrap_with_set_grad_enabled", "wrap_with_autocast", "auto_functionalized", "auto_functionalized_v2"),
        *("out_dtype", "hints_wrapper", "invoke_subgraph", "tag_activation_checkpoint", "wrap_activation_checkpoint"),
        *("wrap", "with_effects", "run_and_save_rng_state", "run_with_rng_state"),
    )
)
_NUMBERS = frozenset(
    ("as_int", "as_ints", "as_float", "as_floats", "as_bool", "as_bools", "min_val", "max_val", "hint")
)


def check_program(path: str) -> None:
    """Raise ValueError for a program that contains more than torch.export needs for a module of tensors."""
    with zipfile.ZipFile(path) as archive:
        old = [name for name in archive.namelist() if _LEGACY.search(name) and not name.endswith("/.data/version")]
    if old:
        raise ValueError(
            f"{path} has an entry of an old format, {old[0].rpartition('/')[2]}, which is pickled: save the program "
            "again by torch.export.save of a newer torch"
        )
    names, read = read_records(path)
    for name in names:
        if not _ENTRIES.fullmatch(name):
            raise ValueError(f"{path} contains {name!r:.100}, which is not part of a program of torch.export: refused")
    for name in names:
        if name.startswith("data/sample_inputs/"):
            _check_inputs(path, read(name))
        elif name.endswith("_config.json"):
            _check_payloads(path, _parse(path, name, read(name)))
        elif name.startswith("models/"):
            for key, value in _walk(_parse(path, name, read(name))):
                _check_value(path, key, value)


def _parse(path: str, name: str, data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {name} is not JSON: {error}") from error


def _check_inputs(path: str, data: bytes) -> None:
    """Raise ValueError for example inputs that are more than tensors, numbers and containers."""
    try:
        if data:
            torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except Exception as error:  # of any kind: torch would then load them as a pickle
        raise ValueError(
            f"{path} has example inputs that are a pickle of other objects than tensors: refused; pass --input and "
            "export the program without them"
        ) from error


def _check_payloads(path: str, config: Any) -> None:
    """Raise ValueError for a weight or constant that is pickled."""
    for key, value in _walk(config):
        if key == "use_pickle" and value is not False:
            raise ValueError(f"{path} has a pickled weight or constant: refused")
        if key == "path_name" and not (isinstance(value, str) and re.fullmatch(r"(weight|tensor)_\d+", value)):
            raise ValueError(f"{path} has a constant that is an object, {value!r:.100}: refused")
    for name in config.get("config", {}) if isinstance(config, dict) else ():
        _require(path, _is_unquoted(name), "name of a tensor", name)


def _walk(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value inside parsed JSON with the key of its object; items of a list have the list's key."""
    left = [(key, value)]
    while left:
        key, value = left.pop()
        if isinstance(value, dict):
            yield key, value
            left += value.items()
        elif isinstance(value, list):
            left += [(key, item) for item in value]
        else:
            yield key, value


def _check_value(path: str, key: str, value: Any) -> None:
    is_text = isinstance(value, str)
    is_wrong = is_text and key in _NUMBERS and value not in ("Infinity", "-Infinity", "NaN")
    if is_wrong or (key in _CHECKS and not is_text and value is not None):
        # torch passes on any object: sympy evaluates the texts inside of it too.
        raise ValueError(f"{path} has a {key} of another type than torch.export writes, {value!r:.100}: refused")
    if isinstance(value, dict):
        for name in value if key == "range_constraints" else ():
            _require(path, is_size(name), "size", name)
    elif isinstance(value, str) and key in _CHECKS:
        what, check = _CHECKS[key]
        _require(path, check(value), what, value)
    elif isinstance(value, str) and key.endswith("_name"):
        _require(path, _is_unquoted(value), "name", value)


def _require(path: str, allowed: bool, what: str, text: str) -> None:
    if not allowed:
        raise ValueError(f"{path} has a {what} that torch.export does not write, {text!r:.100}: refused")


def _is_name(text: str) -> bool:
    return not text or _NAME.fullmatch(text) is not None


def _is_unquoted(text: str) -> bool:
    return text.isprintable() and _UNQUOTED.fullmatch(text) is not None


def _is_op(target: str) -> bool:
    """Return whether a target is an operator, without input and output, or arithmetic of sizes."""
    from fvflops.torch_internals import HigherOrderOperator, OpOverload, predispatch

    if _FUNCTION.fullmatch(target):
        return True
    if found := _PREDISPATCH.fullmatch(target):
        functions = vars(predispatch)
        return getattr(functions.get(found[1]), "__module__", "") == "torch._functorch.predispatch"
    found = _OP.fullmatch(target)
    if found is None:
        return not target.startswith(("torch", "_operator", "math", "#"))  # torch reports it as unknown
    namespace, name, overload = found.groups()
    if namespace == "higher_order":
        op = getattr(torch.ops.higher_order, name, None) if name in _HIGHER_ORDER else None
        return overload is None and isinstance(op, HigherOrderOperator)
    if overload is None:
        return False
    op = getattr(getattr(getattr(torch.ops, namespace), name, None), overload, None)
    return op is None or (isinstance(op, OpOverload) and not is_io_op(op._schema))


def _is_tree(text: str) -> bool:
    """Return whether a tree specification imports no module and has no name that could be code."""
    try:
        tree = json.loads(text)
        contexts = [value for key, value in _walk(tree) if key == "context" and value is not None]
        parsed = (json.loads(value) if isinstance(value, str) else value for value in contexts)
        return all(map(_is_context, parsed)) and _has_argument_names(tree)
    except (ValueError, RecursionError, TypeError, LookupError):
        return False


def _is_context(context: Any) -> bool:
    for key, value in _walk(context):
        is_enum = isinstance(value, dict) and "__enum__" in value
        is_foreign = key == "default_factory_module" and value not in ("builtins", "collections")
        if is_enum or is_foreign or (isinstance(value, str) and not _is_unquoted(value)):
            return False
    return True


def _has_argument_names(tree: Any) -> bool:
    """Return whether the keyword arguments of a call, the keys of the second of two trees, are names."""
    node = tree[1] if isinstance(tree, list) else tree
    children = node.get("children_spec") or []
    if len(children) != 2 or children[1].get("type") != "builtins.dict":
        return True
    context = children[1].get("context")
    keys = json.loads(context) if isinstance(context, str) else context
    return all(isinstance(key, str) and _NAME.fullmatch(key) for key in keys or ())


_CHECKS: dict[str, tuple[str, Callable[[str], bool]]] = {
    "expr_str": ("size", is_size),
    "guards_code": ("guard", is_guard),
    "target": ("op", _is_op),
    "as_operator": ("op", _is_op),
    "name": ("name", _is_name),
    "as_name": ("name", _is_name),
    "forward_arg_names": ("name of an argument", _is_name),
    "in_spec": ("tree of arguments", _is_tree),
    "out_spec": ("tree of results", _is_tree),
    "fqn": ("name of a module", _is_unquoted),
}


def is_program(source: object) -> bool:
    """Return whether `source` is a `torch.export.ExportedProgram`, without importing torch.export (which takes 1 s)."""
    return any(kind.__name__ == "ExportedProgram" for kind in type(source).__mro__)


def load_program(path: str | os.PathLike[str], *, trust: bool) -> Any:
    """Return the program of `torch.export.save` in a file that the user trusts; another file raises ValueError."""
    name = os.fspath(path)
    if not os.path.isfile(name):
        raise ValueError(f"{name}: there is no such file")
    if not zipfile.is_zipfile(name):  # torch would log a long warning
        raise ValueError(f"{name}: not a program of torch.export: it is not a complete zip archive")
    require_trust(name, "program", trust)
    check_program(name)
    from fvflops.torch_internals import load_archive

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.export itself calls deprecated functions of torch
            # torch.export.load would try an archive that this cannot load as one of an old format, which is pickled.
            return load_archive(name).exported_programs["model"]
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200].rstrip(": ")
        raise ValueError(f"{name}: not a program of torch.export: {reason}") from error


def program_module(program: Any) -> nn.Module:
    """Return the module that runs a program; it has the modules' names and classes of the model that was exported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module: nn.Module = program.module()
    return module
