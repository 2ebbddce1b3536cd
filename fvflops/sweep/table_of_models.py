"""Report of many models: one table with a row for each model and the requested columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fvflops.counting.metrics import METRICS
from fvflops.formulas import FormulaTable, resolve_table
from fvflops.reports.document import Column, Document, Items, Table, Value
from fvflops.reports.escaping import plain_name
from fvflops.sweep.joined import Join, list_names
from fvflops.sweep.model_count import COLUMNS, COSTS, MORE_METRICS, ModelCount
from fvflops.text import suggest
from fvflops.units import digits_apart, digits_shown, format_in, format_quantity

MODEL = "model"
# Columns shown by default; the number is the order in which they are dropped if a line is too long.
_SHOWN = {
    "parameters": 0,
    "flops": 0,
    "activations": 1,
    "bytes": 3,
    "peak_memory": 2,
    **{name: 1 for name in MORE_METRICS if METRICS[name].column},
}
# Not in any format unless chosen: it differs between two counts of a model.
_MEASURED = "seconds"
_NONE = "–"  # shown for a missing value
# Column → heading in papers, and the power of ten of its unit if no value is known.
_PAPER = {
    **{name: (METRICS[name].short, METRICS[name].paper) for name in COSTS if name in METRICS},
    "peak_memory": ("Memory", 6),
}
# Power of ten → its letter, for parameters and for other columns.
_UNITS = {3: ("K", "K"), 6: ("M", "M"), 9: ("B", "G"), 12: ("T", "T"), 15: ("P", "P")}


def list_columns(join: Join | None = None) -> tuple[Column, ...]:
    """Return all columns, a joined file's before the texts; one whose key is taken has the key `joined_NAME`."""
    keys = {column.key for column in COLUMNS}
    joined: tuple[Column, ...] = ()
    if join is not None:
        taken = {key: f"joined_{key}" for key in keys}
        joined = tuple(
            replace(column, key=taken.get(column.key, column.key), missing=_NONE) for column in join.file.columns
        )
    counted = [
        replace(column, shorten_last=True) if column.is_text else replace(column, missing=_NONE) for column in COLUMNS
    ]
    costs = [column for column in counted if column.key in (MODEL, *COSTS)]
    return (*costs, *joined, *(column for column in counted if column not in costs))


def check_columns(keys: Sequence[str], join: Join | None = None) -> list[str]:
    """Return the keys of columns; an unknown key, a repeated key and an empty list raise ValueError."""
    known = [column.key for column in list_columns(join) if column.key != MODEL]
    for key in keys:
        if key not in known:
            raise ValueError(f"a column must be one of {', '.join(known)}; got {key!r}{suggest(key, known)}")
        if keys.count(key) > 1:
            raise ValueError(f"column {key} is named twice")
    if not keys:
        raise ValueError(f"no columns: choose some of {', '.join(known)}")
    return list(keys)


def model_table(
    counts: Sequence[ModelCount], join: Join | None = None, *, labels: Mapping[str, str] | None = None
) -> Table:
    """Return a row for each model, in order, with all columns of `list_columns`; `labels` maps models to row labels."""
    columns = list_columns(join)
    own = [column.key for column in COLUMNS]
    joined = [column.key for column in columns if column.key not in own]
    rows = []
    for count in counts:
        values: dict[str, Value] = {key: getattr(count, key) for key in own}
        values |= zip(joined, join.cells_of(count.model) if join else (), strict=True)
        values[MODEL] = (labels or {}).get(count.model, count.model)
        rows.append(tuple([values[column.key] for column in columns]))
    return Table("models", columns, rows, noun="model")


def model_report(
    counts: Sequence[ModelCount],
    table: str | FormulaTable = "default",
    *,
    columns: Sequence[str] | None = None,
    join: Join | None = None,
    ranked_by: tuple[str | None, int | None] = (None, None),
    paper: bool = False,
    notes: Sequence[str] = (),
    labels: Mapping[str, str] | None = None,
) -> Document:
    """Return the table of models, by default with parameters, FLOPs, activations, bytes, memory and joined columns.

    Below it are the models that could not be counted with their errors, unsupported ops, ignored products, the
    convention, the inputs, names that `join` did not match, and `notes`. `table` is the convention of the counts.
    `ranked_by` is the key of a column, by default FLOPs, and the number of rows. With `paper`, each column has one
    unit, named in its heading. `labels` maps models to their names in the table. An unknown column raises ValueError.
    """
    sort, top = ranked_by
    ranked = model_table(counts, join, labels=labels).ranked(sort="flops" if top and sort is None else sort, top=top)
    shown = _select(ranked, columns, join)
    for change in (_paper_column, _with_digits) if paper else (_with_digits,):
        values = [[row[index] for row in shown.rows if row[index] is not None] for index in range(len(shown.columns))]
        shown = replace(shown, columns=list(map(change, shown.columns, values)))
    counts = [replace(count, model=(labels or {}).get(count.model, count.model)) for count in counts]
    ignored: dict[str, list[str]] = {}
    for count in counts:
        ignored.setdefault(count.ignored, []).append(count.model)
    sections = {
        "Not counted:": [f"{plain_name(count.model)}: {count.error}" for count in counts if count.error],
        "Unsupported, so not counted:": [
            f"{plain_name(count.model)}: {count.unsupported}" for count in counts if count.unsupported
        ],
        "Matrix products that this convention ignores:": [
            f"{list_names(models)}: {text}" for text, models in ignored.items() if text
        ],
        "": [*_describe(counts, resolve_table(table)), *(join.notes if join else ()), *notes],
    }
    return Document("models", parts=[shown, *(Items(heading, items) for heading, items in sections.items() if items)])


def _select(table: Table, chosen: Sequence[str] | None, join: Join | None) -> Table:
    """Return the table with the chosen columns in their order, or with the default ones (more in data formats)."""
    by_key = {column.key: index for index, column in enumerate(table.columns)}
    if chosen is not None:
        selected = [table.columns[by_key[key]] for key in (MODEL, *check_columns(chosen, join))]
    else:
        texts = {column.key for column in COLUMNS} - {MODEL, *_SHOWN}
        selected = [
            replace(column, hide_order=_SHOWN.get(column.key, 0), only_for="data" if column.key in texts else "")
            for column in table.columns
            if column.key != _MEASURED
        ]
    indexes = [by_key[column.key] for column in selected]
    return replace(table, columns=selected, rows=[[row[index] for index in indexes] for row in table.rows])


def _with_digits(column: Column, values: Sequence[Any]) -> Column:
    """Return a column with enough digits to distinguish its counts."""
    digits = None if column.is_text else digits_apart(column.form, values, most=5)
    return column if digits is None else replace(column, form=partial(_show, column.form, digits))


def _show(form: Callable[[Any], str], digits: int, value: Any) -> str:
    with digits_shown(digits):
        return form(value)


def _paper_column(column: Column, values: Sequence[Any]) -> Column:
    """Return a column in one unit, the largest that is no larger than most values.

    >>> _paper_column(COLUMNS[1], [8_030_261_248, 1_235_814_400, 494_032_768, None]).heading
    'Params (B)'
    """
    if column.key not in _PAPER:
        return column
    heading, power = _PAPER[column.key]
    if known := [value for value in values if value]:
        fitting = [unit for unit in _UNITS if 2 * sum(value >= 10**unit for value in known) >= len(known)]
        power = max(fitting, default=min(_UNITS))
    is_bytes = column.key in ("bytes", "peak_memory")
    unit = _UNITS[power][0 if column.key == "parameters" else 1] + ("B" if is_bytes else "")
    return replace(column, heading=f"{heading} ({unit})", form=partial(format_in, power=power))


def _describe(counts: Sequence[ModelCount], table: FormulaTable) -> list[str]:
    """Return sentences on the convention, the inputs and models that were built instead."""
    macs = format_quantity(table.multiply_add, "FLOP")
    sentences = [f"Convention: {plain_name(table.name)} ({macs} per multiply-add)."]
    inputs: dict[str, list[str]] = {}
    for count in counts:
        if count.inputs:
            inputs.setdefault(count.inputs, []).append(plain_name(count.model))
    if inputs:
        sentences.append(f"Inputs: {_list_inputs(inputs)}.")
    if real := [count.model for count in counts if count.execution == "real"]:
        sentences.append(f"Counted in real execution: {list_names(real)}.")
    built = [f"{plain_name(count.model)} ({count.built})" for count in counts if count.built]
    return [*sentences, *([f"Counted another model instead: {', '.join(built)}."] if built else [])]


def _list_inputs(inputs: Mapping[str, Sequence[str]]) -> str:
    """Return each distinct input, the most common one first; for the others, with their models.

    >>> _list_inputs({"float32[1, 3, 224, 224]": ["a", "b"], "int64[1, 128]": ["c"]})
    'float32[1, 3, 224, 224]; int64[1, 128] (c)'
    """
    (usual, _), *others = sorted(inputs.items(), key=lambda item: -len(item[1]))
    listed = [
        f"{text} ({models[0] if len(models) == 1 else format_quantity(len(models), 'model')})"
        for text, models in others[:4]
    ]
    rest = len(others) - len(listed)
    return "; ".join([usual, *listed]) + (f"; {rest:,} more, which CSV and JSON list" if rest else "")
