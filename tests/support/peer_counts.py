"""What fvflops says of the cases that it is compared with other counters on, and what such a comparison needs."""

import logging
import warnings
from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch

from fvflops import FlopCountAnalysis, load_table, parameter_count
from fvflops.formulas import FormulaTable
from fvflops.trace import Counts, Status
from tests.support.models.layers import LAYERS
from tests.support.models.peer_cases import build
from tests.support.models.whole_models import MODELS, USUAL, Case

# Models whose random weights take longest to make, and that show a peer nothing which others do not.
LARGE = frozenset({"torchvision:alexnet", "torchvision:vgg11_bn", "zoo:gpt2", "zoo:vit_b_16"})
REAL = [name for name in MODELS if name not in LARGE]
CASES = [*REAL, *LAYERS]
USUAL_CASES = [*USUAL, *LAYERS]


@dataclass(frozen=True, slots=True)
class Counted:
    """What fvflops says of a case by a table.

    `by_module` is its number by module, "" being the whole; `classes` are the used rows of the table for modules.
    """

    by_module: dict[str, int]
    parameters: int
    classes: frozenset[str]
    counts: Counts

    @property
    def numbers(self) -> dict[str, int]:
        """The numbers of the whole, named as a peer's are."""
        macs = sum(entry.macs for entry in self.counts.entries)
        return {"flops": self.counts.total(), "macs": macs, "parameters": self.parameters}

    @property
    def unknown(self) -> frozenset[str]:
        """The ops that the table does not know."""
        return frozenset(self.counts.ledger()[Status.UNSUPPORTED])

    def less(self, theirs: dict[str, int]) -> dict[str, int]:
        """Return by how much each of a peer's numbers is exceeded, those that are equal left out."""
        ours = self.numbers
        return {name: ours[name] - theirs[name] for name in theirs if ours[name] != theirs[name]}


def count_case(case: Case, table: FormulaTable) -> Counted:
    """Return what a table says of a case; the model is left as it was, and not kept."""
    analysis = FlopCountAnalysis(*case, table=table)
    trace = analysis.trace()
    called = {trace.regions[signature.region] for signature in trace.region_signatures}
    rows = {
        table.module_row(trace.modules.by_name[region.name].classes) for region in called if region.kind == "module"
    }
    by_module = {**analysis.by_module(), "": analysis.total()}
    classes = frozenset(row.name for row in rows if row is not None)
    return Counted(by_module, parameter_count(case[0])[""], classes, analysis.counts())


@cache
def count_by(table: str, name: str) -> Counted:
    """Return what a table says of a case of `tests.support.models.peer_cases.build`."""
    with calm():
        return count_case(build(name), load_table(table))


def classes_unused(table: str, names: Iterable[str]) -> frozenset[str]:
    """Return the rows of a table for modules that are used in none of the models, without `default`'s."""
    rows = {row.name for row in load_table(table).modules.values() if row.file != "fvflops://default.yaml"}
    return frozenset(rows).difference(*(count_by(table, name).classes for name in names))


@contextmanager
def calm():
    """Keep peers from warning, and the models, which are small, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
        torch.set_num_threads(threads)
