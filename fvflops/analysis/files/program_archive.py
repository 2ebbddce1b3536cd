"""Check a program of torch.export before torch loads it: nothing in its archive may run code.

torch evaluates guards and sizes as Python, writes names into Python source, resolves an op to any callable of torch,
imports the modules that tree specifications name, and loads pickles and compiled libraries. This second wall stands
behind `require_trust`, for trusted files too; a form of a program that it does not know is refused.
"""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fvflops.analysis.files.archive_records import Records, read_records
from fvflops.analysis.files.expressions import is_guard, is_size
from fvflops.analysis.files.io_ops import is_io_op

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
_FLOATS = ("Infinity", "-Infinity", "NaN")
_FACTORIES = ("builtins", "collections")  # modules of the default of a defaultdict


def check_program(path: str) -> None:
    """Raise ValueError for a program that contains more than torch.export needs for a module of tensors."""
    with zipfile.ZipFile(path) as archive:
        old = [name for name in archive.namelist() if _LEGACY.search(name) and not name.endswith("/.data/version")]
    if old:
        raise ValueError(
            f"{path} has an entry of an old format, {old[0].rpartition('/')[2]}, which is pickled: save the program "
            "again by torch.export.save of a newer torch"
        )
    records = read_records(path)
    for name in records.names:
        if not _ENTRIES.fullmatch(name):
            raise ValueError(f"{path} contains {name!r:.100}, which is no part of a program of torch.export: refused")
    for name in records.names:
        if name.startswith("data/sample_inputs/"):
            _check_inputs(path, records.data(name))
        elif name.endswith("_config.json"):
            _check_payloads(path, _parse(path, name, records))
        elif name.startswith("models/"):
            for key, value in _walk(_parse(path, name, records)):
                _check_value(path, key, value)


def _parse(path: str, name: str, records: Records) -> Any:
    try:
        return json.loads(records.data(name))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {name} is no JSON: {error}") from error


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
    if (key in _CHECKS and not is_text and value is not None) or (key in _NUMBERS and is_text and value not in _FLOATS):
        # torch passes on what it is given: sympy evaluates the texts inside of an object too.
        raise ValueError(f"{path} has a {key} of another type than torch.export writes, {value!r:.100}: refused")
    if isinstance(value, dict):
        if key == "range_constraints":
            for name in value:
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
        for key, value in _walk(tree):
            if key == "context" and isinstance(value, str) and not _is_context(json.loads(value)):
                return False
            if key == "context" and not isinstance(value, (str, type(None))) and not _is_context(value):
                return False
        return _has_argument_names(tree)
    except (ValueError, RecursionError, TypeError, LookupError):
        return False


def _is_context(context: Any) -> bool:
    for key, value in _walk(context):
        if isinstance(value, dict) and "__enum__" in value:
            return False
        if key == "default_factory_module" and value not in _FACTORIES:
            return False
        if isinstance(value, str) and not _is_unquoted(value):
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
