"""Costs of modules and operators before and after a change, and their differences."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from fvflops import paths
from fvflops.reports import html, notebook_page
from fvflops.reports.display import Displayed
from fvflops.reports.formats import write_document
from fvflops.text import short_repr, shown_by_fields
from fvflops.units import format_short
from fvflops.views.analysed_run import AnalysedRun
from fvflops.views.breakdown import Breakdown, read_breakdown

MEASURES = ("flops", "macs", "activations", "parameters")


class Costs(NamedTuple):
    """Costs of a module or operator; `calls` excludes zero-FLOP ops."""

    flops: int = 0
    macs: int = 0
    activations: int = 0
    parameters: int = 0
    calls: int = 0


def sum_costs(costs: Iterable[Costs]) -> Costs:
    """Return the sum of several Costs.

    >>> sum_costs([Costs(flops=2, calls=1), Costs(flops=3, parameters=6)]), sum_costs([]).flops
    (Costs(flops=5, macs=0, activations=0, parameters=6, calls=1), 0)
    """
    return Costs(*map(sum, zip(*costs, strict=True)))


class Change(NamedTuple):
    """One number before and after.

    >>> Change(40, 50).difference, Change(40, 50).ratio, Change(0, 3).ratio
    (10, 1.25, None)
    """

    before: int
    after: int

    @property
    def difference(self) -> int:
        """After minus before."""
        return self.after - self.before

    @property
    def ratio(self) -> float | None:
        """After divided by before; None where before is 0."""
        return self.after / self.before if self.before else None


@shown_by_fields
class Changed:
    """Something with costs before and after."""

    __slots__ = ()
    before: Costs
    after: Costs

    def change(self, measure: str) -> Change:
        """Return the change of one cost, a name in `MEASURES` or "calls"."""
        return Change(getattr(self.before, measure), getattr(self.after, measure))


@dataclass(frozen=True, slots=True, repr=False)
class OperatorChange(Changed):
    """An operator, by its label, with its costs before and after.

    `status` is the least certain one among its calls, in the order "counted", "zero_flop", "ignored" (ignored by
    the convention) and "unsupported".
    """

    label: str
    status: str
    before: Costs
    after: Costs


@dataclass(frozen=True, slots=True, repr=False)
class ModuleChange(Changed):
    """A module with its costs before and after, without its submodules.

    `before_name` is None for a module that was added, `after_name` for one that was removed. `operators` are the
    operators whose costs differ. `parent_renamed` means that its name differs only by its parent's.
    """

    before_name: str | None
    after_name: str | None
    before_class: str
    after_class: str
    before: Costs
    after: Costs
    operators: tuple[OperatorChange, ...] = ()
    parent_renamed: bool = False

    @property
    def name(self) -> str:
        """The name after the change; for a removed module the name before."""
        return (self.before_name if self.after_name is None else self.after_name) or ""

    @property
    def kind(self) -> str:
        """One of "added", "removed", "changed" (and possibly renamed), "renamed" (only) and "unchanged"."""
        if self.before_name is None:
            return "added"
        if self.after_name is None:
            return "removed"
        if self.before != self.after or self.operators or self.before_class != self.after_class:
            return "changed"
        return "renamed" if self.before_name != self.after_name else "unchanged"


@shown_by_fields
class Side(NamedTuple):
    """One of the two runs: its name, inputs, calls by unsupported op, and notes for the report."""

    name: str
    inputs: str = ""
    unsupported: Mapping[str, int] = {}
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, repr=False)
class ModelDifference(Displayed):
    """Differences between two runs by module and operator; true if there are any.

    `modules` are all modules: the second run's in their order, then the removed ones; `operators` are all
    operators. The costs of the modules add up to the runs' costs. `print` shows the report, and a notebook an
    interactive page of both models, the `runs`, with the names of the report.

    >>> same = ModuleChange("fc", "fc", "Linear", "Linear", Costs(6), Costs(6))
    >>> wider = ModuleChange("out", "out", "Linear", "Linear", Costs(6), Costs(9))
    >>> difference = ModelDifference(Side("a"), Side("b"), modules=(same, wider))
    >>> bool(difference), difference.total(), [module.name for module in difference.by_module()]
    (True, Change(before=12, after=15), ['out'])
    """

    _report = "fvflops.comparison.diff_report:shortened_report"

    before: Side
    after: Side
    table: str = ""
    multiply_add: int = 1
    modules: tuple[ModuleChange, ...] = ()
    operators: tuple[OperatorChange, ...] = ()
    runs: tuple[AnalysedRun, AnalysedRun] | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        before, after = self.total()
        flops = f"FLOPs {format_short(before)} → {format_short(after)}"
        return short_repr(self, "", flops, f"{len(self.by_module()):,} of {len(self.modules):,} modules differ")

    def __bool__(self) -> bool:
        return any(module.kind != "unchanged" for module in self.modules) or bool(self.by_operator())

    def total(self, measure: str = "flops") -> Change:
        """Return the change of one cost of the model, a name in `MEASURES` or "calls"."""
        before, after = (sum_costs(getattr(module, side) for module in self.modules) for side in ("before", "after"))
        return Change(getattr(before, measure), getattr(after, measure))

    def by_module(self, measure: str = "flops") -> tuple[ModuleChange, ...]:
        """Return the modules that differ in cost, class or name, the largest difference first."""
        changed = [module for module in self.modules if module.kind != "unchanged"]
        return tuple(sorted(changed, key=lambda module: _rank(module, measure)))

    def by_operator(self, measure: str = "flops") -> tuple[OperatorChange, ...]:
        """Return the operators whose costs differ, the largest difference first."""
        changed = [operator for operator in self.operators if operator.before != operator.after]
        return tuple(sorted(changed, key=lambda operator: _rank(operator, measure)))

    def to_markdown(self) -> str:
        """Return the report in GitHub's Markdown."""
        return write_document(self._document(), "markdown")

    def to_json(self) -> str:
        """Return all differences as JSON text, with exact numbers."""
        return write_document(self._document(), "json")

    def to_html(self, path: str | os.PathLike[str] | None = None, *, measure: str = "flops") -> str:
        """Return an interactive page that compares both models, opened on a measure; write it to `path` if given.

        Modules are matched by name there.

        >>> import torch
        >>> from fvflops import diff
        >>> page = diff(torch.nn.Linear(4, 8), torch.nn.Linear(4, 16), torch.ones(3, 4)).to_html()
        >>> "<title>before → after · fvflops</title>" in page
        True
        """
        if path is not None:
            paths.check_writable(os.fspath(path))
        if self.runs is None:
            raise ValueError("this difference has no runs to show as a page: make it by fvflops.diff")
        names = (self.before.name, self.after.name)
        pages = [_open_on(measure, read_breakdown(run), name) for run, name in zip(self.runs, names, strict=True)]
        page = "".join(html.render_comparison(*pages))
        if path is not None:
            paths.write_text(os.fspath(path), page)
        return page

    def _repr_html_(self) -> str:
        document = self._document()
        if self.runs is None:
            return notebook_page.render_document(document)
        return notebook_page.put_in_frame(self.to_html(), notebook_page.write_tables(document), title=document.title)

    def _repr_markdown_(self) -> str:
        return self.to_markdown()


def _rank(item: ModuleChange | OperatorChange, measure: str) -> tuple[int, ...]:
    others = [name for name in (*MEASURES, "calls") if name != measure]
    return tuple(-abs(item.change(name).difference) for name in (measure, *others))


def _open_on(measure: str, breakdown: Breakdown, name: str) -> Breakdown:
    """Return a breakdown for a page, which opens on the first measure."""
    first = {key: value for key, value in breakdown.measures.items() if key == measure}
    return replace(breakdown, name=name, measures=first | dict(breakdown.measures))
