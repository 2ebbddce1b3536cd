"""The difference of two runs: by hand for three real changes, modules under other names, and files that are none."""

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
from fvflops.features.diff import report
from fvflops.features.diff.model import MEASURES
from fvflops.features.diff.module_matching import match_modules
from fvflops.formulas import TableError
from fvflops.reports.formats import FORMATS
from fvflops.trace import TraceError
from fvflops.zoo.llama import CONFIGS, Llama
from tests.support.git_repository import FACTORY, state_of
from tests.support.git_repository import repository as repository
from tests.support.reports.report_formats import check_report

ROWS, WIDTH = 3, 8
X = torch.ones(ROWS, 4)


def net(width=WIDTH, act=nn.ReLU):
    return nn.Sequential(nn.Linear(4, width), act(), nn.Linear(width, 2))


def tiny(kv_heads):
    return Llama(replace(CONFIGS["llama_tiny"], kv_heads=kv_heads))


def changes(difference, measure="flops"):
    return {module.name: module.change(measure).difference for module in difference.by_module(measure)}


def matches(one, two, x=X):
    """Return (before, after) of the modules whose names differ."""
    difference = fvflops.diff(one, two, x)
    return {(module.before_name, module.after_name) for module in difference.by_module()}


# --- three real changes, counted by hand ---


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


def test_an_activation_is_exchanged():
    one, two = net(), net(act=nn.GELU)
    exact = fvflops.diff(one, two, X, table="exact")
    # By the table exact an element costs 1 flop in relu; in gelu by erf 12, the erf itself 8 of them.
    assert changes(exact) == {"1": ROWS * WIDTH * (12 - 1)}
    assert {operator.label: operator.change("flops").difference for operator in exact.by_operator()} == {
        "gelu": ROWS * WIDTH * 12,
        "relu": -ROWS * WIDTH,
    }
    # The table default leaves out both, and the exchange is told all the same.
    default = fvflops.diff(one, two, X)
    assert default
    assert default.total() == (144, 144)
    (module,) = default.by_module()
    assert (module.name, module.kind, module.before_class, module.after_class) == ("1", "changed", "ReLU", "GELU")
    assert "Changed at the same cost: 1 (ReLU → GELU, with gelu)." in str(default)


def test_attention_is_made_grouped_query():
    difference = fvflops.diff(tiny(4), tiny(1), torch.ones(1, 16, dtype=torch.int64))
    # Keys and values of 2 layers for 16 tokens, from 64 to 1 * 16 of 4 * 16 columns; the scores stay as many.
    less = -16 * 64 * 48
    names = [f"layers.{layer}.self_attn.{part}_proj" for layer in (0, 1) for part in "kv"]
    assert changes(difference) == dict.fromkeys(names, less)
    assert difference.total("macs").difference == 4 * less
    assert changes(difference, "parameters") == dict.fromkeys(names, -64 * 48)
    assert changes(difference, "activations") == dict.fromkeys(names, -16 * 48)
    assert [operator.label for operator in difference.by_operator()] == ["linear"]
    assert "layers.0–1.self_attn.k_proj × 2" in str(difference)
    assert "-98.3K" in str(difference)


@pytest.mark.parametrize("table", ["default", "exact", "fvcore"])
@pytest.mark.parametrize("measure", MEASURES)
def test_modules_and_operators_add_up_to_the_total(table, measure):
    kinds = {"default": nn.GELU, "exact": nn.Tanh, "fvcore": nn.Sigmoid}
    one = nn.Sequential(net(8), nn.LayerNorm(2))
    two = nn.Sequential(net(16, kinds[table]), nn.LayerNorm(2), nn.Linear(2, 3))
    difference = fvflops.diff(one, two, X, table=table)
    analyses = [FlopCountAnalysis(model, X, table=table) for model in (one, two)]
    told = difference.total(measure)
    assert told.difference == sum(changes(difference, measure).values()) != 0
    if measure != "parameters":
        assert told.difference == sum(operator.change(measure).difference for operator in difference.by_operator())
    if measure == "flops":
        assert told == tuple(analysis.total() for analysis in analyses)
    if measure == "parameters":
        assert told == tuple(sum(p.numel() for p in model.parameters()) for model in (one, two))


def test_equal_models_do_not_differ():
    difference = fvflops.diff(tiny(2), tiny(2), torch.ones(1, 16, dtype=torch.int64))
    assert not difference
    assert not difference.by_module()
    assert not difference.by_operator()
    assert "No difference in 29 modules" in str(difference)
    assert json.loads(difference.to_json())["modules"] == []


def test_other_inputs_are_a_difference_of_every_module_that_works():
    difference = fvflops.diff((net(), X), (net(), torch.ones(2 * ROWS, 4)))
    assert changes(difference) == {"0": 96, "2": 48}
    assert difference.before.inputs == "float32[3, 4]"
    assert difference.total("parameters").difference == 0


# --- modules under other names ---


class Named(nn.Module):
    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        for part in self.children():
            x = part(x)
        return x


def test_a_module_under_another_name_is_matched():
    one = Named(first=nn.Linear(4, 8), act=nn.ReLU(), last=nn.Linear(8, 2))
    two = Named(embed=nn.Linear(4, 8), relu=nn.ReLU(), last=nn.Linear(8, 2))
    assert matches(one, two) == {("first", "embed"), ("act", "relu")}
    difference = fvflops.diff(one, two, X)
    assert {module.kind for module in difference.by_module()} == {"renamed"}
    assert "Renamed only: first → embed, act → relu." in str(difference)


def test_a_renamed_module_takes_those_inside_it_along():
    one, two = Named(stem=net(), head=nn.Linear(2, 3)), Named(backbone=net(), head=nn.Linear(2, 3))
    difference = fvflops.diff(one, two, X)
    assert {(module.before_name, module.after_name) for module in difference.by_module()} == {
        ("stem", "backbone"),
        *((f"stem.{index}", f"backbone.{index}") for index in range(3)),
    }
    text = str(difference)
    assert "stem → backbone." in text
    assert "Renamed with their parents: 3 modules." in text


def test_a_module_that_is_renamed_and_widened_is_one_change():
    one, two = Named(stem=net(8), out=nn.Identity()), Named(body=net(16), out=nn.Identity())
    difference = fvflops.diff(one, two, X)
    assert changes(difference)["body.0"] == 96
    assert {module.kind for module in difference.by_module()} == {"changed", "renamed"}


def test_what_stands_behind_an_inserted_module_moves_on():
    one = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    two = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2))
    assert matches(one, two) == {(None, "1"), ("1", "2"), ("2", "3")}
    assert matches(two, one) == {("1", None), ("2", "1"), ("3", "2")}


def test_layers_are_added_at_the_end():
    one, two = (nn.Sequential(*(nn.Linear(4, 4) for _ in range(count))) for count in (2, 4))
    assert matches(one, two) == {(None, "2"), (None, "3")}
    assert "2–3 × 2  added" in str(fvflops.diff(one, two, X))


def test_a_wrapped_model_is_found_in_its_wrapper():
    wrapped = nn.Sequential(OrderedDict(module=Named(a=net())))
    pairs = matches(Named(a=net()), wrapped)
    assert ("", "module") in pairs
    assert ("a.0", "module.a.0") in pairs
    assert (None, "") in pairs
    assert ("module", "") in matches(wrapped, Named(a=net()))


def test_a_module_that_moves_to_another_parent_is_matched():
    one = Named(a=nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8)), b=nn.Sequential(nn.Linear(8, 2)))
    two = Named(a=nn.Sequential(nn.Linear(4, 8)), b=nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)))
    assert matches(one, two) == {("a.1", "b.0"), ("b.0", "b.1")}


def test_a_long_list_that_differs_everywhere_does_not_take_long():
    with torch.device("meta"):
        one, two = (
            nn.Sequential(*(nn.Linear(4, 4 + (index + shift) % 7) for index in range(1100))) for shift in (0, 3)
        )
    trees = [FlopCountAnalysis(model, X).module_tree() for model in (one, two)]
    pairs = match_modules(*trees)
    assert len(pairs) == 1101
    assert pairs["1099"] == "1099"


# --- what can be compared ---


def test_traces_files_programs_and_graph_modules_are_taken(tmp_path):
    trace = FlopCountAnalysis(net(), X).trace()
    (tmp_path / "a.json").write_text(trace.to_json())
    torch.export.save(torch.export.export(net(), (X,)), tmp_path / "a.pt2")
    graph = torch.fx.symbolic_trace(net())
    assert not fvflops.diff(trace, tmp_path / "a.json")
    assert not fvflops.diff(str(tmp_path / "a.json"), str(tmp_path / "a.pt2"))
    assert not fvflops.diff(FlopCountAnalysis(net(), X), torch.export.export(net(), (X,)))
    in_graph = fvflops.diff(graph, net(16), X)
    assert {name: value for name, value in changes(in_graph).items() if value} == {"0": 96, "2": 48}
    with pytest.raises(TypeError, match="not int"):
        fvflops.diff(3, trace)


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text(FlopCountAnalysis(net(), X).trace().to_json())
    return path


def list_places(value, path=()):
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, item in items:
        yield from list_places(item, (*path, key))


@pytest.mark.parametrize("wrong", [None, "x", -1, 1.5, float("nan"), [[]], {"symbol": 1, "name": 2}, 10**30], ids=repr)
def test_a_trace_with_a_wrong_field_is_refused_or_counted(saved, wrong):
    text, refused = saved.read_text(), 0
    for path in list_places(json.loads(text)):
        at = record = {"": json.loads(text)}
        *outer, last = ("", *path)
        for key in outer:
            at = at[key]
        at[last] = wrong
        try:
            trace = Trace.from_json(json.dumps(record[""]))
        except TraceError as error:
            assert len(str(error)) < 400
            refused += 1
            continue
        with suppress(TableError):  # which names an op whose arguments are not those of its schema
            FlopCountAnalysis.from_trace(trace).to_html()
    assert refused > 50


def test_a_file_that_is_no_whole_trace_is_told(saved, capsys):
    text = saved.read_text()
    bad = saved.with_name("bad.json")
    newer = json.dumps({**json.loads(text), "schema": 99})
    lost = json.loads(text)
    lost["calls"][0][0] = 10**6
    mistakes = {
        text[: len(text) // 2]: "incomplete trace: it is not JSON",
        newer: "this trace has schema 99, but this version of fvflops reads up to 1: update fvflops",
        json.dumps(lost): "this trace is damaged",
        "[" * 100_000: "nested too deeply",
        "[]": "not a trace of fvflops",
        "": "incomplete trace",
    }
    for content, message in mistakes.items():
        bad.write_text(content)
        assert main(["diff", str(saved), str(bad)]) == 2
        said = capsys.readouterr().err
        assert message in said
        assert "bad.json" in said
        assert said.count("\n") == 1
    bad.write_bytes(b"\xff\xfe")
    with pytest.raises(TraceError, match="not UTF-8"):
        load_trace(bad)
    with pytest.raises(TraceError, match="there is no such file"):
        load_trace(saved.with_name("none.json"))


def test_a_huge_file_is_refused_without_being_read(tmp_path, saved):
    huge = tmp_path / "huge.json"
    with open(huge, "wb") as file:
        file.truncate(2 << 30)  # sparse: it takes no room
    with pytest.raises(TraceError, match=r"has more than 268,435,456 characters.*aggregate"):
        load_trace(huge)
    with pytest.raises(TraceError, match="more than 10 characters"):
        load_trace(saved, limit=10)


def test_an_output_that_cannot_be_written_is_told_before_the_work(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        "fvflops.cli.commands.diff.open_analysis", lambda *_, **__: pytest.fail("the work was done first")
    )
    assert main(["diff", "zoo:lenet5", "zoo:lenet5", "--output", str(tmp_path)]) == 2
    assert "cannot be written" in capsys.readouterr().err


HOSTILE = "<script>|\x1b[31m\n[a](b)\u202e" + "x" * 10_000


def test_hostile_names_are_shown_as_text():
    one, two = (nn.Sequential(OrderedDict([(HOSTILE, nn.Linear(4, width))])) for width in (3, 5))
    difference = fvflops.diff(one, two, X, names=(HOSTILE, "b"))
    text, markdown = str(difference), difference.to_markdown()
    for shown in (text, markdown):
        assert "\x1b" not in shown
        assert "\u202e" not in shown
        assert max(map(len, shown.splitlines())) < 600
    assert "\\x1b[31m\\n" in text
    assert "<script>" not in markdown
    assert "&lt;script&gt;\\|" in markdown
    assert json.loads(difference.to_json())["modules"][0]["after_name"] == HOSTILE


def test_unknown_ops_are_told():
    library = torch.library.Library("fvflops_diff", "DEF")
    library.define("scan(Tensor x) -> Tensor")
    library.impl("scan", lambda x: x.clone(), "CompositeExplicitAutograd")
    difference = fvflops.diff(lambda x: x + 1, lambda x: torch.ops.fvflops_diff.scan(x) + 1, X)
    assert "Unsupported after, so not counted: fvflops_diff::scan (1 call)." in str(difference)
    assert [operator.status for operator in difference.by_operator()] == ["unknown"]
    assert re.search(r"\nscan +unsupported +0 +0 +0 +[+]1\n", str(difference))


def test_another_measure_ranks():
    difference = fvflops.diff(net(8), net(16), X)
    assert "Cost of the model: Parameters +56 (+96.6%)" in report.render(difference, measure="parameters")
    with pytest.raises(ValueError, match="ranked by one of"):
        report.render(difference, measure="time")
    assert "1 more row: difference +48." in report.render(difference, top=1)


# --- the command line ---


def test_a_git_revision_is_compared_with_the_working_tree(repository, capsys):
    before = state_of(repository)
    assert main(["diff", "HEAD:models/net.py:build", "models/net.py:build", "--format", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["total"]["flops"] == {"before": 144, "after": 288, "difference": 144, "ratio": 2.0}
    assert [(module["after_name"], module["flops"]["difference"]) for module in told["modules"]] == [
        ("0", 96),
        ("2", 48),
    ]
    assert state_of(repository) == before
    for name in ("net", "width"):
        sys.modules.pop(name, None)


def test_a_mistake_in_a_revision_is_told(repository, capsys):
    for name, message in {
        "HAED:models/net.py:build": "HAED is no revision",
        "HEAD:models/nett.py:build": "has no file 'models/nett.py': the nearest is 'models/net.py'",
        "--help:models/net.py:build": "is no revision",
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


def test_the_command_line_says_what_it_does_not_take(saved, capsys):
    for arguments, message in {
        ("zoo:lenet5", "zoo:lenet5", "--format", "txt"): "did you mean 'text'",
        (str(saved), "zoo:lenet5", "--input", "1,1,28,28"): "contains its inputs: omit --input",
        (__file__, "zoo:lenet5"): "is a file: a saved trace ends in .json",
        (str(saved.with_name("none.pt2")), "zoo:lenet5"): "there is no such file",
    }.items():
        with suppress(SystemExit):  # argparse's own mistakes
            assert main(["diff", *arguments]) == 2
        assert message in capsys.readouterr().err
    broken = saved.with_name("broken.pt2")
    broken.write_bytes(b"PK" + os.urandom(100))
    assert main(["diff", str(broken), "zoo:lenet5"]) == 2
    assert "not a program of torch.export" in capsys.readouterr().err


def test_inputs_of_a_model_are_not_those_of_a_file(saved, capsys):
    assert main(["diff", "zoo:lenet5", str(saved), "--input", "2,1,28,28", "--format", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["before"]["inputs"], told["after"]["inputs"]) == ("float32[2, 1, 28, 28]", "float32[3, 4]")
    assert told["total"]["macs"]["before"] == 2 * 416_520


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
    told = json.loads(capsys.readouterr().out)
    # 16 tokens, 2 layers, keys and values: 32 to 8 columns instead of 32.
    assert told["total"]["macs"]["difference"] == -2 * 2 * 16 * 32 * 24


def test_a_trace_survives_its_file(saved):
    assert load_trace(saved) == Trace.from_json(saved.read_text())


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


@pytest.mark.parametrize("format", list(FORMATS))
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


def test_the_order_and_the_number_of_rows_are_those_of_both_tables(two_traces, capsys):
    assert main(["diff", *two_traces, "--top", "1", "--sort", "name"]) == 0
    out = capsys.readouterr().out
    assert "2 more rows: difference +384." in out
    assert main(["diff", *two_traces, "--sort", "parameters", "--format", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [int(row["parameters"]) for row in rows] == [80, 64, 40]
    assert main(["diff", two_traces[0], two_traces[0], "--sort", "parameters", "--format", "csv"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "module,change,class,before,after,difference,ratio,activations,parameters,macs"
    ]
