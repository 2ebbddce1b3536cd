"""A summary's counts by name or by operator, prepared for reports.

All functions are linear in the number of names (fvcore is quadratic) and not recursive, for wide and deep models.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fvflops.trace import ModuleInfo, Summary
from fvflops.units import format_size
from fvflops.views.ranking import rank

VIEWS = ("module", "operator", "both")


@dataclass(frozen=True, slots=True)
class OperatorRow:
    """One operator of one module, what is below the module included; `counts` has one number for each heading.

    `module` is canonical, "" for the whole model.
    """

    module: str
    operator: str
    counts: tuple[int, ...]


def check_view(by: str, views: Sequence[str] = VIEWS, report: str = "this report") -> None:
    """Raise ValueError if a report does not offer a view.

    >>> check_view("layer")
    Traceback (most recent call last):
    ValueError: this report has no view by 'layer': choose 'module', 'operator' or 'both'
    """
    if by not in views:
        *first, last = (repr(view) for view in views)
        choice = f"{', '.join(first)} or {last}" if first else last
        raise ValueError(f"{report} has no view by {by!r}: choose {choice}")


def check_whole(summary: Summary, report: str) -> None:
    """Raise ValueError if rows of a summary stand for several modules, for a report that shows each as it is."""
    if summary.labels:
        raise ValueError(f"{report} shows each module as it is: take the summary before equal ones are collapsed")


def depth_of(name: str) -> int:
    """Return how many levels below the root a name is.

    >>> depth_of(""), depth_of("fc"), depth_of("layer1.0")
    (0, 1, 2)
    """
    return name.count(".") + 1 if name else 0


def group_by_name(columns: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    """Return name → heading → count from heading → name → count; the root is always there.

    Names come in the order in which they first appear, which is the order of the rows of a table.

    >>> group_by_name({"parameters": {"": 6, "fc": 6}, "flops": {"fc": 12}})
    {'': {'parameters': 6}, 'fc': {'parameters': 6, 'flops': 12}}
    """
    counts: dict[str, dict[str, int]] = {"": {}}
    for heading, column in columns.items():
        for name, count in column.items():
            counts.setdefault(name, {})[heading] = count
    return counts


def fill_missing(columns: Mapping[str, Mapping[str, int]], names: Iterable[str]) -> dict[str, dict[str, int]]:
    """Return the columns with 0 for each of `names` that a column lacks.

    >>> fill_missing({"flops": {"": 12}}, ["", "drop"])
    {'flops': {'': 12, 'drop': 0}}
    """
    zeros = dict.fromkeys(names, 0)
    return {heading: {**zeros, **column} for heading, column in columns.items()}


def index_children(names: Iterable[str]) -> dict[str, list[str]]:
    """Return name → the names one dot below it, in their order.

    >>> index_children(["", "a", "a.x", "b"])
    {'': ['a', 'b'], 'a': ['a.x']}
    """
    children: dict[str, list[str]] = {}
    for name in names:
        if name:
            children.setdefault(name.rpartition(".")[0], []).append(name)
    return children


def drop_zeros(
    counts: Mapping[str, dict[str, int]],
    *,
    keep: Collection[str] = (),
    keep_parents: bool = False,
) -> dict[str, dict[str, int]]:
    """Return the counts without the names whose counts are all 0, those of `keep` excepted.

    If `keep` is empty, the root is kept. With `keep_parents` a name also stays if one below it stays; without, only
    the rows that say something stay, wherever they stand. Names that cannot be reached from the root, because one
    between is missing, are dropped. The table of fvcore drops with `keep_parents`, its tree without.

    >>> drop_zeros({"": {"flops": 2}, "a": {"flops": 0}, "a.x": {"flops": 2}, "b": {"flops": 0}})
    {'': {'flops': 2}, 'a.x': {'flops': 2}}
    """
    children = index_children(counts)
    reached = [""]
    for name in reached:  # grows as it is read: parents come before their children
        reached.extend(children.get(name, ()))
    kept: set[str] = set()
    for name in reversed(reached):
        if (
            any(counts[name].values())
            or (name in keep if keep else not name)
            or (keep_parents and any(child in kept for child in children.get(name, ())))
        ):
            kept.add(name)
    return {name: row for name, row in counts.items() if name in kept}


def format_cells(counts: Mapping[str, Mapping[str, int]], *, digits: int) -> dict[str, dict[str, str]]:
    """Return name → heading → text.

    >>> format_cells({"fc": {"flops": 1234}}, digits=2)
    {'fc': {'flops': '1.23K'}}
    """
    return {
        name: {heading: format_size(count, digits=digits) for heading, count in row.items()}
        for name, row in counts.items()
    }


def mark_uncalled(
    cells: Mapping[str, Mapping[str, str]], heading: str, uncalled: Iterable[str], mark: str
) -> dict[str, dict[str, str]]:
    """Return the cells with `mark` under a heading for each uncalled module, which gets a row if it has none.

    >>> mark_uncalled({"fc": {"flops": "0"}}, "flops", {"fc"}, "N/A")
    {'fc': {'flops': 'N/A'}}
    """
    marked = {name: dict(row) for name, row in cells.items()}
    for name in uncalled:
        marked.setdefault(name, {})[heading] = mark
    return marked


def list_operator_headings(summary: Summary) -> list[str]:
    """Return the headings that are counted by operator, in the order of the columns; none raises ValueError."""
    headings = [heading for heading in summary.columns if heading in summary.operators]
    headings += [heading for heading in summary.operators if heading not in summary.columns]
    if not headings:
        raise ValueError("this summary holds no counts by operator: choose the view by 'module'")
    return headings


def rank_modules(
    summary: Summary, *, depth: int | None = None, sort: str | None = None, top: int | None = None
) -> list[ModuleInfo]:
    """Return the modules in the order of the tree, down to `depth` modules below the root.

    With `sort` or `top`, which are those of `fvflops.views.ranking.rank`, those with most are first; none is cut off.
    """
    return rank(
        [place for place in summary.modules.modules() if depth is None or depth_of(place.name) <= depth],
        list(summary.columns),
        count=lambda place, heading: summary.columns[heading].get(place.name, 0),
        name=lambda place: place.name,
        sort=sort,
        top=top,
    )


def rank_operators(summary: Summary, *, sort: str | None = None, top: int | None = None) -> list[OperatorRow]:
    """Return the operators of the whole model, those with the largest count under the first heading first.

    `sort` and `top` are those of `rank`; none is cut off.
    """
    headings = list_operator_headings(summary)
    rows = _rank("", [summary.operators[heading] for heading in headings])
    return _sort(rows, headings, lambda row: row.operator, sort, top)


def rank_operators_by_module(
    summary: Summary, *, depth: int | None = None, sort: str | None = None, top: int | None = None
) -> list[OperatorRow]:
    """Return the operators of each module, modules in the order of the tree, down to `depth` modules below the root.

    With `sort` or `top`, which are those of `rank`, all rows stand in one order; none is cut off.
    """
    headings = list_operator_headings(summary)
    tables = [summary.by_both.get(heading, {}) for heading in headings]
    rows: list[OperatorRow] = []
    for place in summary.modules.modules():
        if depth is None or depth_of(place.name) <= depth:
            rows += _rank(place.name, [table.get(place.name, {}) for table in tables])
    return _sort(rows, headings, lambda row: row.module, sort, top)


def _sort(
    rows: list[OperatorRow],
    headings: Sequence[str],
    name: Callable[[OperatorRow], str],
    sort: str | None,
    top: int | None,
) -> list[OperatorRow]:
    places = {heading: place for place, heading in enumerate(headings)}
    return rank(rows, headings, count=lambda row, heading: row.counts[places[heading]], name=name, sort=sort, top=top)


def _rank(module: str, tables: Sequence[Mapping[str, int]]) -> list[OperatorRow]:
    labels = dict.fromkeys(label for table in tables for label in table)
    rows = [OperatorRow(module, label, tuple(table.get(label, 0) for table in tables)) for label in labels]
    return sorted(
        (row for row in rows if any(row.counts)),
        key=lambda row: (tuple(-count for count in row.counts), row.operator),
    )
