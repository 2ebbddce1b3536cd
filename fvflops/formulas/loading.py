"""Load a FormulaTable by name, path or URI, merged with all tables that it extends."""

from __future__ import annotations

import keyword
import math
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from fvflops import paths
from fvflops.formulas.language.functions import FUNCTIONS
from fvflops.formulas.row_validation import check_module, check_op
from fvflops.formulas.rows import KEYS, MODULE_KEYS, OLD_WORDS, Row, default_label, read_flag, read_row
from fvflops.formulas.table import FormulaTable
from fvflops.formulas.yaml_document import Node, TableError, read_document
from fvflops.garbage_collector import gc_paused
from fvflops.text import explaining_arguments, shown, suggest, truncate
from fvflops.trace.calls import packet_of

# A table's key `schema`; a table without it has schema 1. A new key of tables raises it.
SCHEMA = 3
_KEYS = (
    *("schema", "description", "extends", "multiply_add", "opaque", "constants", "floating_point_only"),
    *("ignore_inherited", "registered_formulas", "zero_flop", "ignored", "families", "ops", "modules"),
)
_TABLE_NAME = re.compile(r"\w[\w-]*", re.ASCII)
MAX_EXTENDS = 16
_FORM = "an integer >= 1, such as 1 (fvcore) or 2 (hardware)"  # of multiply_add
_ENDINGS = (".yaml", ".yml")  # of a table that another file names
_FLAGS = ("opaque", "floating_point_only", "ignore_inherited", "registered_formulas")

# Shipped YAML files that are not formula tables, and tables that are not conventions of their own.
_OTHER_FILES = ("devices", "efficiencies", "engines", "kernel_figures", "measured_errors", "networks")
PARTS = ("kernels",)

Rows = dict[str, tuple[Row, Node]]


def shipped_tables() -> list[str]:
    """Return the names of the tables that fvflops ships, `default` first.

    >>> shipped_tables()[:2]
    ['default', 'calflops']
    """
    names = [uri.removeprefix(paths.SCHEME).removesuffix(".yaml") for uri in paths.shipped_files()]
    conventions = (name for name in names if name not in (*_OTHER_FILES, *PARTS))
    return sorted(conventions, key=lambda name: (name != "default", name))


@explaining_arguments
def load_table(name: str | os.PathLike[str]) -> FormulaTable:
    """Return a table: a shipped one by name, or one at a local path or at a URI that iopath supports.

    An unknown name raises TableError, as do errors in a file, with file and line. Shipped tables are cached.

    >>> load_table("fvcore").multiply_add
    1
    >>> load_table("fvcor")
    Traceback (most recent call last):
    fvflops.formulas.yaml_document.TableError: fvflops ships no table named 'fvcor', and no such file exists: \
did you mean 'fvcore'? Shipped are default, calflops, ...
    """
    if not isinstance(name, (str, os.PathLike)):
        raise TypeError(f"a table must be a name such as 'exact', a path or a FormulaTable; got {shown(name)}")
    name = os.fspath(name)
    if not name.strip():
        raise TableError(f"the name of a table is empty: write one of {', '.join(shipped_tables())}, or a path")
    path = _locate(name, None)
    if _TABLE_NAME.fullmatch(path) and not os.path.lexists(path):
        missing = f"fvflops ships no table named {truncate(path)!r}, and no such file exists"
        raise TableError(f"{missing}{_suggest_shipped(path)}")
    with gc_paused():
        return _load_shipped(path) if path.startswith(paths.SCHEME) else _load(path, (), name)


def _suggest_shipped(name: str) -> str:
    return f"{suggest(name, shipped_tables()) or '.'} Shipped are {', '.join(shipped_tables())}"


def resolve_table(table: str | FormulaTable) -> FormulaTable:
    """Return a table that is passed as an object or by its name, path or URI.

    >>> resolve_table("fvcore") is resolve_table(resolve_table("fvcore"))
    True
    """
    return table if isinstance(table, FormulaTable) else load_table(table)


@lru_cache(maxsize=64)
def _load_shipped(path: str) -> FormulaTable:
    return _load(path, (), path)


def _locate(name: str, base: str | None) -> str:
    return _shipped(name) or (name if base is None else paths.join(base, name))


@lru_cache(maxsize=64)
def _shipped(name: str) -> str:
    path = f"{paths.SCHEME}{name}.yaml"
    return path if _TABLE_NAME.fullmatch(name) and name not in _OTHER_FILES and paths.exists(path) else ""


def _load(path: str, chain: tuple[str, ...], file: str) -> FormulaTable:
    fields = _read_fields(path, file)
    base = FormulaTable("")
    if "extends" in fields:
        base = _load_base(fields["extends"], path, (*chain, path))
    # Shipped tables are checked by tests; they must also load on an older torch, which lacks some of their ops.
    is_checked = not path.startswith(paths.SCHEME)
    constants = {**base.constants, **_read_constants(fields)}
    ops, modules = _read_ops(fields), _read_rows(fields, "modules")
    for rows, check in ((ops, check_op), (modules, check_module)) if is_checked else ():
        for row, node in rows.values():
            check(row, node, constants)
    flags = {key: read_flag(fields[key], key) for key in _FLAGS if key in fields}
    if flags.get("ignore_inherited"):
        base = _ignore_all(base)
    opaque = flags.get("opaque", base.opaque)
    merged = _merge(base.rows, {key: row for key, (row, _) in ops.items()})
    if opaque:
        _check_reachable(merged, ops)
    return FormulaTable(
        name=path.removeprefix(paths.SCHEME).removesuffix(".yaml") if not is_checked else path,
        description=fields["description"].text("description") if "description" in fields else "",
        multiply_add=(
            _read_integer(fields["multiply_add"], "multiply_add", _FORM, least=1, most=1000)
            if "multiply_add" in fields
            else base.multiply_add
        ),
        opaque=opaque,
        rows=merged,
        modules={**base.modules, **{key: row for key, (row, _) in modules.items()}},
        constants=constants,
        floating_point_only=flags.get("floating_point_only", base.floating_point_only),
        registered_formulas=flags.get(
            "registered_formulas", base.registered_formulas and not (opaque or flags.get("ignore_inherited"))
        ),
    )


def _ignore_all(table: FormulaTable) -> FormulaTable:
    rows = {name: _ignore_row(row) for name, row in table.rows.items()}
    return replace(table, rows=rows, modules={name: _ignore_row(row) for name, row in table.modules.items()})


def _ignore_row(row: Row) -> Row:
    return Row(row.name, "ignored", row.file, row.line, row.label) if row.kind == "counted" else row


def _read_fields(path: str, file: str) -> dict[str, Node]:
    try:
        document = read_document(path, file)
    except TableError as error:
        hint = suggest(file, shipped_tables(), separator="; ")
        if hint and isinstance(error.__cause__, OSError):
            raise TableError(f"{error}{hint}") from None
        raise
    fields = document.fields("a table")
    if "schema" in fields:
        _check_schema(fields["schema"])
    for old, new in OLD_WORDS.items():
        if old in fields and new in fields:
            raise fields[old].error(f"{old} is an older name of {new}, which this table has too: write {new} alone")
    renamed: dict[str, Node] = {OLD_WORDS.get(key, key): node for key, node in fields.items()}
    return Node(document.file, document.line, renamed).fields("a table", _KEYS)


def _check_schema(node: Node) -> None:
    text = node.text("schema")
    if _read_integer(node, "schema", f"an integer from 1 to {SCHEMA}, or omit it", least=1) > SCHEMA:
        raise node.error(
            f"this table has schema {truncate(text)}, but this version of fvflops reads up to {SCHEMA}: update fvflops"
        )


def _load_base(node: Node, path: str, chain: tuple[str, ...]) -> FormulaTable:
    name = node.text("extends")
    if not name.strip():
        raise node.error(f"extends is empty: write one of {', '.join(shipped_tables())}, or a path")
    if len(chain) >= MAX_EXTENDS:
        raise node.error(f"extends: a chain of more than {MAX_EXTENDS} tables")
    base = _locate(name, path)
    if not paths.exists(base):
        missing = f"extends: the table {truncate(base, 300)!r} does not exist"
        raise node.error(f"{missing}{_suggest_shipped(name)}")
    if any(_same_file(base, extending) for extending in chain):
        raise node.error(f"extends: a cycle: {' extends '.join((*chain, base))}")
    if base.startswith(paths.SCHEME):
        return _load_shipped(base)
    # An error shows what is wrong in the file: of another file than a table it would show a secret.
    require_table_name(base, node, "extends")
    return _load(base, chain, base)


def require_table_name(name: str, node: Node, key: str) -> None:
    """Raise TableError for the table that a key of a file names, if it is neither shipped nor a YAML file."""
    if not _shipped(name) and not os.path.realpath(name).endswith(_ENDINGS):
        raise node.error(f"{key}: {truncate(name, 300)!r} is not a .yaml or .yml file")


def _same_file(a: str, b: str) -> bool:
    if "://" in a or "://" in b:
        return a == b
    return os.path.realpath(a) == os.path.realpath(b)


def _read_ops(fields: dict[str, Node]) -> Rows:
    """Return the rows of the ops of one file, short forms included, each with its node for errors."""
    rows: Rows = {}

    def add(name: str, row: Row, node: Node) -> None:
        if name in rows:
            raise node.error(f"{name} is defined twice, first on line {rows[name][0].line}")
        rows[name] = row, node

    for kind in ("zero_flop", "ignored"):
        for item in fields[kind].items(kind) if kind in fields else ():
            name = item.name(f"an op of {kind}")
            add(name, Row(name, kind, item.file, item.line, default_label(name)), item)
    for family in fields["families"].items("families") if "families" in fields else ():
        row_fields = dict(family.fields("a family"))
        if "ops" not in row_fields:
            raise family.error("a family has no ops: write ops: [aten::exp, aten::exp2]")
        for item in row_fields.pop("ops").items("ops of a family"):
            name = item.name("an op of a family")
            node = Node(item.file, item.line, row_fields)
            add(name, read_row(name, node), node)
    for name, (row, node) in _read_rows(fields, "ops").items():
        add(name, row, node)
    return rows


def _read_rows(fields: dict[str, Node], key: str) -> Rows:
    keys = MODULE_KEYS if key == "modules" else KEYS
    nodes = fields[key].fields(key) if key in fields else {}
    return {name: (read_row(name, node, keys), node) for name, node in nodes.items()}


def _read_constants(fields: dict[str, Node]) -> dict[str, int]:
    constants = {}
    for name, node in fields["constants"].fields("constants").items() if "constants" in fields else ():
        if not name.isidentifier() or keyword.iskeyword(name) or name in FUNCTIONS or name in ("out", "outputs"):
            raise node.error(f"the constant {truncate(name)!r} cannot be used in an expression: choose another name")
        constants[name] = _read_integer(node, f"the constant {name}", "an integer >= 0", most=10**9 - 1)
    return constants


def _read_integer(node: Node, what: str, form: str, least: int = 0, most: float = math.inf) -> int:
    text = node.text(what)
    number = int(text[:1000]) if text.isdecimal() and text.isascii() else -1
    if not least <= number <= most:
        raise node.error(f"{what} is {truncate(text)!r}: write {form}")
    return number


def _merge(base: Mapping[str, Row], overriding: Mapping[str, Row]) -> dict[str, Row]:
    """Merge rows: a row of the extending table replaces inherited rows of the op, its overloads and its in-place form.

    Otherwise `aten::relu: {flops: numel(out)}` would not affect an inherited `aten::relu_: zero_flop`.
    """
    if not base:
        return dict(overriding)
    replaced = {packet_of(name) for name in overriding if "." not in name}
    inherited = {
        name: row
        for name, row in base.items()
        if packet_of(name) not in replaced and packet_of(name).removesuffix("_") not in replaced
    }
    return {**inherited, **overriding}


def _check_reachable(rows: Mapping[str, Row], overriding: Rows) -> None:
    for name, (_, node) in overriding.items():
        packet = packet_of(name)
        if packet != name and packet in rows and rows[packet].kind == "decompose":
            location = f"{rows[packet].file}:{rows[packet].line}"
            raise node.error(f"{name} is never used: {location} decomposes {packet} with all its overloads")
