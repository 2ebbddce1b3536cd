"""The breakdown: what each module comes to by itself, by phase and operator, in several measures; plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from fvflops.trace.module_tree import ModuleTree


class Cell(NamedTuple):
    """Where work was done: a module's canonical name, a phase, an operator's label.

    `phase` and `operator` are "" where a measure does not know them. What the modules inside a module do is not in its
    own cells.

    >>> Cell("fc", "forward", "linear").module
    'fc'
    """

    module: str
    phase: str = ""
    operator: str = ""


@dataclass(frozen=True, slots=True)
class Measure:
    """One thing that is counted or measured: its title, its unit ("", "B" or "ns") and its value in each cell.

    `unknown` holds the op calls of a cell whose value is not known, which are in none of `values`. `note` says in a
    sentence what is counted.
    """

    title: str
    values: Mapping[Cell, int]
    unit: str = ""
    note: str = ""
    unknown: Mapping[Cell, int] = field(default_factory=dict)

    def total(self) -> int:
        """Return the sum over all cells.

        >>> Measure("FLOPs", {Cell("a"): 2, Cell("b"): 3}).total()
        5
        """
        return sum(self.values.values())


@dataclass(frozen=True, slots=True)
class Breakdown:
    """One analysed model in several measures, by module, phase and operator.

    `measures` maps a key ("flops", "macs", "activations", "parameters", "bytes", "calls", "time" ...) to its measure,
    in the order in which they are shown. `ledger`, `unknown_elements`, `unknown_places` and `about` are those of a
    Summary.
    """

    modules: ModuleTree
    measures: Mapping[str, Measure]
    ledger: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    unknown_elements: Mapping[str, int] = field(default_factory=dict)
    unknown_places: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    about: Mapping[str, str] = field(default_factory=dict)
