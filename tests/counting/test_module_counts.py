"""Counts by module: a Counter whose unknown names are errors."""

import copy
import pickle
from collections import Counter

import pytest
import torch
from torch import nn

from fvflops import FlopCountAnalysis, TrainingStepAnalysis


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
