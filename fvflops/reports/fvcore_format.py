"""Texts in fvcore's formats: tables of modules, operators and parameters, and the tree of modules."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec, module_from_spec
from typing import Any

import tabulate

from fvflops.reports.count_report import list_operators
from fvflops.reports.document import Column
from fvflops.reports.escaping import printable, printable_short
from fvflops.reports.formats.text import show_indented
from fvflops.reports.terminal import op_coverage
from fvflops.reports.terminal.collapse import collapse_note
from fvflops.trace import ModuleInfo, ModuleTree, Summary
from fvflops.trace.module_tree import index_children
from fvflops.units import format_elements, format_size
from fvflops.views.ranking import truncation_note
from fvflops.views.summary_rows import (
    View,
    check_not_collapsed,
    check_view,
    drop_zeros,
    group_by_name,
    list_lines,
    read_view,
    write_cells,
)


def pipe_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table aligned by tabulate: left, or in columns of numbers at the decimal point."""
    if "preserve_whitespace" in inspect.signature(tabulate.tabulate).parameters:
        return tabulate.tabulate(rows, headers, tablefmt="pipe", preserve_whitespace=True)
    return str(_load_private_tabulate().tabulate(rows, headers, tablefmt="pipe"))


@cache
def _load_private_tabulate() -> Any:
    # A second copy of the module, so that the global variable affects no other user of tabulate.
    spec = find_spec("tabulate")
    if spec is None or spec.loader is None:
        raise ImportError("the source of tabulate was not found: install tabulate 0.10 or newer")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    module.PRESERVE_WHITESPACE = True  # type: ignore[attr-defined]
    return module


def write_table(summary: Summary, *, show_param_shapes: bool = True, **options: Any) -> str:
    """Return the summary as a pipe table; by module it equals fvcore's `flop_count_table` byte for byte,
    except that unprintable names are escaped.

    `options` are fields of a View: its `depth` is 3 if None; by operator it is ignored. `show_param_shapes` adds a row
    with the shape of each parameter. With `sort` or `top` the rows of all levels are one list, without shapes.
    """
    view = read_view(options, "the table")
    if view.by == "module":
        table, notes = _draw_modules(summary, view, show_param_shapes and not view.is_ranked)
    else:
        table, notes = _draw_operators(summary, view)
    return "\n\n".join([table, "\n".join(notes)] if notes else [table])


def _label(heading: str, show_param_shapes: bool = False) -> str:
    return f"#{heading} or shape" if heading == "parameters" and show_param_shapes else f"#{heading}"


def _draw_modules(summary: Summary, view: View, show_param_shapes: bool) -> tuple[str, list[str]]:
    headings = list(summary.columns)
    found = list_lines(summary, view, show_param_shapes=show_param_shapes)
    lines = found[: view.top]
    # In a tree, the prefix common to all names is dropped.
    prefix = f"{lines[0].name}."
    rows = []
    for line in lines:
        blanks = " " * line.level
        name = printable_short(summary.label(line.name).removeprefix(prefix if line.level else "")) or "model"
        rows.append([blanks + name, *(blanks + line.cells[key] if key in line.cells else "" for key in headings)])
    notes = [*truncation_note(found, view.top, "module"), *collapse_note(summary, (line.name for line in lines))]
    return pipe_table(["module", *(_label(heading, show_param_shapes) for heading in headings)], rows), notes


def _draw_operators(summary: Summary, view: View) -> tuple[str, list[str]]:
    table = list_operators(summary, view, indent=" ", share_second=True)
    labels, columns = list[str](), list[Column]()
    for column in table.columns:
        is_label = column.is_text or column.key == "share"
        labels.append(column.key if is_label else _label(column.key))
        form = show_indented if column.is_text else column.form if is_label else format_size
        columns.append(replace(column, form=form))
    return pipe_table(labels, replace(table, columns=columns).texts()), list(table.notes)


def write_parameter_table(modules: ModuleTree, *, depth: int = 3) -> str:
    """Return the elements of each module and the shape of each parameter, `depth` levels of names below the root.

    A tied parameter is counted once, under its first name. A model without parameters, on which fvcore fails, has one
    row, "model" with 0.
    """
    shapes = {parameter.name: parameter.spec.shape for parameter in modules.parameters()}
    counts = modules.count_parameters()
    children = index_children(counts)
    rows = [("model", format_elements(counts[""]))]
    pending = [(child, 1) for child in reversed(children.get("", ()))]
    while pending:
        name, level = pending.pop()
        if level > depth:
            continue
        blanks = " " * level
        if name in shapes:
            rows.append((blanks + printable_short(name), blanks + str(tuple(shapes[name]))))
        else:
            rows.append((blanks + printable_short(name), blanks + format_elements(counts[name])))
            pending += [(child, level + 1) for child in reversed(children.get(name, ()))]
    return pipe_table(["name", "#elements or shape"], rows)


_SHORT = {"parameters": "#params", "activations": "#acts"}
# fvcore's text, which is part of its format.
_NOTICE = (
    "N/A indicates a possibly missing statistic due to how the module was called. "
    "Missing values are still included in the parent's total."
)


def write_tree(summary: Summary, *, by: str = "module", depth: int | None = None) -> str:
    """Return the summary as a tree of modules; it equals fvcore's `flop_count_str` byte for byte, except that
    unprintable names are escaped.

    `depth` is the number of levels shown below the root, None for all. A module in which no op ran has the count N/A. A
    shared module is shown under each of its names, with counts only under the first. A child that is None is shown as
    None, and a module inside itself as "..."; fvcore fails on both. A `by` other than "module" raises ValueError.
    """
    check_view(by, views=("module",), report="the tree")
    check_not_collapsed(summary, "the tree")
    zeros = dict.fromkeys((module.name for module in summary.modules.modules()), 0)
    columns = {heading: {**zeros, **column} for heading, column in summary.columns.items()}
    uncalled = frozenset().union(*(summary.uncalled.get(heading, ()) for heading in summary.columns))
    counts = drop_zeros(group_by_name(columns), except_for=uncalled)
    cells = write_cells(summary, counts, digits=2, mark="N/A")

    def list_details(module: ModuleInfo) -> list[str]:
        details = module.extra_repr.split("\n") if module.extra_repr else []
        if row := cells.get(module.name):
            details.append(", ".join(f"{_SHORT.get(heading, f'#{heading}')}: {text}" for heading, text in row.items()))
        return details

    return "\n".join([*([_NOTICE] if uncalled else []), *draw_tree(summary.modules, list_details, depth=depth)])


def _write_covered(write: Callable[..., str], summary: Summary, **options: Any) -> str:
    """Return a text with the coverage of the count below."""
    return f"{write(summary, **options)}\n\n{op_coverage.render(summary)}"


write_covered_table, write_covered_tree = partial(_write_covered, write_table), partial(_write_covered, write_tree)


def draw_tree(
    modules: ModuleTree, describe: Callable[[ModuleInfo], list[str]], *, depth: int | None = None
) -> list[str]:
    """Return the lines of `print(model)`, with the lines that `describe` returns for each module."""
    lines: list[str] = []
    # Stack of pending output, next last: a finished line, or a module with its level and the text in front of it.
    pending: list[str | tuple[ModuleInfo, int, str]] = [(modules.root, 0, "")]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            lines.append(item)
            continue
        module, level, opening = item
        blanks = "  " * level
        details = [printable(detail) for detail in describe(module)]
        opening += printable_short(module.class_name) + "("
        children = module.children if depth is None or level < depth else ()
        if not children and len(details) <= 1:
            lines.append(opening + "".join(details) + ")")
            continue
        lines.append(opening)
        lines += [f"{blanks}  {detail}" for detail in details]
        pending.append(blanks + ")")
        for attribute, path in reversed(children):
            key = f"{blanks}  ({printable_short(attribute)}): "
            child = modules.by_name.get(path) if path is not None else None
            if child is not None:
                pending.append((child, level + 1, key))
            else:
                pending.append(key + ("None" if path is None else "..."))
    return lines
