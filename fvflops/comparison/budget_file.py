"""Read a YAML file of budgets, and update it without changing its comments.

tolerance: 1%                    # for all models; 0 if omitted
models:
  resnet50:
    table: exact                 # the convention; default if omitted
    flops: 8.2G                  # at most this: an integer, or K, M, G, T, P, Ki, Mi ... as suffix
    parameters: {exact: 25557032}
    memory: {max: 180MiB, tolerance: 5%}
    unsupported: 0               # ops without a formula
    modules: {layer1: 1.3G}      # not limits: recorded by --update, to find increases
    operators: {conv: 8.1G}
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple

import yaml

from fvflops.counting.metrics import METRICS
from fvflops.formulas.loading import require_table_name
from fvflops.formulas.yaml_document import Node, Returned, make_error, parse_document, read_document
from fvflops.text import shown, shown_by_fields, suggest, truncate
from fvflops.units import parse_share, parse_size

# Keys besides the metrics: the predicted peak memory in bytes, and the number of unsupported ops.
OTHER_KEYS = ("memory", "unsupported")
OLD_KEYS = {"unknown": "unsupported"}  # of older files


def budget_keys() -> tuple[str, ...]:
    return (*METRICS, *OTHER_KEYS)


class Limit(NamedTuple):
    """The limit of one metric: at most `value`, or exactly `value`, with a relative tolerance.

    >>> Limit("flops", 100, tolerance=Fraction(1, 100)).allows(101), Limit("flops", 100, exact=True).allows(99)
    (True, False)
    """

    metric: str
    value: int
    exact: bool = False
    tolerance: Fraction = Fraction(0)

    def allows(self, value: int) -> bool:
        over = value - self.value
        return (abs(over) if self.exact else over) <= self.value * self.tolerance


@dataclass(frozen=True, slots=True, repr=False)
@shown_by_fields
class Budget:
    """The limits of one model by metric, and the FLOPs by module and operator that --update recorded."""

    name: str
    limits: Mapping[str, Limit]
    table: str | None = None
    modules: Mapping[str, int] = field(default_factory=dict)
    operators: Mapping[str, int] = field(default_factory=dict)


_FILE_KEYS = ("description", "tolerance", "table", "models")
_RECORDED_KEYS = ("modules", "operators")  # FLOPs of parts, without limits
_SETTINGS = ("tolerance", "table", *_RECORDED_KEYS)
_LIMIT_KEYS = ("max", "exact", "tolerance")
_UNQUOTED_NAME = re.compile(r"[A-Za-z_][\w./:@-]*[\w]|[A-Za-z_]", re.ASCII)
_YAML_CONSTANTS = ("true", "false", "yes", "no", "on", "off", "null", "y", "n")
_NEW_FILE = (
    "# What each model may cost at most; `fvflops check MODEL --budget FILE` compares, --update rewrites.\nmodels:\n"
)


_Recorded = Mapping[str, Mapping[str, int]]  # kind of parts → name → FLOPs


class Update(NamedTuple):
    """The new text of a budget file, with its changes: (entry, old text or None, new text)."""

    text: str
    changes: tuple[tuple[str, str | None, str], ...]


def load_budgets(path: str) -> dict[str, Budget]:
    """Return name → budget of a file; a mistake in it raises TableError, whose message starts with file and line."""
    return _read_budgets(read_document(path))


def parse_budgets(text: str, file: str) -> dict[str, Budget]:
    """Return name → budget of a text; errors are as in `load_budgets`.

    >>> parse_budgets("models: {net: {flops: 1.2K}}", "budget.yaml")["net"].limits["flops"].value
    1200
    >>> parse_budgets("models: {net: {flosp: 1.2K}}", "budget.yaml")
    Traceback (most recent call last):
    fvflops.formulas.yaml_document.TableError: budget.yaml:1: unknown key 'flosp': did you mean 'flops'?
    """
    return _read_budgets(parse_document(text, file))


def find_budget(budgets: Mapping[str, Budget], name: str, path: str) -> Budget:
    """Return the budget of a name; an unknown one raises ValueError naming the nearest."""
    if name not in budgets:
        hint = suggest(name, budgets) or f": it has {', '.join(map(truncate, budgets)) or 'none'}"
        remedy = "--name or name= chooses one; updating the file adds this one"
        raise ValueError(f"{path} has no model {truncate(name)!r}{hint} ({remedy})")
    return budgets[name]


def make_limit(metric: str, value: object, tolerance: Fraction = Fraction(0)) -> Limit:
    """Return a limit from an integer, a string such as "1.2G", or {"max": value} or {"exact": value}.

    >>> make_limit("flops", {"exact": "1.2G"})
    Limit(metric='flops', value=1200000000, exact=True, tolerance=Fraction(0, 1))
    """
    metric = OLD_KEYS.get(metric, metric)
    if metric not in budget_keys():
        hint = suggest(metric, budget_keys()) or f": there are {', '.join(budget_keys())}"
        raise ValueError(f"unknown metric {truncate(metric)!r}{hint}")
    exact = False
    if isinstance(value, Mapping):
        unknown = value.keys() - set(_LIMIT_KEYS)
        if unknown or ("max" in value) == ("exact" in value):
            raise ValueError(f"{metric} is {shown(value)}: pass {{'max': 1200}} or {{'exact': 1200}}")
        if "tolerance" in value:
            tolerance = parse_share(str(value["tolerance"]))
        exact = "exact" in value
        value = value["exact" if exact else "max"]
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError(f"{metric} is {shown(value)}: pass an integer, or a string such as '1.2G'")
    return Limit(metric, parse_size(str(value)), exact, tolerance)


def update_text(
    text: str | None,
    file: str,
    name: str,
    values: Mapping[str, int],
    *,
    recorded: _Recorded | None = None,
    table: str | None = None,
) -> Update:
    """Return the text of a budget file with the values of one model; comments and other lines are unchanged.

    The limits of a model in the file are rewritten; a new model is added with all values and the table. `recorded` maps
    "modules" and "operators" to name → FLOPs, which need lines of their own: else TableError is raised.
    """
    if text is None or not text.strip():
        return _append(_NEW_FILE, file, name, values, recorded or {}, table)
    if name in parse_budgets(text, file):
        return _rewrite(text, file, name, values, recorded or {})
    return _append(text, file, name, values, recorded or {}, table)


def _read_budgets(document: Node) -> dict[str, Budget]:
    fields = document.fields("a budget file", _FILE_KEYS) if document.value else {}
    tolerance, table = _read_settings(fields, Fraction(0), None)
    models = fields["models"].fields("models") if "models" in fields and fields["models"].value else {}
    return {name: _read_budget(name, node, tolerance, table) for name, node in models.items()}


def _read_settings(fields: dict[str, Node], tolerance: Fraction, table: str | None) -> tuple[Fraction, str | None]:
    """Return the tolerance and the table that fields have, or else the given ones."""
    if "tolerance" in fields:
        tolerance = _read(fields["tolerance"], "tolerance", parse_share)
    if "table" in fields:
        table = fields["table"].text("table")
        require_table_name(table, fields["table"], "table")
    return tolerance, table


def _read_budget(name: str, node: Node, tolerance: Fraction, table: str | None) -> Budget:
    fields = _fields_of_budget(name, node)
    tolerance, table = _read_settings(fields, tolerance, table)
    limits = {metric: _read_limit(metric, fields[metric], tolerance) for metric in budget_keys() if metric in fields}
    if not limits:
        raise node.error(f"{truncate(name)} has no limit: write one of {', '.join(budget_keys())}, such as flops: 1.2G")
    recorded = [
        {key: _read(item, f"{kind}, {truncate(key)}", parse_size) for key, item in fields[kind].fields(kind).items()}
        if kind in fields
        else {}
        for kind in _RECORDED_KEYS
    ]
    return Budget(name, limits, table, *recorded)


def _fields_of_budget(name: str, node: Node) -> dict[str, Node]:
    """Return the fields of a model's budget; a key of an older file has its present name."""
    fields = node.fields(f"the budget of {truncate(name)}", (*budget_keys(), *_SETTINGS, *OLD_KEYS))
    for old, new in OLD_KEYS.items():
        if old in fields and new in fields:
            problem = f"{old} is an older name of {new}, which {truncate(name)} has too"
            raise fields[old].error(f"{problem}: write {new} alone")
    return {OLD_KEYS.get(key, key): value for key, value in fields.items()}


def _read_limit(metric: str, node: Node, tolerance: Fraction) -> Limit:
    if isinstance(node.value, str):
        return Limit(metric, _read(node, metric, parse_size), False, tolerance)
    fields = node.fields(metric, _LIMIT_KEYS)
    if ("max" in fields) == ("exact" in fields):
        raise node.error(f"{metric} is either max or exact: write {metric}: {{max: 1.2G}}")
    if "tolerance" in fields:
        tolerance = _read(fields["tolerance"], f"tolerance of {metric}", parse_share)
    key = "exact" if "exact" in fields else "max"
    return Limit(metric, _read(fields[key], f"{key} of {metric}", parse_size), key == "exact", tolerance)


def _read(node: Node, label: str, parse: Callable[[str], Returned]) -> Returned:
    text = node.text(label)
    return node.make(lambda: parse(text), label)


def _rewrite(text: str, file: str, name: str, values: Mapping[str, int], recorded: _Recorded) -> Update:
    budget = _child(_child(yaml.compose(text, Loader=yaml.SafeLoader), "models"), name)
    entries = {OLD_KEYS.get(key.value, key.value): (key, value) for key, value in budget.value}
    changes: list[tuple[str, str | None, str]] = []
    edits: list[tuple[int, int, str]] = []  # start and end in the text, and the new text
    for metric in (metric for metric in values if metric in entries):
        _, limit = entries[metric]
        if isinstance(limit, yaml.MappingNode):
            limit = next(value for key, value in limit.value if key.value != "tolerance")
        if parse_size(limit.value) != values[metric]:
            changes.append((metric, limit.value, f"{values[metric]:_}"))
            edits.append((limit.start_mark.index, limit.end_mark.index, f"{values[metric]:_}"))
    blocks = {kind: _write_block(kind, recorded[kind], " " * budget.start_mark.column) for kind in recorded}
    written = [(*entries[kind], kind) for kind in recorded if kind in entries]
    for key, block, kind in sorted(written, key=lambda item: item[0].start_mark.index, reverse=True):
        if found := _compare_block(kind, block, recorded[kind]):
            changes += found
            edits.append((key.start_mark.index, _end_of(block), "\n".join(blocks[kind]).lstrip()))
    added = [kind for kind in recorded if kind not in entries]
    if added:
        changes += [(kind, None, f"{len(recorded[kind])} recorded") for kind in added]
        end = _end_of_line(text, budget)
        edits.append((end, end, "".join(f"\n{line}" for kind in added for line in blocks[kind])))
    if budget.flow_style and any("\n" in new for _, _, new in edits):
        kinds = " and ".join(recorded)
        problem = f"{kinds} cannot be written here: write each metric of {name} on its own line"
        raise make_error(file, budget.start_mark.line + 1, problem)
    for start, end, new in sorted(edits, reverse=True):
        text = text[:start] + new + text[end:]
    return Update(text, tuple(changes))


def _compare_block(kind: str, block: Any, values: Mapping[str, int]) -> list[tuple[str, str | None, str]]:
    old = {key.value: parse_size(number.value) for key, number in block.value}
    keys = [key for key in (*(key for key in old if key not in values), *values) if old.get(key) != values.get(key)]
    before, after = ([f"{side[key]:_}" if key in side else "none" for key in keys] for side in (old, values))
    return list(zip((f"{kind}, {key}" for key in keys), before, after, strict=True))


def _append(
    text: str, file: str, name: str, values: Mapping[str, int], recorded: _Recorded, table: str | None
) -> Update:
    text = text.rstrip("\n")
    indent, end = "  ", len(text)
    document = yaml.compose(text, Loader=yaml.SafeLoader)
    entries = {key.value: value for key, value in document.value} if isinstance(document, yaml.MappingNode) else {}
    models = entries.get("models")
    for node in (document, models):
        if isinstance(node, yaml.MappingNode) and node.flow_style and (node.value or node is document):
            line = node.start_mark.line + 1
            raise make_error(file, line, "a model cannot be added here: write each model on lines of its own")
    if models is None:
        head = re.sub(r"\n\.\.\.[ \t]*$", "", text)  # what follows the document's end is another document
        tail = text[len(head) :]
        text = f"{head}\nmodels:{tail}".lstrip()
        end = len(text) - len(tail)
    elif models.value:
        indent, end = " " * models.start_mark.column, _end_of_line(text, models)
    else:  # {}, or nothing
        head, tail = text[: models.start_mark.index].rstrip(), text[models.end_mark.index :]
        text = head + tail
        end = len(head) + len(tail.partition("\n")[0])
    new = [f"{indent}{_quote(name)}:"]
    new += [f"{indent}  table: {_quote(table)}"] if table else []
    new += [f"{indent}  {metric}: {value:_}" for metric, value in values.items()]
    new += [line for kind in recorded for line in _write_block(kind, recorded[kind], indent + "  ")]
    changes = [(metric, None, f"{value:_}") for metric, value in values.items()]
    changes += [(kind, None, f"{len(recorded[kind])} recorded") for kind in recorded]
    return Update("\n".join([text[:end], *new]) + text[end:] + "\n", tuple(changes))


def _write_block(kind: str, values: Mapping[str, int], indent: str) -> list[str]:
    if not values:
        return [f"{indent}{kind}: {{}}"]
    return [f"{indent}{kind}:", *(f"{indent}  {_quote(key)}: {value:_}" for key, value in values.items())]


def _quote(name: str) -> str:
    if _UNQUOTED_NAME.fullmatch(name) and name.lower() not in _YAML_CONSTANTS:
        return name
    # YAML reads a JSON string, except for escapes of characters beyond 16 bits.
    quoted = json.dumps(name, ensure_ascii=False)
    return "".join(char if char.isprintable() else f"\\U{ord(char):08x}" for char in quoted)


def _child(node: Any, key: str) -> Any:
    return next(value for item, value in node.value if item.value == key)


def _end_of(node: Any) -> int:
    """Return where the text of a node ends; the mark of a block is beyond the comments that follow it."""
    if isinstance(node, yaml.MappingNode) and not node.flow_style:
        return _end_of(node.value[-1][1])
    end: int = node.end_mark.index
    return end


def _end_of_line(text: str, node: Any) -> int:
    end = text.find("\n", _end_of(node))
    return len(text) if end < 0 else end
