"""The difference of two runs: hand counts of three real changes, renamed modules, and invalid files."""

import csv
import io
import json
import os
import re
import sys
from collections import OrderedDict
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from torch import nn

import fvflops
from fvflops import FlopCountAnalysis, Trace
from fvflops.analysis.trace_file import load_trace
from fvflops.cli import main
from fvflops.comparison.diff_report import difference_report
from fvflops.comparison.differences import MEASURES
from fvflops.comparison.module_matching import match_modules
from fvflops.formulas import TableError
from fvflops.reports.formats import FORMATS, write_document
from fvflops.trace import TraceError
from fvflops.zoo.llama import CONFIGS, Llama
from tests.support.git_repository import FACTORY
from tests.support.git_repository import repository as repository
from tests.support.models.parts import Applied
from tests.support.reports.report_formats import check_report, output_of, run

ROWS, WIDTH = 3, 8
X = torch.ones(ROWS, 4)


def net(width=WIDTH, act=nn.ReLU):
    return nn.Sequential(nn.Linear(4, width), act(), nn.Linear(width, 2))


def tiny(kv_heads):
    return Llama(replace(CONFIGS["llama_tiny"], kv_heads=kv_heads))


def changes(difference, measure="flops"):
    return {module.name: module.change(measure).difference for module in difference.by_module(measure)}


def matches(before, after, x=X):
    """Return (before, after) of the modules whose names differ."""
    difference = fvflops.diff(before, after, x)
    return {(module.before_name, module.after_name) for module in difference.by_module()}


def test_a_layer_is_widened():
    difference = fvflops.diff(net(8), net(16), X)
    # Linear(4, n) on 3 rows: 3 * 4 * n multiply-adds, 3 * n outputs, 4 * n + n parameters. Linear(n, 2): 3 * n * 2
    # multiply-adds, 3 * 2 outputs, 2 * n + 2 parameters.
    assert changes(difference) == {"0": 3 * 4 * 8, "2": 3 * 8 * 2}
    assert changes(difference, "activations") == {"0": 3 * 8, "2": 0}
    assert changes(difference, "parameters") == {"0": 4 * 8 + 8, "2": 8 * 2}
    assert [module.kind for module in difference.by_module()] == ["changed", "changed"]
    assert difference.total() == (3 * 4 * 8 + 3 * 8 * 2, 2 * (3 * 4 * 8 + 3 * 8 * 2))
    assert difference.total().ratio == 2
    (linear,) = difference.by_operator()
    assert (linear.label, linear.change("flops"), linear.change("calls")) == ("linear", (144, 288), (2, 2))


def test_an_activation_is_replaced():
    before, after = net(), net(act=nn.GELU)
    exact = fvflops.diff(before, after, X, table="exact")
    # By the table exact an element costs 1 flop in relu; in gelu by erf 12, the erf itself 8 of them.
    assert changes(exact) == {"1": ROWS * WIDTH * (12 - 1)}
    assert {operator.label: operator.change("flops").difference for operator in exact.by_operator()} == {
        "gelu": ROWS * WIDTH * 12,
        "relu": -ROWS * WIDTH,
    }
    # The table default ignores both, and the replacement is reported all the same.
    default = fvflops.diff(before, after, X)
    assert default
    assert default.total() == (144, 144)
    (module,) = default.by_module()
    assert (module.name, module.kind, module.before_class, module.after_class) == ("1", "changed", "ReLU", "GELU")
    assert "Changed at the same cost: 1 (ReLU → GELU, with gelu)." in str(default)


def test_attention_is_made_grouped_query():
    difference = fvflops.diff(tiny(4), tiny(1), torch.ones(1, 16, dtype=torch.int64))
    # Keys and values of 2 layers for 16 tokens, from 64 to 1 * 16 of 4 * 16 columns; the number of scores is unchanged.
    less = -16 * 64 * 48
    names = [f"layers.{layer}.self_attn.{part}_proj" for layer in (0, 1) for part in "kv"]
    assert changes(difference) == dict.fromkeys(names, less)
    assert difference.total("macs").difference == 4 * less
    assert changes(difference, "parameters") == dict.fromkeys(names, -64 * 48)
    assert changes(difference, "activations") == dict.fromkeys(names, -16 * 48)
    assert [operator.label for operator in difference.by_operator()] == ["linear"]
    assert "layers.0–1.self_attn.k_proj × 2" in write_document(difference_report(difference))
    assert "-98.3K" in str(difference)


@pytest.mark.parametrize("table", ["default", "exact", "fvcore"])
@pytest.mark.parametrize("measure", MEASURES)
def test_modules_and_operators_add_up_to_the_total(table, measure):
    kinds = {"default": nn.GELU, "exact": nn.Tanh, "fvcore": nn.Sigmoid}
    before = nn.Sequential(net(8), nn.LayerNorm(2))
    after = nn.Sequential(net(16, kinds[table]), nn.LayerNorm(2), nn.Linear(2, 3))
    difference = fvflops.diff(before, after, X, table=table)
    analyses = [FlopCountAnalysis(model, X, table=table) for model in (before, after)]
    total = difference.total(measure)
    assert total.difference == sum(changes(difference, measure).values()) != 0
    if measure != "parameters":
        assert total.difference == sum(operator.change(measure).difference for operator in difference.by_operator())
    if measure == "flops":
        assert total == tuple(analysis.total() for analysis in analyses)
    if measure == "parameters":
        assert total == tuple(sum(p.numel() for p in model.parameters()) for model in (before, after))


def test_equal_models_do_not_differ():
    difference = fvflops.diff(tiny(2), tiny(2), torch.ones(1, 16, dtype=torch.int64))
    assert not difference
    assert not difference.by_module()
    assert not difference.by_operator()
    assert "No difference in 29 modules" in str(difference)
    assert json.loads(difference.to_json())["modules"] == []


def test_other_inputs_change_every_module_with_costs():
    difference = fvflops.diff((net(), X), (net(), torch.ones(2 * ROWS, 4)))
    assert changes(difference) == {"0": 96, "2": 48}
    assert difference.before.inputs == "float32[3, 4]"
    assert difference.total("parameters").difference == 0


def named(self, x):
    for part in self.children():
        x = part(x)
    return x


def test_a_renamed_module_is_matched():
    before = Applied(named, first=nn.Linear(4, 8), act=nn.ReLU(), last=nn.Linear(8, 2))
    after = Applied(named, embed=nn.Linear(4, 8), relu=nn.ReLU(), last=nn.Linear(8, 2))
    assert matches(before, after) == {("first", "embed"), ("act", "relu")}
    difference = fvflops.diff(before, after, X)
    assert {module.kind for module in difference.by_module()} == {"renamed"}
    assert "Renamed only: first → embed, act → relu." in str(difference)


def test_submodules_of_a_renamed_module_are_matched():
    before, after = (
        Applied(named, stem=net(), head=nn.Linear(2, 3)),
        Applied(named, backbone=net(), head=nn.Linear(2, 3)),
    )
    difference = fvflops.diff(before, after, X)
    assert {(module.before_name, module.after_name) for module in difference.by_module()} == {
        ("stem", "backbone"),
        *((f"stem.{index}", f"backbone.{index}") for index in range(3)),
    }
    text = str(difference)
    assert "stem → backbone." in text
    assert "Renamed with their parents: 3 modules." in text


def test_a_module_that_is_renamed_and_widened_is_one_change():
    before, after = Applied(named, stem=net(8), out=nn.Identity()), Applied(named, body=net(16), out=nn.Identity())
    difference = fvflops.diff(before, after, X)
    assert changes(difference)["body.0"] == 96
    assert {module.kind for module in difference.by_module()} == {"changed", "renamed"}


def test_modules_after_an_inserted_one_are_matched():
    before = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    after = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2))
    assert matches(before, after) == {(None, "1"), ("1", "2"), ("2", "3")}
    assert matches(after, before) == {("1", None), ("2", "1"), ("3", "2")}


def test_layers_are_added_at_the_end():
    before, after = (nn.Sequential(*(nn.Linear(4, 4) for _ in range(count))) for count in (2, 4))
    assert matches(before, after) == {(None, "2"), (None, "3")}
    assert "2–3 × 2  added" in str(fvflops.diff(before, after, X))


def test_a_wrapped_model_is_matched_in_its_wrapper():
    wrapped = nn.Sequential(OrderedDict(module=Applied(named, a=net())))
    pairs = matches(Applied(named, a=net()), wrapped)
    assert ("", "module") in pairs
    assert ("a.0", "module.a.0") in pairs
    assert (None, "") in pairs
    assert ("module", "") in matches(wrapped, Applied(named, a=net()))


def test_a_module_that_moves_to_another_parent_is_matched():
    before = Applied(named, a=nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8)), b=nn.Sequential(nn.Linear(8, 2)))
    after = Applied(named, a=nn.Sequential(nn.Linear(4, 8)), b=nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)))
    assert matches(before, after) == {("a.1", "b.0"), ("b.0", "b.1")}


def test_a_long_list_that_differs_everywhere_is_matched_quickly():
    with torch.device("meta"):
        before, after = (
            nn.Sequential(*(nn.Linear(4, 4 + (index + shift) % 7) for index in range(1100))) for shift in (0, 3)
        )
    trees = [FlopCountAnalysis(model, X).module_tree() for model in (before, after)]
    pairs = match_modules(*trees)
    assert len(pairs) == 1101
    assert pairs["1099"] == "1099"


def test_traces_files_programs_and_graph_modules_are_compared(tmp_path):
    trace = FlopCountAnalysis(net(), X).trace()
    (tmp_path / "a.json").write_text(trace.to_json())
    torch.export.save(torch.export.export(net(), (X,)), tmp_path / "a.pt2")
    graph = torch.fx.symbolic_trace(net())
    assert not fvflops.diff(trace, tmp_path / "a.json")
    assert not fvflops.diff(str(tmp_path / "a.json"), str(tmp_path / "a.pt2"), trust=True)
    assert not fvflops.diff(FlopCountAnalysis(net(), X), torch.export.export(net(), (X,)))
    in_graph = fvflops.diff(graph, net(16), X)
    assert {name: value for name, value in changes(in_graph).items() if value} == {"0": 96, "2": 48}
    with pytest.raises(TypeError, match="got int"):
        fvflops.diff(3, trace)


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text(FlopCountAnalysis(net(), X).trace().to_json())
    return path


def list_paths(value, path=()):
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, item in items:
        yield from list_paths(item, (*path, key))


@pytest.mark.parametrize(
    "invalid", [None, "x", -1, 1.5, float("nan"), [[]], {"symbol": 1, "name": 2}, 10**30], ids=repr
)
def test_a_trace_with_an_invalid_field_raises_or_is_counted(saved, invalid):
    text, errors = saved.read_text(), 0
    for path in list_paths(json.loads(text)):
        container = document = {"": json.loads(text)}
        *outer, last = ("", *path)
        for key in outer:
            container = container[key]
        container[last] = invalid
        try:
            trace = Trace.from_json(json.dumps(document[""]))
        except TraceError as error:
            assert len(str(error)) < 400
            errors += 1
            continue
        with suppress(TableError):  # an op whose arguments do not match its schema
            FlopCountAnalysis.from_trace(trace).to_html()
    assert errors > 50


def test_an_incomplete_trace_file_is_reported(saved, capsys):
    text = saved.read_text()
    bad = saved.with_name("bad.json")
    newer = json.dumps({**json.loads(text), "schema": 99})
    damaged = json.loads(text)
    damaged["calls"][0][0] = 10**6
    mistakes = {
        text[: len(text) // 2]: "incomplete trace: invalid JSON",
        newer: "this trace has schema 99, but this version of fvflops reads up to 1: update fvflops",
        json.dumps(damaged): "this trace is damaged",
        "[" * 100_000: "nested too deeply",
        "[]": "not a trace of fvflops",
        "": "incomplete trace",
        "ops:\n- aten::mm\n": "not a trace: invalid JSON",
    }
    for content, message in mistakes.items():
        bad.write_text(content)
        assert main(["diff", str(saved), str(bad)]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert "bad.json" in error
        assert error.count("\n") == 1
    bad.write_bytes(b"\xff\xfe")
    with pytest.raises(TraceError, match="not UTF-8"):
        load_trace(bad)
    with pytest.raises(TraceError, match="there is no such file"):
        load_trace(saved.with_name("none.json"))


def test_a_huge_file_raises_without_being_read(tmp_path, saved):
    huge = tmp_path / "huge.json"
    with open(huge, "wb") as file:
        file.truncate(2 << 30)  # sparse: it needs no disk space
    with pytest.raises(TraceError, match=r"has more than 268,435,456 characters.*aggregate"):
        load_trace(huge)
    with pytest.raises(TraceError, match="more than 10 characters"):
        load_trace(saved, limit=10)


def test_unsupported_ops_are_reported():
    library = torch.library.Library("fvflops_diff", "DEF")
    library.define("scan(Tensor x) -> Tensor")
    library.impl("scan", lambda x: x.clone(), "CompositeExplicitAutograd")
    difference = fvflops.diff(lambda x: x + 1, lambda x: torch.ops.fvflops_diff.scan(x) + 1, X)
    assert "Unsupported after, so not counted: fvflops_diff::scan (1 call)." in str(difference)
    assert [operator.status for operator in difference.by_operator()] == ["unsupported"]
    assert re.search(r"\nscan +unsupported +0 +0 +0 +[+]1\n", str(difference))


def test_another_measure_sorts():
    difference = fvflops.diff(net(8), net(16), X)
    by_parameters = write_document(difference_report(difference, measure="parameters"))
    assert "Cost of the model: Parameters +56 (+96.6%)" in by_parameters
    with pytest.raises(ValueError, match="measure must be one of"):
        difference_report(difference, measure="time")
    assert "1 more row: difference +48." in write_document(difference_report(difference).ranked(top=1))


def test_a_mistake_in_a_revision_is_reported(repository, capsys):
    for name, message in {
        "HAED:models/net.py:build": "this git repository has no revision HAED",
        "HEAD:models/nett.py:build": "has no file 'models/nett.py': the nearest are 'models/net.py'",
        "--help:models/net.py:build": "has no revision",
    }.items():
        assert main(["diff", "--", name, "zoo:lenet5"]) == 2
        assert message in capsys.readouterr().err
    assert main(["diff", "HEAD:models/net.py:biuld", "zoo:lenet5"]) == 2
    assert "HEAD:models/net.py:biuld: models/net.py has no 'biuld': the nearest is 'build'" in capsys.readouterr().err


def test_modules_of_one_name_in_two_folders_are_not_mixed_up(repository, capsys):
    other = repository / "other"
    other.mkdir()
    (other / "net.py").write_text(FACTORY)
    (other / "width.py").write_text("WIDTH = 32")
    assert main(["diff", "models/net.py:build", "other/net.py:build", "--format", "markdown"]) == 0
    assert "### Cost of the model: FLOPs +288 (+100%)" in capsys.readouterr().out
    for name in ("net", "width"):
        sys.modules.pop(name, None)


def test_the_command_line_reports_invalid_arguments(saved, capsys):
    for arguments, message in {
        ("zoo:lenet5", "zoo:lenet5", "--format", "txt"): "did you mean 'text'",
        (str(saved), "zoo:lenet5", "--input", "1,1,28,28"): "contains its inputs: omit --input",
        (__file__, "zoo:lenet5"): "names no factory: write ",
        (str(saved.with_name("none.pt2")), "zoo:lenet5"): "there is no such file",
    }.items():
        code, _, err = run(capsys, "diff", *arguments)
        assert code == 2 and message in err
    broken = saved.with_name("broken.pt2")
    broken.write_bytes(b"PK" + os.urandom(100))
    assert main(["diff", str(broken), "zoo:lenet5"]) == 2
    assert "not a program of torch.export" in capsys.readouterr().err


def test_inputs_of_a_model_are_not_those_of_a_file(saved, capsys):
    assert main(["diff", "zoo:lenet5", str(saved), "--input", "2,1,28,28", "--format", "json"]) == 0
    written = json.loads(capsys.readouterr().out)
    assert (written["before"]["inputs"], written["after"]["inputs"]) == ("float32[2, 1, 28, 28]", "float32[3, 4]")
    assert written["total"]["macs"]["before"] == 2 * 416_520


def test_two_configurations_of_one_model_are_compared(capsys):
    pytest.importorskip("transformers")
    config = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 9,
    }
    grouped = {**config, "num_key_value_heads": 1}
    command = ["diff", "transformers:LlamaModel", "transformers:LlamaModel", "--input", "input_ids=1,16:int64"]
    assert main([*command, "--config", json.dumps(config), "--config-b", json.dumps(grouped), "--format", "json"]) == 0
    written = json.loads(capsys.readouterr().out)
    # 16 tokens, 2 layers, keys and values: 32 to 8 columns instead of 32.
    assert written["total"]["macs"]["difference"] == -2 * 2 * 16 * 32 * 24


LONG = "a_projection_" + "of_a_long_name_" * 12


@pytest.fixture
def two_traces(tmp_path):
    """Files of one model before and after a change, its modules' names far longer than a line."""
    files = []
    for width in (8, 16):
        layers = [nn.Sequential(OrderedDict([(LONG, nn.Linear(4, width)), ("b", nn.Linear(width, 4))])) for _ in "ab"]
        path = tmp_path / f"{width}.json"
        path.write_text(FlopCountAnalysis(nn.Sequential(*layers, nn.Linear(4, width)), X).trace().to_json())
        files.append(str(path))
    return files


def test_the_page_compares_both_models(two_traces, capsys, tmp_path):
    page = tmp_path / "diff.html"
    assert main(["diff", *two_traces, "--format", "html", "--measure", "parameters", "--output", str(page)]) == 0
    text = page.read_text()
    assert f"<title>{two_traces[0]} → {two_traces[1]} · fvflops</title>"[:190] in text
    for script in ("data", "data-other"):
        record = json.loads(re.search(rf'<script type="application/json" id="{script}">(.*?)</script>', text)[1])
        assert [measure["key"] for measure in record["measures"]][:2] == ["parameters", "flops"]
    assert main(["diff", *two_traces, "--format", "html", "--top", "2"]) == 2
    assert "--top does not apply to --format html" in capsys.readouterr().err
    with pytest.raises(ValueError, match="no runs to show"):
        replace(fvflops.diff(*two_traces), runs=None).to_html()


@pytest.mark.parametrize("format", [format for format in FORMATS if format != "html"])
def test_every_format_writes_the_difference(format, two_traces, capsys):
    # Two blocks of 3 * 4 * 8 and 3 * 8 * 4 more, and 3 * 4 * 8 more at the end.
    assert main(["diff", *two_traces, "--format", format, "--sort", "difference", "--top", "2"]) == 0
    written = check_report(format, capsys.readouterr().out, "difference")
    if format == "json":
        assert written["total"]["flops"]["difference"] == 480
    elif format == "csv":
        assert [(row["module"], row["difference"]) for row in written] == [
            (f"0–1.{LONG} × 2", "192"),
            ("0–1.b × 2", "192"),
        ]
    else:
        assert "FLOPs +480" in written and "Unchanged: 3 of 8 modules" in written


def test_sort_and_top_apply_to_both_tables(two_traces, capsys):
    out = output_of(capsys, "diff", *two_traces, "--top", "1", "--sort", "name")
    assert "2 more rows: difference +384." in out
    assert main(["diff", *two_traces, "--sort", "parameters", "--format", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [int(row["parameters"]) for row in rows] == [80, 64, 40]
    assert output_of(
        capsys, "diff", two_traces[0], two_traces[0], "--sort", "parameters", "--format", "csv"
    ).splitlines() == ["module,change,class,before,after,difference,ratio,activations,parameters,macs"]
