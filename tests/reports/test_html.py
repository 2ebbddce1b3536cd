"""The HTML report without a browser: its data, that nothing in it can get out of them, and who makes it."""

import base64
import hashlib
import json
import re
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

from fvflops import ActivationCountAnalysis, ByteCountAnalysis, FlopCountAnalysis, ModelAnalysis, ProfileAnalysis
from fvflops.analysis.model_analysis import analysed_run
from fvflops.cli import main
from fvflops.counting.nested_timeline import read_times
from fvflops.reports import REPORTS
from fvflops.reports.escaping import printable
from fvflops.reports.html import render_comparison
from fvflops.reports.terminal.op_coverage import TERMS
from fvflops.views.breakdown import BETWEEN_OPS, Breakdown, Cell, MemoryCurve, read_breakdown
from fvflops.zoo import build
from tests.support.models.parts import Applied
from tests.support.reports.breakdowns import (
    break_hostile_down,
    break_net_down,
    break_run_down,
    build_tree,
    unpack_columns,
)
from tests.support.reports.hostile_names import NAMES


def read_data(page):
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return unpack_columns(json.loads(text))


def render(breakdown):
    return "".join(REPORTS["html"](breakdown))


def break_count_down():
    """Return the breakdown of a run whose time is not known."""
    net = break_net_down()
    return replace(net, measures={key: measure for key, measure in net.measures.items() if key != "time"})


def sum_by_module(measure):
    """Return what each module comes to with all inside it."""
    sums = Counter()
    for cell, value in measure.values.items():
        parts = cell.module.split(".") if cell.module else []
        for length in range(len(parts) + 1):
            sums[".".join(parts[:length])] += value
    return sums


def analyse(cls=FlopCountAnalysis, **options):
    analysis = cls(build("lenet5"), torch.ones(1, 1, 28, 28), **options)
    return analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False)


def test_data_hold_every_cell():
    net = break_net_down()
    data = read_data(render(net))
    strings, modules, rows = data["strings"], data["modules"], data["rows"]
    names = [strings[name] for name in modules["name"]]
    assert names == ["", "encoder", "attn", "mlp", "head"] and modules["parent"] == [-1, 0, 1, 1, 0]
    assert [strings[name] for name in modules["class"]] == ["Net", "Block", "Attention", "Linear", "Linear"]
    paths = list(net.modules.by_name)
    cells = [
        Cell(paths[module], data["phases"][phase], data["operators"][operator])
        for module, phase, operator in zip(rows["module"], rows["phase"], rows["operator"], strict=True)
    ]
    for record in data["measures"]:
        at = record.get("rows", range(len(cells)))
        values = {cells[row]: int(value) for row, value in zip(at, record["values"], strict=True) if value}
        assert values == net.measures[record["key"]].values
    assert data["measures"][0]["unsupported"] == [[cells.index(Cell("encoder.attn", "forward", "scan")), 2]]
    assert data["measures"][2]["values"] == [str(2**60 + 1)], "a number that JavaScript cannot hold is text"
    assert data["ledger"]["unsupported"] == [["mylib::scan", 2]] and data["about"]["table"] == "default"


def test_page_is_one_small_file_that_asks_for_nothing():
    page = render(break_count_down())
    assert len(page) < 105_000
    link = f'<a href="{TERMS}">'
    assert (
        page.count(link) == 1 and page.count('href="#h-ledger"') == 3
    )  # from each table to the coverage, on to the docs
    page = page.replace(link, "")
    assert not re.search(r"""(src|href)=["'](?!#)""", page) and "http://" not in page
    assert "https://" not in page and "innerHTML" not in page and "import(" not in page
    for tag in ("script", "style"):
        text = re.search(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL).group(1)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in page, "the policy of the page lets its own script and style through"


def test_a_page_has_the_scripts_of_the_views_that_it_has_data_for():
    names = {"timeline": "charts/timeline.js", "memory": "charts/memory.js", "roofline": "charts/roofline.js"}

    def views_of(page):
        return {name for name, path in names.items() if f'modules["{path}"]' in page}

    net, run = break_count_down(), break_run_down()
    assert views_of(render(net)) == set()
    assert views_of(render(run)) == {"timeline", "memory", "roofline"}
    curve = MemoryCurve({"allocated": [1]}, ["aten::mm"], [""], ["forward"])
    assert views_of(render(replace(net, memory=curve))) == {"memory"}
    assert views_of("".join(render_comparison(net, run))) == set(), "views are of the first report"


def test_equal_layers_take_little_space():
    def page_of(layers):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(layers)))
        return FlopCountAnalysis(model, torch.ones(1, 8)).to_html()

    few, many = page_of(10), page_of(100)
    assert len(many) - len(few) < 40 * 90
    assert len(read_data(many)["modules"]["parent"]) == 401


def test_hostile_names_stay_data():
    page = render(break_hostile_down())
    safe = render(Breakdown(build_tree(), {}))
    assert page.count("<script") == safe.count("<script") and page.count("<img") == 0
    data = read_data(page)
    assert data["strings"][1] == NAMES[0] == data["operators"][0] and NAMES[0] in data["about"]
    assert {printable(name) for name in NAMES} <= set(data["strings"])


def test_breakdown_adds_up_to_the_analyses():
    flops = analyse()
    found = read_breakdown(analysed_run(flops))
    wanted = {
        "flops": flops.by_module(),
        "activations": ActivationCountAnalysis.from_trace(flops.trace()).by_module(),
        "bytes": ByteCountAnalysis.from_trace(flops.trace()).by_module(),
        "parameters": flops.module_tree().count_parameters(),
    }
    for key, by_module in wanted.items():
        sums = sum_by_module(found.measures[key])
        assert {name: sums[name] for name in flops.module_tree().by_name} == {
            name: by_module[name] for name in flops.module_tree().by_name
        }
    assert found.measures["macs"].total() == flops.macs()
    assert found.measures["calls"].total() == sum(flops.trace().calls.values())


MEASURES = ["handles", "flops", "macs", "activations", "parameters", "bytes", "calls"]


@pytest.mark.parametrize(
    ("cls", "keys"),
    [
        (ActivationCountAnalysis, MEASURES[1:]),
        (ByteCountAnalysis, ["parameters", "bytes", "calls"]),
        (ModelAnalysis, ["handles", "parameters", "bytes", "calls"]),
    ],
)
def test_every_analysis_makes_a_page(cls, keys):
    analysis = analyse(cls)
    if cls is ModelAnalysis:
        analysis.set_op_handle("aten::linear", lambda call: 5)
    data = read_data(analysis.to_html())
    found = [measure["key"] for measure in data["measures"]]
    assert [key for key in found if key in MEASURES] == keys
    own = read_breakdown(analysed_run(analysis)).measures[analysis._metric or "handles"]
    assert own.total() == analysis.total() > 0


def test_ops_without_a_formula_are_unknown_and_not_nothing():
    def model(x):
        return torch.special.airy_ai(x)

    analysis = FlopCountAnalysis(model, torch.ones(3), table="fvcore").unsupported_ops_warnings(False)
    data = read_data(analysis.to_html())
    unknown = dict(data["ledger"]["unsupported"])
    assert sum(unknown.values()) >= 1
    assert sum(calls for _, calls in data["measures"][0]["unsupported"]) == sum(unknown.values())
    assert "unsupported, so not counted" in analysis._repr_html_()


def test_time_is_that_of_ops_and_of_what_lies_between():
    profile = ProfileAnalysis(build("lenet5"), torch.ones(1, 1, 28, 28), warmup=0, repeat=1, loss=lambda y: y.sum())
    time = read_breakdown(analysed_run(profile)).measures["time"]
    times = read_times(profile.trace())
    for phase in ("forward", "backward"):
        ops = sum(value for cell, value in time.values.items() if cell.phase == phase and cell.operator != BETWEEN_OPS)
        assert ops == sum(timing.total for timing in times.operators[phase].values())
    forward = sum(value for cell, value in time.values.items() if cell.phase == "forward" and cell.operator)
    assert forward >= times.modules["forward"][""].total


def test_command_writes_the_page_that_to_html_returns(tmp_path):
    path = tmp_path / "lenet5.html"
    assert main(["count", "zoo:lenet5", "--format", "html", "--output", str(path)]) == 0
    page = analyse().to_html(tmp_path / "same.html")
    assert (tmp_path / "same.html").read_text(encoding="utf-8") == page
    written = read_data(path.read_text(encoding="utf-8"))
    assert written["measures"] == read_data(page)["measures"]
    assert written["measures"][0]["values"] and "<title>LeNet5 · fvflops</title>" in page


def test_profile_command_writes_a_page_with_times(tmp_path, capsys):
    path = tmp_path / "page.html"
    assert main(["profile", "zoo:lenet5", "--repeat", "1", "--backward", "--html", str(path)]) == 0
    data = read_data(path.read_text(encoding="utf-8"))
    assert data["measures"][-1]["key"] == "time" and data["phases"] == ["", "forward", "backward"]
    other = tmp_path / "other.html"
    assert main(["profile", "zoo:lenet5", "--repeat", "1", "--backward", "--output", str(other)]) == 0
    assert set(read_data(other.read_text())) == set(read_data(path.read_text())), "one page, by either option"
    assert main(["profile", "zoo:lenet5", "--top", "3", "--output", str(other)]) == 2
    assert main(["profile", "zoo:lenet5", "--html", str(path), "--weight", "macs"]) == 2
    assert "--weight sets" in capsys.readouterr().err, "the page has all measures"
    assert main(["profile", "zoo:lenet5", "--html", str(tmp_path)]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_an_output_that_cannot_be_written_is_told_before_the_work(tmp_path, capsys):
    ran = []

    def forward(self, x):
        ran.append(1)
        return x

    with pytest.raises(OSError, match="cannot be written"):
        FlopCountAnalysis(Applied(forward), torch.ones(1)).to_html(tmp_path)
    assert not ran
    missing = tmp_path / "no" / "report.html"
    assert main(["count", "zoo:no_such_model", "--format", "html", "--output", str(missing)]) == 2
    assert "there is no folder" in capsys.readouterr().err and not missing.parent.exists()
    assert main(["count", "zoo:no_such_model", "--format", "html", "--output", "/dev/null/report.html"]) == 2
    assert "cannot be written" in capsys.readouterr().err, "before the model is looked for"
