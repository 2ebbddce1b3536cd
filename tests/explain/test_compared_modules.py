"""Planned and measured time by module: names of a real run's modules, and detection of a slow module."""

import json
import re

import pytest
import torch
from torch import nn
from torch.profiler import profile

from fvflops import estimate_step, explain_trace, plan_step
from fvflops.cli import main
from fvflops.explain.findings.planned_step import compare_modules, expect_step, match_modules
from fvflops.zoo import build
from tests.support.models.parts import Parts
from tests.support.planted.planned_work import plan, work_of
from tests.support.planted.synthetic_trace import Op, lay_out, write

TOKENS = torch.ones(2, 16, dtype=torch.int64)


class WithHead(Parts):
    """A model with a last layer that the plan lacks."""

    def forward(self, tokens):
        hidden = self.head(self.model(tokens)[..., :256])
        return hidden


def run(model, path):
    """Profile a training step and return a module's name in the trace → its name in the model, by call order."""
    names = {module: name for name, module in model.named_modules()}
    called = []
    for module in model.modules():
        module.register_forward_pre_hook(lambda module, _: called.append(names[module]))
    with profile(record_shapes=True, with_stack=True) as profiler:
        model(TOKENS).float().square().mean().backward()
    profiler.export_chrome_trace(str(path))
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("cat") == "python_function"]
    spans = [(event["ts"], -event["dur"], event["name"]) for event in events if event["name"].startswith("nn.Module: ")]
    return dict(zip([name.removeprefix("nn.Module: ") for _, _, name in sorted(spans)], called, strict=True))


def planned_tiny():
    step = plan_step(build("llama_tiny", device="meta"), TOKENS.to("meta"), mesh={"dp": 1})
    return expect_step(estimate_step(step, device="H100"))


def test_modules_of_a_run_get_the_names_of_the_plan(tmp_path):
    expected = run(build("llama_tiny"), tmp_path / "trace.json")
    explained = explain_trace(tmp_path / "trace.json")
    assert match_modules(explained.timelines[0].columns, planned_tiny().classes) == expected
    # The rows add up to the time of all ops in forward and backward.
    rows = compare_modules(explained, planned_tiny()).rows
    assert sum(row.measured for row in rows) == pytest.approx(sum(row.ns for row in explained.work()) / 1e9)
    assert {row.part for row in rows} >= {"layers.*.self_attn.q_proj", "layers.*.mlp", "lm_head"}


def test_a_class_with_another_number_of_modules_in_the_plan_is_not_matched(tmp_path):
    named = run(WithHead(model=build("llama_tiny"), head=nn.Linear(256, 4)), tmp_path / "trace.json")
    explained = explain_trace(tmp_path / "trace.json")
    found = match_modules(explained.timelines[0].columns, planned_tiny().classes)
    assert found == {
        name: None if re.match("Linear|WithHead", name) else module.removeprefix("model").removeprefix(".")
        for name, module in named.items()
    }
    compared = compare_modules(explained, planned_tiny())
    unmatched = [row for row in compared.rows if row.part == "Linear (not matched)"]
    assert unmatched and all(row.measured > 0 and row.expected == 0 for row in unmatched)
    assert (compared.matched, compared.traced) == (len(named) - 17, len(named))  # 15 of 16 Linears are the model's


def compare(case, factor, path):
    """Return the comparison of a step whose first MLP products take `factor` times as long in the forward pass."""
    planned = expect_step(plan(case)[0], rank=0)
    names = {name: f"{kind}_{number}" for kind, own in planned.classes.items() for number, name in enumerate(own)}
    slow = re.compile(r"\.mlp\.(c_fc|up_proj)$")
    work = [
        item.slower(factor) if isinstance(item, Op) and item.phase == "forward" and slow.search(item.module) else item
        for item in work_of(case)
    ]
    return compare_modules(explain_trace(write(lay_out(work, modules=names), path)), planned), planned


@pytest.mark.parametrize(("case", "module"), [("one GPU", "h.*.mlp.c_fc"), ("recompute", "layers.*.mlp.up_proj")])
def test_a_slow_module_comes_first(case, module, tmp_path):
    compared, planned = compare(case, 1.5, tmp_path / "trace.json")
    assert compared.matched == compared.traced > 0
    first = compared.rows[0]
    assert (first.part, first.phase) == (module, "forward")
    layers = [
        seconds
        for (name, phase), seconds in planned.modules.items()
        if re.sub(r"\.\d+\.", ".*.", name) == module and phase == "forward"
    ]
    assert len(layers) == 4 and first.expected == pytest.approx(sum(layers))
    assert first.measured == pytest.approx(1.5 * first.expected, rel=0.02)
    assert sum(row.expected for row in compared.rows) == pytest.approx(
        sum(seconds for (_, phase), seconds in planned.kernels.items() if phase != "optimizer")
    )


def test_modules_of_a_clean_step_are_as_planned(tmp_path):
    compared, _ = compare("one GPU", 1.0, tmp_path / "trace.json")
    assert all(abs(row.lost) <= 0.02 * row.expected for row in compared.rows)


def test_the_report_has_the_modules(tmp_path, capsys):
    compare("one GPU", 1.5, tmp_path / "trace.json")
    options = ["--model", "zoo:gpt2", "--batch", "16", "--seq", "1024", "--dtype", "bf16", "--mesh", "dp=1"]
    assert main(["explain", str(tmp_path / "trace.json"), *options]) == 0
    text = capsys.readouterr().out
    # The plan has 12 layers and the trace 4: the model and its two embeddings are matched.
    assert "Modules: 3 of 50 matched with the plan's by the order of their calls" in text
    assert main(["explain", str(tmp_path / "trace.json"), *options, "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)["compared_modules"]
    assert {row["part"] for row in rows} >= {"wte", "h.*.mlp.c_fc", "Linear (not matched)"}
