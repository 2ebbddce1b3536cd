"""Read a YAML file of budgets, and update it with its comments kept.

tolerance: 1%                    # for all models; 0 if omitted
models:
  resnet50:
    table: exact                 # the convention; default if omitted
    flops: 8.2G                  # at most this: an integer, or K, M, G, T, P, Ki, Mi ... as suffix
    parameters: {exact: 25557032}
    memory: {max: 180MiB, tolerance: 5%}
    unknown: 0                   # ops without a formula
    modules: {layer1: 1.3G}      # not limits: recorded by --update, to find what grew
    operators: {conv: 8.1G}
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import NamedTuple, TypeVar

from fvflops.features.budget.model import Budget, Limit, budget_keys
from fvflops.formulas.yaml_document import Node, parse_document, read_document
from fvflops.text import suggest, truncate
from fvflops.units import parse_share, parse_size

_FILE_KEYS = ("description", "tolerance", "table", "models")
_NOTED = ("modules", "operators")
_SETTINGS = ("tolerance", "table", *_NOTED)
_LIMIT_KEYS = ("max", "exact", "tolerance")
_PLAIN = re.compile(r"[A-Za-z_][\w./:@-]*[\w]|[A-Za-z_]", re.ASCII)
_WORDS = ("true", "false", "yes", "no", "on", "off", "null", "y", "n")
_NEW_FILE = (
    "# What each model may cost at most; `fvflops check MODEL --budget FILE` compares, --update rewrites.\nmodels:\n"
)

Returned = TypeVar("Returned")


class Update(NamedTuple):
    """The new text of a budget file, with its changes: (entry, old text or None, new text)."""

    text: str
    changes: tuple[tuple[str, str | None, str], ...]


def load_budgets(path: str) -> dict[str, Budget]:
    """Return name → budget of a file; a mistake in it raises TableError, whose message starts with file and line."""
    return _read_budgets(read_document(path))


def parse_budgets(text: str, file: str) -> dict[str, Budget]:
    """Return name → budget of a text; errors are those of `load_budgets`.

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
        raise ValueError(f"{path} has no model {truncate(name)!r}{hint} (updating it would add the model)")
    return budgets[name]


def make_limit(figure: str, said: object, tolerance: Fraction = Fraction(0)) -> Limit:
    """Return a limit from an integer, a text such as "1.2G", or a mapping of max or exact to one.

    >>> make_limit("flops", {"exact": "1.2G"})
    Limit(figure='flops', value=1200000000, exact=True, tolerance=Fraction(0, 1))
    """
    if figure not in budget_keys():
        hint = suggest(figure, budget_keys()) or f": there are {', '.join(budget_keys())}"
        raise ValueError(f"unknown figure {truncate(figure)!r}{hint}")
    exact = False
    if isinstance(said, Mapping):
        unknown = said.keys() - set(_LIMIT_KEYS)
        if unknown or ("max" in said) == ("exact" in said):
            raise ValueError(f"{figure} is {truncate(repr(said))}: write {{'max': 1200}} or {{'exact': 1200}}")
        if "tolerance" in said:
            tolerance = parse_share(str(said["tolerance"]))
        exact = "exact" in said
        said = said["exact" if exact else "max"]
    if isinstance(said, bool) or not isinstance(said, (int, str)):
        raise ValueError(f"{figure} is {truncate(repr(said))}: give an integer, or a text such as '1.2G'")
    return Limit(figure, parse_size(str(said)), exact, tolerance)


def update_text(
    text: str | None,
    file: str,
    name: str,
    values: Mapping[str, int],
    *,
    noted: Mapping[str, Mapping[str, int]] | None = None,
    table: str | None = None,
) -> Update:
    """Return the text of a budget file with the values of one model; comments and all other lines stay.

    The limits of a model in the file are rewritten; another model is added with all values and the table. `noted` are
    the FLOPs of modules and operators. A line that cannot be rewritten raises TableError.
    """
    text = _NEW_FILE if text is None or not text.strip() else text
    if text != _NEW_FILE and name in parse_budgets(text, file):
        update = _rewrite(text, file, name, values, noted or {})
    else:
        update = _append(text, file, name, values, noted or {}, table)
    limits = parse_budgets(update.text, file)[name].limits  # checks the result
    wrong = [figure for figure in limits if figure in values and limits[figure].value != values[figure]]
    if wrong:
        raise ValueError(f"{file}: {', '.join(wrong)} of {name} cannot be rewritten: write each on a line of its own")
    return update


def _read_budgets(document: Node) -> dict[str, Budget]:
    fields = document.fields("a budget file", _FILE_KEYS)
    if "models" not in fields:
        raise document.error("there are no models: write models, and under it a name with flops: 1.2G")
    tolerance = _read(fields["tolerance"], "tolerance", parse_share) if "tolerance" in fields else Fraction(0)
    table = fields["table"].text("table") if "table" in fields else None
    models = fields["models"].fields("models")
    return {name: _read_budget(name, node, tolerance, table) for name, node in models.items()}


def _read_budget(name: str, node: Node, tolerance: Fraction, table: str | None) -> Budget:
    fields = node.fields(f"the budget of {truncate(name)}", (*budget_keys(), *_SETTINGS))
    if "tolerance" in fields:
        tolerance = _read(fields["tolerance"], "tolerance", parse_share)
    if "table" in fields:
        table = fields["table"].text("table")
    limits = {figure: _read_limit(figure, fields[figure], tolerance) for figure in budget_keys() if figure in fields}
    if not limits:
        raise node.error(f"{truncate(name)} has no limit: write one of {', '.join(budget_keys())}, such as flops: 1.2G")
    noted = [
        {key: _read(item, f"{kind}, {truncate(key)}", parse_size) for key, item in fields[kind].fields(kind).items()}
        if kind in fields
        else {}
        for kind in _NOTED
    ]
    return Budget(name, limits, table, *noted)


def _read_limit(figure: str, node: Node, tolerance: Fraction) -> Limit:
    if isinstance(node.value, str):
        return Limit(figure, _read(node, figure, parse_size), False, tolerance)
    fields = node.fields(figure, _LIMIT_KEYS)
    if ("max" in fields) == ("exact" in fields):
        raise node.error(f"{figure} is either max or exact: write {figure}: {{max: 1.2G}}")
    if "tolerance" in fields:
        tolerance = _read(fields["tolerance"], f"tolerance of {figure}", parse_share)
    key = "exact" if "exact" in fields else "max"
    return Limit(figure, _read(fields[key], f"{key} of {figure}", parse_size), key == "exact", tolerance)


def _read(node: Node, what: str, parse: Callable[[str], Returned]) -> Returned:
    text = node.text(what)
    try:
        return parse(text)
    except ValueError as error:
        raise node.error(f"{what}: {error}") from None


def _rewrite(
    text: str, file: str, name: str, values: Mapping[str, int], noted: Mapping[str, Mapping[str, int]]
) -> Update:
    lines = text.split("\n")
    fields = parse_document(text, file).fields("a budget file")["models"].fields("models")[name].fields(name)
    changes: list[tuple[str, str | None, str]] = []
    for figure in (figure for figure in values if figure in fields):
        node, key = fields[figure], figure
        if not isinstance(node.value, str):
            key = "exact" if "exact" in node.fields(figure) else "max"
            node = node.fields(figure)[key]
        old, new = node.text(figure), f"{values[figure]:_}"
        if parse_size(old) != values[figure]:
            begin = re.search(rf"\b{figure}[\"']?\s*:", lines[node.line - 1]) if key != figure else None
            head, line = _split(lines[node.line - 1], begin.start() if begin else 0)
            found, count = re.subn(rf"(\b{key}[\"']?\s*:\s*[\"']?){re.escape(old)}", rf"\g<1>{new}", line, count=1)
            if not count:
                raise node.error(f"{figure} of {name} cannot be rewritten here: write {figure}: {old} on one line")
            lines[node.line - 1] = head + found
            changes.append((figure, old, new))
    # From the bottom, so that the lines above keep their numbers.
    blocks = [(fields[kind].line, kind) for kind in _NOTED if kind in fields and kind in noted]
    for begin_line, kind in sorted(blocks, reverse=True):
        changes += _replace_block(lines, fields[kind], begin_line, kind, noted[kind])
    added = [kind for kind in _NOTED if kind in noted and kind not in fields]
    if added:
        first = next(iter(fields.values()))
        indent = _indent(lines[first.line - 1])
        end = _last_line(Node(file, first.line, fields)) + sum(
            len(noted[kind]) - (_last_line(fields[kind]) - line) for line, kind in blocks
        )
        if not lines[first.line - 1].strip().startswith(tuple(fields)):
            raise first.error(f"{', '.join(added)} cannot be added here: write each figure of {name} on its own line")
        lines[end:end] = [line for kind in added for line in _write_block(kind, noted[kind], indent)]
        changes += [(kind, None, f"{len(noted[kind])} noted") for kind in added]
    return Update("\n".join(lines), tuple(changes))


def _split(line: str, at: int) -> tuple[str, str]:
    return line[:at], line[at:]


def _replace_block(
    lines: list[str], node: Node, begin: int, kind: str, values: Mapping[str, int]
) -> list[tuple[str, str | None, str]]:
    line = lines[begin - 1]
    if not line.strip().startswith(kind):
        raise node.error(f"{kind} cannot be rewritten here: write it on lines of its own")
    old = {key: parse_size(item.text(key)) for key, item in node.fields(kind).items()}
    if old == dict(values):
        return []
    lines[begin - 1 : _last_line(node)] = _write_block(kind, values, _indent(line))
    names = [*(key for key in old if key not in values), *values]
    differ = [key for key in names if old.get(key) != values.get(key)]
    return [(f"{kind}, {key}", *(_say(side.get(key)) for side in (old, values))) for key in differ]  # type: ignore[misc]


def _say(value: int | None) -> str:
    return "nothing" if value is None else f"{value:_}"


def _append(
    text: str,
    file: str,
    name: str,
    values: Mapping[str, int],
    noted: Mapping[str, Mapping[str, int]],
    table: str | None,
) -> Update:
    lines = text.rstrip("\n").split("\n")
    indent, end = "  ", len(lines)
    if text != _NEW_FILE:
        models = parse_document(text, file).fields("a budget file")["models"]
        entries = models.fields("models")
        if entries:
            first = next(iter(entries.values()))
            indent, end = _indent(lines[first.line - 1]), _last_line(models)
            if first.line == models.line:
                raise models.error("a model cannot be added here: write each model on lines of its own")
    new = [f"{indent}{_quote(name)}:"]
    new += [f"{indent}  table: {_quote(table)}"] if table else []
    new += [f"{indent}  {figure}: {value:_}" for figure, value in values.items()]
    new += [line for kind in noted for line in _write_block(kind, noted[kind], indent + "  ")]
    lines[end:end] = new
    changes = [(figure, None, f"{value:_}") for figure, value in values.items()]
    changes += [(kind, None, f"{len(noted[kind])} noted") for kind in noted]
    return Update("\n".join(lines) + "\n", tuple(changes))


def _write_block(kind: str, values: Mapping[str, int], indent: str) -> list[str]:
    if not values:
        return [f"{indent}{kind}: {{}}"]
    return [f"{indent}{kind}:", *(f"{indent}  {_quote(key)}: {value:_}" for key, value in values.items())]


def _quote(name: str) -> str:
    plain = _PLAIN.fullmatch(name) and name.lower() not in _WORDS
    if plain:
        return name
    # A JSON string, but YAML escapes characters beyond 16 bits otherwise.
    quoted = json.dumps(name, ensure_ascii=False)
    return "".join(mark if mark.isprintable() else f"\\U{ord(mark):08x}" for mark in quoted)


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def _last_line(node: Node) -> int:
    inside = node.value.values() if isinstance(node.value, dict) else node.value if isinstance(node.value, list) else ()
    return max([node.line, *map(_last_line, inside)])
