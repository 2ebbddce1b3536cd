"""The share of a model's arithmetic that a convention ignores is said where it is most of it."""

import pytest
import torch
from torch import nn

from fvflops import FlopCountAnalysis, compare
from fvflops.analysis.fvcore_text import summarise
from fvflops.counting.uncounted_work import describe_ignored_products
from fvflops.formulas import load_table
from fvflops.reports.terminal.op_coverage import op_coverage_notes
from tests.support.models.parts import Parts

NODES, EDGES, WIDTH, STEPS = 10, 50, 8, 3


class Propagate(nn.Module):
    """APPNP: messages along weighted edges are summed at their targets; a linear layer is optional."""

    def __init__(self, outputs=0):
        super().__init__()
        self.linear = nn.Linear(WIDTH, outputs, bias=False) if outputs else None

    def forward(self, x, source, target, weight):
        hidden = x
        for _ in range(STEPS):
            hidden = torch.zeros_like(x).index_add_(0, target, hidden[source] * weight[:, None])
        return hidden if self.linear is None else self.linear(hidden)


EDGE_INPUTS = torch.randint(NODES, (EDGES,)), torch.randint(NODES, (EDGES,)), torch.rand(EDGES)
INPUTS = torch.rand(NODES, WIDTH), *EDGE_INPUTS
# A product and a sum for each edge and feature.
IGNORED = STEPS * 2 * EDGES * WIDTH


def sentence_of(outputs, table, handle=None):
    analysis = FlopCountAnalysis(Propagate(outputs), INPUTS, table=table, warn=False)
    if handle is not None:
        analysis.set_op_handle(handle, lambda call: 10**6)
    notes = [note for note in op_coverage_notes(summarise(analysis)) if "of this model is ignored" in note]
    return "".join(notes)


@pytest.mark.parametrize("table", ["default", "fvcore", "torch"])
@pytest.mark.parametrize("outputs", [0, 1, 14, 16])
def test_the_share_of_what_is_ignored(table, outputs):
    counted = 2 * NODES * WIDTH * outputs
    share = f"{round(1000 * IGNORED / (IGNORED + counted)) / 10:.1f}% of the arithmetic"
    subject = "All arithmetic" if not outputs else share if counted < IGNORED else ""
    assert sentence_of(
        outputs, table
    ) == f"{subject} of this model is ignored by this convention; see --convention exact." * bool(subject)


def test_exact_and_handles_ignore_nothing():
    assert not sentence_of(0, "exact")
    assert not sentence_of(0, "default", handle="aten::index_add_")


def test_a_comparison_says_it_of_each_convention():
    comparison = compare(Propagate(), INPUTS, tables=["default", "fvcore", "exact"])
    assert [count.ignored_work for count in comparison.totals.values()] == ["all", "all", ""]
    text = " ".join(str(comparison).split())
    assert "All arithmetic of this model is ignored by default, fvcore; see --convention exact." in text


def test_nothing_is_said_of_zero_work():
    notes = op_coverage_notes(summarise(FlopCountAnalysis(nn.Flatten(), INPUTS[0])))
    assert notes and "of this model is ignored" not in "".join(notes)


class MostlyLinear(Parts):
    """Layers that thop counts as modules, and a product that it does not see."""

    def forward(self, x):
        return nn.functional.linear(self.layers(x), self.weight)


def test_what_a_counted_module_contains_is_not_ignored():
    flops = FlopCountAnalysis(
        MostlyLinear(layers=nn.Sequential(*[nn.Linear(8, 8) for _ in range(9)]), weight=nn.Parameter(torch.rand(8, 8))),
        torch.rand(1, 8),
        table="thop",
        warn=False,
    )
    assert not [note for note in op_coverage_notes(summarise(flops)) if "of this model is ignored" in note]
    products = describe_ignored_products(flops.trace(), flops.counts(), load_table("thop"))
    assert products == "aten::linear ×1 (10.0% of the multiply-adds)"


@pytest.mark.parametrize("table", ["default", "exact", "deepspeed"])
def test_conventions_of_every_product_ignore_none(table):
    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    flops = FlopCountAnalysis(layer, torch.rand(1, 4, 8), table=table, warn=False)
    assert not describe_ignored_products(flops.trace(), flops.counts(), load_table(table))
