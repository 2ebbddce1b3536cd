"""The cases that counters by module class are compared on, and what such a comparison needs from both sides."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from fvflops import FlopCountAnalysis
from fvflops.formulas import FormulaTable
from fvflops.trace import Counts
from tests.layers import LAYERS, build_layer
from tests.models import MODELS, Case, build_case

# Their weights take seconds to draw, or their numbers to compute, and smaller models of their kind stand for them.
LARGE = {
    "zoo:resnet50",
    "zoo:vit_b_16",
    "zoo:gpt2",
    "torchvision:alexnet",
    "torchvision:vgg11_bn",
    "torchvision:fcn_resnet50",
}
REAL = [name for name in MODELS if name not in LARGE]
CASES = [*REAL, *LAYERS]


def build(name: str) -> Case:
    """Return a model of MODELS or a layer of LAYERS, in eval mode, and its inputs."""
    return build_case(name) if name in MODELS else build_layer(name)


class Counted(NamedTuple):
    """What fvflops says of a case: its number by module, "" being the whole, the rows that it used, and the counts."""

    by_module: dict[str, int]
    classes: frozenset[str]
    counts: Counts


def count_case(case: Case, table: FormulaTable) -> Counted:
    """Return what a table says of a case; the model is left as it was, and not kept."""
    analysis = FlopCountAnalysis(*case, table=table)
    trace = analysis.trace()
    called = {trace.regions[signature.region] for signature in trace.region_signatures}
    rows = {table.module_row(trace.modules.places[region.name].classes) for region in called if region.kind == "module"}
    by_module = {**analysis.by_module(), "": analysis.total()}
    return Counted(by_module, frozenset(row.name for row in rows if row is not None), analysis.counts())


@contextmanager
def calm() -> Iterator[None]:
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
