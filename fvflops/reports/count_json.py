"""JSON of a summary: complete and exact; `parse` reads it.

Schema 2, an object of these keys. A *name* is a module's or a parameter's dotted path, "" being the model; a *heading*
is "parameters", "flops", "activations" or a phase. A count is an integer, or the number that a handle returned.

- `format`: "fvflops.summary". `schema`: 2; a change that old readers would misread raises it, a new key does not.
- `about`: an object of strings: `model`, `inputs`, `table` (the convention) with its `multiply_add` (FLOPs per
  multiply-add) and `description`, the versions `fvflops`, `torch` and `python`, and how the model was run; where there
  are any, `random` and `data_dependent`: the locations where Python read a random draw or a value of the data,
  separated by "; ".
- `columns`: heading → name → count, submodules included. `parameters` names parameters too.
- `operators`: heading → operator → count of the whole model.
- `by_both`: heading → module's name → operator → count.
- `uncalled`: heading → names of the modules in which no op ran.
- `ledger`: "counted", "zero_flop", "ignored" or "unsupported" → op → calls. The counts lack the last two.
- `unsupported_elements`: unsupported op → elements of its outputs.
- `unsupported_locations`: unsupported op → module, and source line where known → calls; may be missing.
- `modules`: a list of the modules, a shared one under each name, a parent before its children, each with `name`,
  `canonical` (the first name of a shared module), `class_name`, `classes`, `extra_repr`, `has_forward`, `parameters`,
  `buffers`, `attributes` and `children` (pairs of attribute and name).

Readers ignore keys that they do not know, and refuse a newer schema. In schema 1 the words of `OLD_WORDS` are used.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from numbers import Integral
from typing import Any

from fvflops.text import parse_json
from fvflops.trace import ModuleTree, Summary
from fvflops.views.summary_rows import check_not_collapsed, check_view

SCHEMA = 2
_FORMAT = "fvflops.summary"
# Key of counts → the levels of objects in each other.
_LEVELS = {
    "columns": 2,
    "operators": 2,
    "by_both": 3,
    "ledger": 2,
    "unsupported_elements": 1,
    "unsupported_locations": 2,
}
# Keys of schema 1 and of its ledger, and their replacements.
OLD_WORDS = {
    "free": "zero_flop",
    "omitted": "ignored",
    "unknown": "unsupported",
    "unknown_elements": "unsupported_elements",
    "unknown_places": "unsupported_locations",
}


class SummaryError(ValueError):
    """A text that is not a summary, or is damaged, or was written by a newer version of fvflops."""


def render(summary: Summary, *, by: str = "module", depth: int | None = None) -> str:
    """Return the summary as JSON text with all views in full depth, from which `parse` returns an equal one."""
    check_view(by, report="the JSON report")
    check_not_collapsed(summary, "the JSON report")
    return json.dumps(
        {
            "format": _FORMAT,
            "schema": SCHEMA,
            "about": summary.about,
            "columns": summary.columns,
            "operators": summary.operators,
            "by_both": summary.by_both,
            "uncalled": {heading: sorted(modules) for heading, modules in summary.uncalled.items()},
            "ledger": summary.ledger,
            "unsupported_elements": summary.unsupported_elements,
            "unsupported_locations": summary.unsupported_locations,
            "modules": summary.modules.encode(),
        },
        allow_nan=False,
        default=_encode_other,
        separators=(",", ":"),
    )


def parse(text: str) -> Summary:
    """Return the summary that `render` wrote; any other text raises SummaryError with the reason.

    >>> parse('{"format": "fvflops.trace"}')
    Traceback (most recent call last):
    fvflops.reports.count_json.SummaryError: not a summary of fvflops: it has no "format": "fvflops.summary"
    """
    try:
        record = parse_json(text, finite=True)
    except ValueError as error:
        raise SummaryError(f"incomplete summary: it is not JSON ({error}); save it again") from error
    if not isinstance(record, dict) or record.get("format") != _FORMAT:
        raise SummaryError(f'not a summary of fvflops: it has no "format": "{_FORMAT}"')
    schema = record.get("schema")
    if type(schema) is not int or not 1 <= schema <= SCHEMA:
        raise SummaryError(
            f"this summary has schema {schema!r}, but this version of fvflops reads up to {SCHEMA}: update fvflops"
        )
    if schema == 1:
        record = _rename(record)
        record["ledger"] = _rename(_read_object(_require(record, "ledger"), "ledger"))
    uncalled = _read_object(_require(record, "uncalled"), "uncalled")
    about = _read_object(_require(record, "about"), "about")
    _read_strings(list(about.values()), "about")
    counts = {"unsupported_locations": {}, **record}
    return Summary(
        modules=_read_modules(_require(record, "modules")),
        uncalled={name: frozenset(_read_strings(item, f"uncalled, {name!r}")) for name, item in uncalled.items()},
        about=about,
        **{name: _read_counts(_require(counts, name), name, levels) for name, levels in _LEVELS.items()},
    )


def _rename(record: dict[str, Any]) -> dict[str, Any]:
    return {OLD_WORDS.get(key, key): value for key, value in record.items()}


def _encode_other(value: Any) -> dict[str, Any] | int:
    if isinstance(value, Mapping):
        return dict(value)
    # A handle that a program set may have returned an integer of numpy, which json does not know.
    if isinstance(value, Integral):
        return int(value)
    raise TypeError(f"a summary contains {value!r} of type {type(value).__name__}, which JSON cannot represent")


def _require(record: dict[str, Any], key: str) -> Any:
    if key not in record:
        raise SummaryError(f"this summary is damaged: it lacks {key!r}")
    return record[key]


def _read_object(record: Any, where: str) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise SummaryError(f"this summary is damaged: {where} is {record!r} instead of an object")
    return record


def _read_counts(record: Any, where: str, levels: int) -> dict[str, Any]:
    """Return objects in each other, as many levels of them, with numbers in the innermost."""
    for key, item in _read_object(record, where).items():
        if levels > 1:
            _read_counts(item, f"{where}, {key!r}", levels - 1)
        # A bool is an int to Python. A float can only come from a handle that a program set.
        elif type(item) is not int and not (type(item) is float and math.isfinite(item)):
            raise SummaryError(f"this summary is damaged: {where}, {key!r} is {item!r} instead of a number")
    counts: dict[str, Any] = record
    return counts


def _read_strings(record: Any, where: str) -> list[str]:
    if not isinstance(record, list) or not all(isinstance(item, str) for item in record):
        raise SummaryError(f"this summary is damaged: {where} is {record!r} instead of a list of strings")
    return record


def _read_modules(record: Any) -> ModuleTree:
    try:
        modules = ModuleTree.decode(record)
        by_name = modules.by_name
        if "" not in by_name or len(by_name) != len(record):
            raise ValueError("the root is missing, or a name is not unique")
        for module in by_name.values():
            _read_strings([module.name, module.class_name, module.extra_repr], f"module {module.name!r}")
            # A child may be missing: a module that contains itself is listed once.
            if module.canonical not in by_name:
                raise ValueError(
                    f"module {module.name!r} has the canonical name {module.canonical!r}, which does not exist"
                )
    except SummaryError:
        raise
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise SummaryError(f"this summary is damaged: its modules: {type(error).__name__}: {error}") from error
    return modules
