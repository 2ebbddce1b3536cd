"""The tool that measures on a GPU, as far as a CPU can test it: comparison, counters, page."""

import sys

import pytest
import torch
from torch import nn

from fvflops.zoo.gpt2 import GPT2Config
from tests.support.cuda_cases.runs import differences, run_all_ways
from tests.support.tools import load_tool

counters = load_tool("gpu_checks.counters")
_FMA, _TENSOR, read_counters = counters._FMA, counters._TENSOR, counters.read_counters
write_page = load_tool("gpu_checks.page").write_page

RUN = {"ops": {"forward a": 1}, "calls": {"forward a(1) -> 2": 1}, "flops": 4, "macs": 2, "exact": 5, "unsupported": {}}


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({}, []),
        ({"macs": 3}, ["macs 3, real 2"]),
        ({"calls": {"forward a(1) -> 3": 1}}, ["calls: forward a(1) -> 2: 0, real 1; forward a(1) -> 3: 1, real 0"]),
        ({"ops": {"forward b": 1}}, ["ops: forward a: 0, real 1; forward b: 1, real 0"]),
        ({"unsupported": {"a": 1}}, ["unsupported {'a': 1}, real {}"]),
        ({"error": "no"}, ["shape execution: no"]),
    ],
)
def test_the_comparison_says_what_differs(changed, found):
    assert differences(RUN | changed, RUN) == found


def test_a_model_is_counted_in_every_way_that_there_is():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    found = run_all_ways(model, (torch.ones(2, 3),), {}, train=True)
    assert found.keys() == ({"real", "shapes", "asked"} if torch.cuda.is_available() else {"without"})
    assert all(run["macs"] == 2 * 2 * 3 * 4 for run in found.values())


def test_counters_are_summed_by_range():
    rows = [
        ["ID", "Range", _FMA, _TENSOR[0]],
        ["", "", "inst", ""],
        ["0", "<default domain>:fvflops: a/b:none", "1,000", "7"],
        ["1", "<default domain>:fvflops: a/b:none", "0", "1"],
        ["2", "", "5", "5"],
    ]
    text = "\n".join(",".join(f'"{cell}"' for cell in row) for row in rows)
    assert read_counters(text) == {"a/b": 2008}


def test_the_page_says_what_was_measured_and_what_failed():
    def entry(found, errors=()):
        return {"found": found, "errors": list(errors), "seconds": 1}

    page = write_page(
        {
            "models": entry({"m, forward": {"real": RUN, "shapes": RUN, "asked": RUN | {"macs": 3}}}),
            "models without CUDA": entry({"m, forward": {"without": {"error": "no"}}}),
            "counters": entry({"product": {"counted": 8, "executed": 10}}),
            "memory": entry({"net": {"forward": [98, 100], "first step": [1, 1], "second step": [3, 2]}}),
            "state": entry({}, [{"share": 0, "error": "stopped after 240 s"}]),
        }
    )
    assert "# Measured on a GPU" in page and "## Strides" not in page
    assert '| m, forward | `device="cuda"` | macs 3, real 2 |' in " ".join(page.split())
    assert "shape execution: no" in page
    assert "1.2500" in page and "(-2.0%)" in page and "(+50.0%)" in page
    assert "state, part 0, failed: stopped after 240 s" in page


def test_a_loop_is_metered_and_its_trace_annotated():
    loops = load_tool("gpu_checks.loops")
    config = GPT2Config(vocab_size=64, positions=16, width=16, layers=1, heads=2, dropout=0.0)

    def make():
        return loops.Loop(config, 2, 16, "cpu")

    metered = loops.meter_steps(make(), rounds=3, steps=2)
    annotated = {f"annotated, {shapes}": loops.annotate_steps(make(), shapes=shapes) for shapes in (False, True)}
    tokens, width = 2 * 16, 16
    # Forward: 12 width^2 of a block, 2 length * width of its attention and the vocabulary; twice that backward.
    assert metered["figures"]["macs"] == 3 * tokens * (12 * width**2 + 2 * 16 * width + 64 * width)
    assert metered["figures"]["tokens"] == tokens and metered["memory predicted"] > 0
    assert all(item["share"] == 1 and item["flops"] == item["recorded"] > 0 for item in annotated.values())
    page = write_page({"loops": {"found": {"metered, eager": metered, **annotated}, "errors": [], "seconds": 1}})
    assert "## Loops and their traces" in page and f"{metered['ratio']:.4f}" in page and "100.00%" in page


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is said where there is no CUDA device")
def test_without_a_device_the_tool_says_so(capsys, monkeypatch):
    tool = load_tool("gpu.py")
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    assert tool.main() == 2
    assert "no CUDA device" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="the part needs no device, and is quick without one")
@pytest.mark.parametrize("part", ["steps without CUDA", pytest.param("outside", marks=pytest.mark.long)])
def test_a_part_runs_in_a_process_of_its_own(part, tmp_path):
    said = []
    result = load_tool("gpu.py").measure([part], tmp_path, said.append)[part]
    assert not result["errors"] and len(said) == 1 and len(result["found"]) == {"outside": 4}.get(part, 35)
    assert all(("error" in item) == (part == "outside") for item in result["found"].values())
