"""Counts by module, whose unknown names are errors, and the share of a model's arithmetic that a convention ignores."""

import copy
import pickle
from collections import Counter

import pytest
import torch
from torch import nn

from fvflops import FlopCountAnalysis, TrainingStepAnalysis, compare
from fvflops.analysis.fvcore_text import summarise
from fvflops.counting.uncounted_work import describe_ignored_products
from fvflops.formulas import load_table
from fvflops.reports.terminal.op_coverage import op_coverage_notes
from tests.support.models.parts import Applied


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.own = nn.Linear(4, 4)
        self.twin = self.own

    def forward(self, x):
        return self.twin(self.own(x))


@pytest.fixture
def counts():
    return FlopCountAnalysis(Shared(), torch.ones(1, 4), warn=False).by_module()


def test_an_unknown_name_raises_as_in_total(counts):
    flops = FlopCountAnalysis(Shared(), torch.ones(1, 4), warn=False)
    for read in (flops.total, counts.__getitem__, flops.by_operator):
        with pytest.raises(KeyError, match="no module is named 'onw': did you mean 'own'"):
            read("onw")
    step = TrainingStepAnalysis(Shared(), torch.ones(1, 4), loss=lambda result: result.sum())
    with pytest.raises(KeyError, match="did you mean 'own'"):
        step.by_module()["onw"]
    assert "onw" not in counts and counts.get("onw") is None


def test_another_name_of_a_shared_module_is_that_module(counts):
    assert counts["twin"] == counts["own"] == 32
    assert list(counts) == ["", "own"]


def test_operators_are_those_of_a_counter(counts):
    plain, other = Counter({"": 32, "own": 32}), Counter({"own": 2, "gone": 5})
    assert counts == plain and plain == counts and counts == dict(plain)
    assert counts != other and other != counts
    assert counts + other == plain + other == other + counts == counts + Counter(other)
    assert counts - other == plain - other and other - counts == other - plain
    assert counts | other == plain | other and counts & other == plain & other == other & counts
    total = Counter()
    total += counts
    total.update(counts)
    assert total == Counter({"": 64, "own": 64})
    assert counts.most_common(1) == [("", 32)] and counts.total() == 64


def test_copies_are_counters(counts):
    for copied in (counts.copy(), copy.copy(counts), copy.deepcopy(counts), pickle.loads(pickle.dumps(counts))):
        assert type(copied) is Counter and copied == counts and copied["onw"] == 0
    assert repr(counts) == repr(Counter(counts))


def test_operators_that_were_not_called_are_zero():
    flops = FlopCountAnalysis(Shared(), torch.ones(1, 4), warn=False)
    assert flops.by_operator()["conv"] == flops.by_module_and_operator()["own"]["conv"] == 0


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


def test_what_a_counted_module_contains_is_not_ignored():
    flops = FlopCountAnalysis(
        Applied(
            lambda self, x: nn.functional.linear(self.layers(x), self.weight),
            layers=nn.Sequential(*[nn.Linear(8, 8) for _ in range(9)]),
            weight=nn.Parameter(torch.rand(8, 8)),
        ),
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
