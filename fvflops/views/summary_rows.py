"""Rows of a summary by name or by operator, by linear (unlike fvcore's) and not recursive functions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from fvflops.trace import ModuleInfo, Summary
from fvflops.trace.module_tree import index_children
from fvflops.units import format_size
from fvflops.views.ranking import rank

VIEWS = ("module", "operator", "both")
ITSELF = "(itself)"  # the row of a module's own work, outside its submodules


class View(NamedTuple):
    """Rows of a report: `by` module, operator or both, `depth` levels below the root, None for the report's default.

    With `sort` or `top` they are in the order of `fvflops.views.ranking.rank`; reports show the first `top`.
    """

    by: str = "module"
    depth: int | None = None
    sort: str | None = None
    top: int | None = None

    @property
    def is_ranked(self) -> bool:
        return self.sort is not None or self.top is not None

    def limit_depth(self) -> int:
        """Return the number of levels shown below the root, by default as in fvcore's `flop_count_table`."""
        return 3 if self.depth is None else self.depth


def read_view(options: Mapping[str, Any], report: str) -> View:
    """Return the View of keyword arguments; an unknown `by` raises ValueError that names the report."""
    view = View(**options)
    check_view(view.by, report=report)
    return view


class OperatorRow(NamedTuple):
    """An operator of a module (canonical, "" for the model) with its submodules; a number for each heading."""

    module: str
    operator: str
    counts: tuple[int, ...]


def check_view(by: str, views: Sequence[str] = VIEWS, report: str = "this report") -> None:
    """Raise ValueError if a report has no view named `by`."""
    if by not in views:
        *first, last = (repr(view) for view in views)
        available = f"{', '.join(first)} or {last}" if first else last
        raise ValueError(f"{report} has no view by {by!r}: use {available}")


def check_not_collapsed(summary: Summary, report: str) -> None:
    """Raise ValueError if rows of a summary represent repeated layers, for a report of single modules."""
    if summary.labels:
        raise ValueError(f"{report} has a row for every module: pass a summary without collapsed layers")


def depth_of(name: str) -> int:
    """Return the number of levels of a dotted name below the root."""
    return name.count(".") + 1 if name else 0


def group_by_name(columns: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    """Return name → heading → count in order of first appearance, with the root always, from heading → name → count."""
    counts: dict[str, dict[str, int]] = {"": {}}
    for heading, column in columns.items():
        for name, count in column.items():
            counts.setdefault(name, {})[heading] = count
    return counts


def count_itself(summary: Summary, shown: Iterable[str], measure: str) -> dict[str, dict[str, int]]:
    """Return module → heading → its own work, outside its submodules, of modules that are `shown` above others.

    Only modules are listed that do at least 1 % of the whole model by `measure` themselves, so that work missing from
    the rows of their submodules is named. Repeated layers in one row count as in their submodules' rows: once.
    """
    children = index_children(summary.modules.by_name)
    found = {}
    for name in shown:
        repeats = int(summary.labels[name].rpartition(" ")[2]) if name in summary.labels else 1
        counts = {
            heading: column.get(name, 0) // repeats - sum(column.get(child, 0) for child in children.get(name, ()))
            for heading, column in summary.columns.items()
        }
        if counts[measure] >= max(0.01 * summary.columns[measure].get("", 0), 1):
            found[name] = {heading: max(count, 0) for heading, count in counts.items()}
    return found


def drop_zeros(
    counts: Mapping[str, dict[str, int]], *, except_for: Collection[str] = (), keep_parents: bool = False
) -> dict[str, dict[str, int]]:
    """Return the counts without the names whose counts are all 0.

    Names in `except_for` are retained, the root if that is empty; with `keep_parents` also the ancestors of every
    retained name. fvcore's table uses `keep_parents`, its tree does not.
    """
    children = index_children(counts)
    reached = [""]
    for name in reached:  # grows while it is iterated over: parents before their children
        reached.extend(children.get(name, ()))
    retained: set[str] = set()
    for name in reversed(reached):
        if (
            any(counts[name].values())
            or (name in except_for if except_for else not name)
            or (keep_parents and any(child in retained for child in children.get(name, ())))
        ):
            retained.add(name)
    return {name: row for name, row in counts.items() if name in retained}


def write_cells(
    summary: Summary, counts: Mapping[str, Mapping[str, int]], *, digits: int, mark: str
) -> dict[str, dict[str, str]]:
    """Return name → heading → formatted count, with `mark` where no op of the metric ran in the module."""
    cells = {
        name: {heading: format_size(count, digits=digits) for heading, count in row.items()}
        for name, row in counts.items()
    }
    for heading in summary.uncalled.keys() & summary.columns.keys():
        for name in summary.uncalled[heading] & cells.keys():
            cells[name][heading] = mark
    return cells


def list_operator_headings(summary: Summary) -> list[str]:
    """Return the headings with counts by operator, in column order; without any it raises ValueError."""
    headings = [heading for heading in summary.columns if heading in summary.operators]
    headings += [heading for heading in summary.operators if heading not in summary.columns]
    if not headings:
        raise ValueError("this summary has no counts by operator: use by='module'")
    return headings


def rank_modules(summary: Summary, view: View) -> list[ModuleInfo]:
    """Return the modules in tree order, or ranked, not limited to `top`."""
    return rank(
        _list_modules(summary, view.depth),
        list(summary.columns),
        count=lambda module, heading: summary.columns[heading].get(module.name, 0),
        name=lambda module: module.name,
        sort=view.sort,
        top=view.top,
    )


def _list_modules(summary: Summary, depth: int | None) -> list[ModuleInfo]:
    return [module for module in summary.modules.modules() if depth is None or depth_of(module.name) <= depth]


def rank_operators(summary: Summary, view: View) -> list[OperatorRow]:
    """Return the operators, largest first, of the model or of each module in tree order, or ranked, all of them."""
    headings = list_operator_headings(summary)
    rows: list[OperatorRow] = []
    if view.by == "operator":
        rows = _list_rows("", [summary.operators[heading] for heading in headings])
    else:
        tables = [summary.by_both.get(heading, {}) for heading in headings]
        for module in _list_modules(summary, view.depth):
            rows += _list_rows(module.name, [table.get(module.name, {}) for table in tables])
    return rank(
        rows,
        headings,
        count=lambda row, heading: row.counts[headings.index(heading)],
        name=lambda row: row.operator if view.by == "operator" else row.module,
        sort=view.sort,
        top=view.top,
    )


def _list_rows(module: str, tables: Sequence[Mapping[str, int]]) -> list[OperatorRow]:
    labels = dict.fromkeys(label for table in tables for label in table)
    rows = [OperatorRow(module, label, tuple(table.get(label, 0) for table in tables)) for label in labels]
    return sorted(
        (row for row in rows if any(row.counts)), key=lambda row: (tuple(-count for count in row.counts), row.operator)
    )


Cells = Mapping[str, Mapping[str, str]]


class Line(NamedTuple):
    """A row for a module or parameter, with heading → text in `cells`.

    A chain of single children with equal cells shares one row: `chain` has the names of all, `name` is the last of
    them. `above` is the name of the parent row, "" for the first row, whose level is 0.
    """

    level: int
    name: str
    above: str
    cells: Mapping[str, str]
    chain: tuple[str, ...]


def list_lines(summary: Summary, view: View, *, show_param_shapes: bool) -> list[Line]:
    """Return the rows of a summary in the order of the model, `depth` levels below the first, 3 if None.

    Modules without any count are dropped. `show_param_shapes` adds a row with the shape of each parameter. Ranked
    modules of all levels, or of `depth` levels, are one list on level 0, not limited to `top`.
    """
    if not view.is_ranked:
        return _walk_lines(summary, _prepare(summary, show_param_shapes), view.limit_depth())
    lines = _walk_lines(summary, _prepare(summary, False), view.depth)
    return rank(
        [line._replace(level=0, above="") for line in lines if line.name in summary.modules.by_name],
        list(summary.columns),
        count=lambda line, heading: count_line(summary, line, heading),
        name=lambda line: line.name,
        sort=view.sort,
        top=view.top,
    )


def count_line(summary: Summary, line: Line, heading: str) -> int:
    """Return the exact count of a row: the largest in its chain, as uncalled modules have none."""
    column = summary.columns[heading]
    return max(column.get(name, 0) for name in line.chain)


def _prepare(summary: Summary, show_param_shapes: bool) -> Cells:
    cells = write_cells(summary, drop_zeros(group_by_name(summary.columns), keep_parents=True), digits=3, mark="")
    for parameter in summary.modules.parameters():
        if parameter.name in cells and "parameters" in summary.columns:
            if show_param_shapes:
                cells[parameter.name]["parameters"] = str(tuple(parameter.spec.shape))
            else:
                del cells[parameter.name]
    return cells


def _walk_lines(summary: Summary, cells: Cells, depth: int | None) -> list[Line]:
    children = index_children(cells)
    lines: list[Line] = []
    pending = [("", 0, "")]
    while pending:
        name, level, above = pending.pop()
        if depth is not None and level > depth:
            continue
        chain, row = _skip_single_children(name, cells, children, summary.labels)
        name = chain[-1]
        lines.append(Line(level, name, above, row, chain))
        pending += [(child, level + 1, name) for child in reversed(children.get(name, ()))]
    return lines


def _skip_single_children(
    name: str, cells: Cells, children: Mapping[str, Sequence[str]], labels: Mapping[str, str]
) -> tuple[tuple[str, ...], Mapping[str, str]]:
    # A module with one child whose cells are equal shares its row, under the child's name, and so on downward; but a
    # row of repeated layers does not share the rows of its first layer.
    chain, row = [name], cells[name]
    while name not in labels and len(only := children.get(name, ())) == 1:
        combined = _combine(row, cells[only[0]])
        if combined is None:
            break
        name, row = only[0], combined
        chain.append(name)
    return tuple(chain), row


def _combine(upper: Mapping[str, str], lower: Mapping[str, str]) -> dict[str, str] | None:
    if upper.keys() != lower.keys():
        return None
    if any(text and lower[heading] and text != lower[heading] for heading, text in upper.items()):
        return None
    return {heading: text or lower[heading] for heading, text in upper.items()}
