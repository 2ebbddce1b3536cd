"""Input of a report: counts by module and by operator, with the module tree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fvflops.text import short_repr
from fvflops.trace.module_tree import ModuleTree
from fvflops.trace.notebook_table import write_text_table

_MAX_ROWS, _MAX_COLUMNS = 40, 3  # of a table


@dataclass(frozen=True, slots=True, repr=False)
class Summary:
    """One analysed model, ready for a report.

    `columns` maps a heading ("parameters", "flops", "activations" ...) to module (or parameter) name → count, headings
    in the order in which they are shown. `operators` maps a heading to label → count, `by_both` a heading to module
    name → label → count. `uncalled` maps a heading to the modules in which no op ran. `ledger` maps a status
    ("counted", "zero_flop", "ignored", "unsupported") to op → calls, `unsupported_elements` an op to its output
    elements, and `unsupported_locations` one to module and source line → calls. `about` names the model, the table, its
    multiply_add, the inputs and the versions. `labels` maps a module whose row represents several, as made by
    `fvflops.reports.terminal.collapse`, to the text shown instead of its name.

    >>> from fvflops.trace import ModuleInfo
    >>> Summary(ModuleTree({"": ModuleInfo("", "", "Net")}), {"flops": {"": 12}}).columns["flops"][""]
    12
    """

    modules: ModuleTree
    columns: Mapping[str, Mapping[str, int]]
    operators: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    by_both: Mapping[str, Mapping[str, Mapping[str, int]]] = field(default_factory=dict)
    uncalled: Mapping[str, frozenset[str]] = field(default_factory=dict)
    ledger: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    unsupported_elements: Mapping[str, int] = field(default_factory=dict)
    unsupported_locations: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    about: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        totals = [f"{column.get('', 0):,} {heading}" for heading, column in self.columns.items()]
        return short_repr(self, self.modules.root.class_name, *totals)

    def __str__(self) -> str:
        """Return a table of the model and of its direct children; `fvflops.reports.REPORTS` has the whole one."""
        headings = list(self.columns)[:_MAX_COLUMNS]
        names = [module.name for module in self.modules.modules() if "." not in module.name]
        rows = [
            [self.label(name) or "model", *(f"{self.columns[heading].get(name, 0):,}" for heading in headings)]
            for name in names[:_MAX_ROWS]
        ]
        shown = f"{len(rows):,} of {len(names):,} modules" if len(rows) < len(names) else ""
        return write_text_table(self.modules.root.class_name, ["module", *headings], rows, shown)

    def label(self, module: str) -> str:
        """Return the text shown for a module: its name, or the label of a collapsed row."""
        return self.labels.get(module, module)
