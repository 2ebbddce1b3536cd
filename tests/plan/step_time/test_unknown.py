"""Work of a step whose time is not known: it is named, and not taken as none."""

import json
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from torch import nn

from fvflops import Efficiency, estimate_step, plan_step
from fvflops.plan.step_time.kernel_times import UNKNOWN, kernel_of
from fvflops.plan.step_time.step_program import read_step
from fvflops.plan.step_time.step_time_report import estimate_report
from fvflops.reports.formats import write_document
from fvflops.trace import Signature
from fvflops.zoo import build
from tests.support.models.parts import Parts

EFFICIENCY = Efficiency(source="a test")
# A custom op without a formula, and one that communicates without a rule.
OPS = ("fvflops_step::scan", "symm_mem::fvflops_reduce")


class Net(Parts):
    def forward(self, x):
        hidden = self.layer(x)
        scanned = torch.ops.fvflops_step.scan(hidden.detach())
        reduced = torch.ops.symm_mem.fvflops_reduce(hidden.detach())
        return (hidden + scanned + reduced).view(-1)


@pytest.fixture(scope="module")
def step():
    """Plan of a step with two microbatches, in each of which both ops run."""
    with ExitStack() as stack:
        for op in OPS:
            space, _, name = op.partition("::")
            library = stack.enter_context(torch.library._scoped_library(space, "FRAGMENT"))
            library.define(f"{name}(Tensor x) -> Tensor")
            library.impl(name, torch.clone, "CompositeExplicitAutograd")
        yield plan_step(
            Net(layer=nn.Linear(8, 8)), torch.ones(4, 8), mesh={"dp": 2}, microbatches=2, optimizer=torch.optim.AdamW
        )


def test_a_step_names_what_it_has_no_time_for(step):
    estimate = estimate_step(step, device="H100", efficiency=EFFICIENCY)
    assert estimate.unknown == {"symm_mem::fvflops_reduce": 2}
    assert estimate.bytes_only == {"fvflops_step::scan": 2}
    document = estimate_report(estimate)
    text = " ".join(write_document(document).split())
    assert "Of unknown time, so not in the step: symm_mem::fvflops_reduce (2 calls)." in text
    assert "Of unknown FLOPs, so in the step with the time of their bytes: fvflops_step::scan (2 calls)." in text
    data = json.loads(write_document(document, "json"))
    assert data["unknown_time"] == {"symm_mem::fvflops_reduce": 2}
    assert data["time_of_bytes_only"] == {"fvflops_step::scan": 2}


def test_calls_that_were_not_run_are_named_too(step):
    opaque = Signature("mylib::fused", (), (), (), "mylib::fused(...)")
    assert kernel_of(opaque) == UNKNOWN
    (rank,) = step.ranks
    passes = {
        action: replace(item, added=((opaque, "optimizer", 3),)) if action.kind == "optimizer" else item
        for action, item in rank.step.passes.items()
    }
    program = read_step([replace(rank, step=replace(rank.step, passes=passes))])
    assert program.count("unknown") == {"symm_mem::fvflops_reduce": 2, "mylib::fused": 3}


def test_all_work_of_a_model_has_a_time():
    step = plan_step(
        build("llama_tiny", device="meta"), torch.ones(2, 16, dtype=torch.int64), mesh={"fsdp": 2, "tp": 2}
    )
    program = read_step(step.ranks)
    assert not program.count("unknown") and not program.count("bytes_only")
