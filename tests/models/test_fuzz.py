"""Random networks: every way to count one gives the same calls, totals, bytes and activations, and the hand count's."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

from fvflops.capture.shapes.shape_tensor import ShapeTensor
from tests.support.checkout import ROOT
from tests.support.fuzz.block import Kind, Made
from tests.support.fuzz.comparison import compare, compare_ways, explain, shrink
from tests.support.fuzz.network import KINDS, Network, Plan
from tests.support.models.parts import Applied

FROM = int(os.environ.get("FUZZ_FROM", "0"))  # the long test's first network; other numbers are other networks


def covering():
    """Return the numbers of few networks in which each kind of block, input and optimizer is."""
    plans = {seed: Plan(seed).choose() for seed in range(FROM, FROM + 300)}
    parts = {
        seed: {start, optimizer, *(kind for _, kind in blocks)} for seed, (start, _, optimizer, blocks) in plans.items()
    }
    left, seeds = set().union(*parts.values()), []
    while left:
        seeds.append(max(parts, key=lambda seed: len(parts[seed] & left)))
        left -= parts[seeds[-1]]
    return seeds


@pytest.mark.parametrize("seed", covering())
def test_every_way_to_count_a_random_network_agrees(seed):
    plan = Plan(seed)
    assert not compare(plan), explain(plan)


@pytest.mark.long
@pytest.mark.parametrize("first", range(FROM, FROM + 1000, 100))
def test_every_way_to_count_a_thousand_random_networks_agrees(first):
    failed = [seed for seed in range(first, first + 100) if compare(Plan(seed))]
    assert not failed, "\n\n".join(map(explain, map(Plan, failed)))


def test_there_are_many_kinds_and_most_have_a_hand_count():
    assert len(KINDS) >= 60
    counted = {name for seed in range(len(KINDS)) for name, made in Network(Plan(seed)).made.items() if made.macs}
    assert len({name.rpartition("_")[0] for name in counted}) >= 35


def test_a_number_alone_makes_the_network_anew_whatever_python_hashes_to():
    program = (
        "from tests.models.test_fuzz import Network, Plan, tell\nfor seed in range(3): print(tell(Network(Plan(seed))))"
    )
    other = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": str(ROOT)},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    here = [Network(Plan(seed)) for seed in range(3)]
    assert other.splitlines() == "\n".join(map(tell, here)).splitlines()
    assert "tests.support.fuzz.network.Network(Plan(seed=2, kept=None)): " in other


def tell(network):
    """Return what a network is, and its weights."""
    return f"{network.describe()} {[weight.tolist() for weight in network.parameters()]}"


def test_to_make_a_network_draws_no_random_number_of_the_program():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    Network(Plan(3))
    assert torch.equal(before, torch.get_rng_state())


def more_by_shapes(self, x):
    """Does another thing where tensors have no numbers."""
    return self.extra(x) if isinstance(x, ShapeTensor) else x


def failing(self, x):
    if isinstance(x, ShapeTensor):
        raise KeyError("nothing like it")
    return x


@pytest.fixture
def with_a_kind(monkeypatch):
    """Return what makes a plan of three blocks, the second of which is one of our own."""

    def make(made, seed=0):
        real = Plan.choose
        taken = {"linear": 0, "ours": 1, "activation": 2}

        def choose(self):
            start, _, _, _ = real(replace(self, kept=None))
            places = range(3) if self.kept is None else self.kept
            return start, True, "SGD", [(place, list(taken)[place]) for place in places]

        monkeypatch.setitem(KINDS, "ours", Kind("sequence", lambda draw: made))
        monkeypatch.setattr(Plan, "choose", choose)
        return Plan(seed)

    return make


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (
            Made(Applied(more_by_shapes, extra=nn.ReLU())),
            [f"{way}: only shapes: 1× aten::relu" for way in ("forward", "step", "recorded by shapes")],
        ),
        (Made(nn.ReLU(), macs=1), ["forward, record: 0 multiply-adds in ours_1, not 1"]),
        (Made(nn.ReLU(), backward=[3]), ["backward, real: 0 multiply-adds in ours_1, not (3,)"]),
        (Made(Applied(failing)), ["forward: KeyError: 'nothing like it'"]),
    ],
)
def test_a_difference_is_seen_and_the_message_has_the_one_block_that_makes_it(made, told, with_a_kind):
    plan = with_a_kind(made)
    lines = compare(plan)
    assert all(any(line.startswith(start) for line in lines) for start in told), lines
    assert shrink(plan, compare).kept == (1,)
    text = explain(plan)
    assert (
        text.startswith("seed 0")
        and "Network(Plan(seed=0, kept=(1,)))" in text
        and all(start in text for start in told)
    )
    assert "ours_1 of" in text and "linear_0" not in text


def test_an_op_of_unknown_cost_is_seen(with_a_kind):
    library = torch.library.Library("fuzzed", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
    block = nn.Module()
    block.forward = lambda x: torch.ops.fuzzed.twice(x.detach()) + x
    assert "forward: the cost of ['fuzzed::twice'] is unknown" in compare(with_a_kind(Made(block)))


def test_a_network_that_fails_by_itself_is_no_difference(with_a_kind):
    class Broken(nn.Module):
        calls = 0

        def forward(self, x):
            self.calls += 1
            if self.calls > 1:  # the first call finds the shape
                raise ZeroDivisionError("of its own")
            return x

    with pytest.raises(ZeroDivisionError, match="of its own"):
        compare_ways(Network(with_a_kind(Made(Broken()))))
