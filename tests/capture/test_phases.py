"""The phases: a backward op belongs to the module whose forward made it, and what checkpointing reruns is recompute."""

from collections import Counter, defaultdict
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils import checkpoint as checkpointing
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fvflops import FlopCountAnalysis, StopsAt, record
from fvflops.capture.run import record_call
from tests.support.models.parts import Applied, Parts
from tests.support.old_torch import checkpoint_to_the_end

# Tokens and widths: a linear layer of a block has 2 * 4 * 8 multiply-adds, the product at a block's end 2 * 4 * 4.
LINEAR, PRODUCT = 64, 32


def save_products(context, op, *args, **kwargs):
    saved = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


WAYS = {
    "none": lambda run, x: run(x),
    "reentrant": partial(checkpoint, use_reentrant=True),
    "not reentrant": partial(checkpoint, use_reentrant=False),
    "whole": checkpoint_to_the_end,
    "selective": partial(
        checkpoint, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(save_products)
    ),
    "nested": lambda run, x: checkpoint_to_the_end(lambda y: checkpoint(run, y, use_reentrant=False), x),
    "nested reentrant": lambda run, x: checkpoint(
        lambda y: checkpoint(run, y, use_reentrant=True), x, use_reentrant=True
    ),
}
# What is rerun of a block's two layers and the product after them. Without reentrancy torch stops as soon as the last
# tensor that it wants is there again: before the product, whose saved operand is the second layer's result. The outer
# of two nested ones reruns all, and the inner one again: until it has what it wants without reentrancy, and else all.
RERUN = {
    "none": (0, 0, 0),
    "reentrant": (1, 1, 1),
    "not reentrant": (1, 1, 0),
    "whole": (1, 1, 1),
    "selective": (0, 0, 0),
    "nested": (2, 2, 1),
    "nested reentrant": (2, 2, 2),
}


class Block(Parts):
    def forward(self, x):
        return self.down(torch.relu(self.up(x))) @ torch.eye(4)


class Net(nn.Module):
    """Two blocks, each run in one way."""

    def __init__(self, way):
        super().__init__()
        self.first = Block(up=nn.Linear(4, 8), down=nn.Linear(8, 4))
        self.second = Block(up=nn.Linear(4, 8), down=nn.Linear(8, 4))
        self.way = way

    def forward(self, x):
        for block in (self.first, self.second):
            x = WAYS[self.way](block, x)
        return x


def macs_of(model, execution, x=None):
    x = torch.randn(2, 4, requires_grad=True) if x is None else x
    trace = record_call(model, (x,), {}, loss=lambda y: y.sum(), execution=execution, stops_at=StopsAt(frozenset()))
    assert trace.about["execution"] == execution
    found = defaultdict(Counter)
    for entry in FlopCountAnalysis.from_trace(trace).counts().entries:
        if entry.macs:
            found[entry.scope[-1]][entry.phase] += entry.macs
    return found


@pytest.mark.parametrize("execution", ["shapes", "real"])
@pytest.mark.parametrize("way", WAYS)
def test_recompute_is_what_was_rerun(way, execution):
    up, down, product = RERUN[way]
    expected = {}
    for block in ("first", "second"):
        expected[f"{block}.up"] = Counter(forward=LINEAR, recompute=up * LINEAR, backward=2 * LINEAR)
        expected[f"{block}.down"] = Counter(forward=LINEAR, recompute=down * LINEAR, backward=2 * LINEAR)
        # The identity at the end needs no gradient.
        expected[block] = Counter(forward=PRODUCT, recompute=product * PRODUCT, backward=PRODUCT)
    assert {name: +counts for name, counts in macs_of(Net(way), execution).items()} == {
        name: +counts for name, counts in expected.items()
    }


@pytest.mark.parametrize("execution", ["shapes", "real"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_what_a_module_reruns_outside_of_any_other_belongs_to_it(execution, reentrant):
    found = macs_of(
        nn.Sequential(Applied(lambda self, x: checkpoint(lambda y: (y @ y.T).relu() @ y, x, use_reentrant=reentrant))),
        execution,
    )
    assert found == {"0": Counter(forward=2 * 16, recompute=(2 if reentrant else 1) * 16, backward=4 * 16)}


def test_the_phases_add_up_to_the_total_and_children_to_no_more_than_their_parent():
    x = torch.randn(2, 4, requires_grad=True)
    trace = record_call(Net("not reentrant"), (x,), {}, loss=lambda y: y.sum())
    analysis = FlopCountAnalysis.from_trace(trace, table="exact")
    assert analysis.by_phase().keys() == {"forward", "recompute", "backward"}
    assert sum(sum(labels.values()) for labels in analysis.by_phase().values()) == analysis.total()
    by_module = analysis.by_module_and_phase()
    assert {name: sum(phases.values()) for name, phases in by_module.items()} == dict(analysis.by_module())
    for name, phases in by_module.items():
        parent = by_module[name.rpartition(".")[0]]
        assert all(flops <= parent[phase] for phase, flops in phases.items())
    assert FlopCountAnalysis(Net("none"), x).by_phase().keys() == {"forward"}


def test_torch_is_as_before():
    before = [
        checkpointing._CheckpointFrame.__init__,
        checkpointing._recomputation_hook.__init__,
        checkpointing.CheckpointFunction.backward,
    ]
    macs_of(Net("reentrant"), "shapes")
    with pytest.raises(RuntimeError, match="stop"):
        record_call(Net("not reentrant"), (torch.ones(2, 4),), {}, loss=stop, execution="real")
    assert before == [
        checkpointing._CheckpointFrame.__init__,
        checkpointing._recomputation_hook.__init__,
        checkpointing.CheckpointFunction.backward,
    ]
    assert "__enter__" not in vars(checkpointing._recomputation_hook)


def stop(result):
    raise RuntimeError("stop")


def test_clipping_and_averaging_are_a_phase_of_their_own_and_no_forward():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters())
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    x, y = torch.randn(5, 8), torch.randint(0, 4, (5,))
    average.update_parameters(model)

    def train():
        nn.functional.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)

    with record(model, table="exact") as plain:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    with record(model, table="exact") as run:
        train()
        train()
        with torch.no_grad():
            nn.functional.cross_entropy(model(x), y)
    trace = run.trace()
    ops = {trace.signatures[signature].op for signature, _, phase in trace.calls if phase == "other"}
    assert {"aten::_foreach_norm.Scalar", "aten::_foreach_mul_.Tensor", "aten::_foreach_lerp_.Scalar"} <= ops
    counts, once = run.by_phase(), plain.by_phase()
    assert sum(counts["forward"].values()) == 3 * sum(once["forward"].values())  # two steps and a validation
    assert sum(counts["backward"].values()) == 2 * sum(once["backward"].values())
    parameters = sum(parameter.numel() for parameter in model.parameters())
    # A norm squares and adds, the factor multiplies, the average interpolates with three.
    assert counts["other"]["_foreach_lerp"] == 2 * 3 * parameters
    assert counts["other"]["_foreach_mul"] == 2 * parameters
    assert "_foreach_norm" not in counts["forward"]


def test_without_a_model_no_gradient_code_is_forward_as_evaluation_cannot_be_told_from_it():
    weight = torch.randn(8, 4, requires_grad=True)
    with record(table="exact") as run:
        (torch.ones(5, 8) @ weight).sum().backward()
        with torch.no_grad():
            torch.ones(5, 8) @ weight
    assert run.macs(phase="forward") == 2 * 5 * 8 * 4
    assert set(run.by_phase()) == {"forward", "backward"}
