"""The counts of fvflops to lay beside a peer's: flops, macs and parameters of a model, and the rows that were used."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from fvflops import FlopCountAnalysis, load_table, parameter_count
from fvflops.trace import Status
from tests.pieces import build


@dataclass(frozen=True, slots=True)
class Counted:
    """What fvflops says of a model by a table.

    `numbers` are named as a peer's are, `classes` those rows of the table for modules that priced something, `unknown`
    the ops that it does not know.
    """

    numbers: dict[str, int]
    classes: frozenset[str]
    unknown: frozenset[str]

    def less(self, theirs: dict[str, int]) -> dict[str, int]:
        """Return by how much each of a peer's numbers is exceeded, those that are equal left out."""
        return {name: self.numbers[name] - theirs[name] for name in theirs if self.numbers[name] != theirs[name]}


@cache
def count_by(table: str, name: str) -> Counted:
    """Return what fvflops says of a model of `tests.pieces.build`."""
    model, inputs = build(name)
    formulas = load_table(table)
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            counts = FlopCountAnalysis(model, inputs, table=formulas).counts()
    finally:
        logging.disable(logging.NOTSET)
    macs = sum(entry.macs for entry in counts.entries)
    rows = [formulas.module_row((entry.op,)) for entry in counts.entries if "::" not in entry.op]
    return Counted(
        {"flops": counts.total(), "macs": macs, "parameters": parameter_count(model)[""]},
        frozenset(row.name for row in rows if row is not None),
        frozenset(counts.ledger()[Status.UNKNOWN]),
    )


def classes_unused(table: str, names: Iterable[str]) -> frozenset[str]:
    """Return the rows of a table for modules that are used in none of the models, those of `default` left out."""
    rows = {row.name for row in load_table(table).modules.values() if row.file != "fvflops://default.yaml"}
    return frozenset(rows).difference(*(count_by(table, name).classes for name in names))
