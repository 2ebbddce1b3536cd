"""The calls of ops and of modules, one by one: what each comes to, what it reads, and the rows that programs get."""

import csv
import io
import json
import re
import subprocess
from itertools import pairwise
from shutil import which
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

from fvflops import ActivationCountAnalysis, ByteCountAnalysis, FlopCountAnalysis, Trace, TrainingStepAnalysis
from fvflops.analysis.model_analysis import analysed_run
from fvflops.analysis.model_counts import list_call_rows
from fvflops.cli import main
from fvflops.reports.call_tables import call_report
from fvflops.reports.escaping import printable
from fvflops.reports.formats import write_document
from fvflops.trace import TraceError
from fvflops.views.ranking import natural_key
from fvflops.zoo import build
from tests.support.models.parts import Applied
from tests.support.reports.report_formats import take_cells


class Net(nn.Module):
    """One Linear(8, 8) called twice around a ReLU in place, a residual sum, and a view of it; 2·64 MACs a row."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.fc(self.act(self.fc(x)))
        return (x + y).view(-1)


def analyse(model=None, **options):
    return FlopCountAnalysis(model or Net(), torch.ones(2, 8), **options)


@torch.library.custom_op("fvflops_calls::scan", mutates_args=())
def scan(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@scan.register_fake
def _(x):
    return torch.empty_like(x)


def unknown(self, x):
    return scan(x)


def test_an_op_call_says_what_it_reads_and_which_calls_made_that():
    calls = analyse(table="exact").op_calls()
    assert [(call.op.removeprefix("aten::"), call.after) for call in calls] == [
        ("linear", ()),
        ("relu_", (0,)),
        ("linear", (1,)),  # what was written in place was made there
        ("add", (2,)),
        ("view", (3,)),
    ]
    assert [call.parameters for call in calls] == [("fc.weight", "fc.bias"), (), ("fc.weight", "fc.bias"), (), ()]
    assert [(call.macs, call.flops, call.activations, call.nbytes) for call in calls] == [
        (128, 272, 16, 4 * (16 + 64 + 8 + 16)),
        (0, 16, 0, 4 * 32),
        (128, 272, 16, 4 * (16 + 64 + 8 + 16)),
        (0, 16, 0, 4 * 48),
        (0, 0, 0, 0),
    ]


def test_what_reads_beside_a_view_comes_after_what_made_the_storage():
    def split(x):
        y = x * 2
        first, second = y.chunk(2)
        return first + second

    calls = FlopCountAnalysis(split, torch.ones(4)).op_calls()
    assert [(call.op, call.after) for call in calls][-1] == ("aten::add", (0,))


def test_calls_add_up_to_what_is_counted():
    model, x = build("resnet50").eval(), torch.ones(1, 3, 224, 224)
    flops = FlopCountAnalysis(model, x, table="exact")
    root = flops.module_calls()[0]
    sums = [
        sum(getattr(call, name) for call in flops.op_calls()) for name in ("flops", "macs", "activations", "nbytes")
    ]
    assert sums == [root.flops, root.macs, root.activations, root.nbytes]
    assert sums == [
        flops.total(),
        flops.macs(),
        ActivationCountAnalysis.from_trace(flops.trace(), table="exact").total(),
        ByteCountAnalysis.from_trace(flops.trace()).total(),
    ]
    assert (root.ops, root.parameters, root.outputs) == (175, 25_557_032, ("float32[1, 1000]",))
    # Each module of this one is called once but for the ReLUs in its blocks, three times each.
    assert len(flops.module_calls()) == len([*model.modules()]) + 2 * 16
    assert {call.module: call.flops for call in flops.module_calls() if call.depth == 1}["layer1"] == flops.total(
        "layer1"
    )


def test_a_module_has_a_line_for_each_call():
    calls = analyse().module_calls()
    assert [(call.module, call.depth, call.ops, call.macs) for call in calls] == [
        ("", 0, 5, 256),
        ("fc", 1, 1, 128),
        ("act", 1, 1, 0),
        ("fc", 1, 1, 128),
    ]


def test_a_module_that_the_table_counts_as_one_is_counted_once():
    flops = FlopCountAnalysis(nn.Sequential(nn.LSTM(4, 8)), torch.ones(5, 1, 4)).set_module_handle(
        nn.LSTM, lambda call: 7
    )
    assert sum(call.flops for call in flops.op_calls()) == flops.total() == 7
    assert [(call.class_name, call.flops) for call in flops.module_calls()] == [("Sequential", 7), ("LSTM", 7)]


def test_a_backward_pass_calls_no_module():
    step = TrainingStepAnalysis(Net(), torch.ones(2, 8), loss=torch.sum, table="exact")
    assert {call.phase for call in step.op_calls()} == {"forward", "backward"}
    assert {call.phase for call in step.module_calls()} == {"forward"}
    assert sum(call.flops for call in step.op_calls()) == step.total()


def test_rows_are_the_same_in_every_format(capsys, tmp_path):
    pandas = pytest.importorskip("pandas")
    (tmp_path / "net.py").write_text("import torch\ndef build():\n    return torch.nn.Linear(8, 4), torch.ones(2, 8)\n")
    flops = FlopCountAnalysis(nn.Linear(8, 4), torch.ones(2, 8))
    for by in ("op", "call"):
        columns = flops.to_dict(by=by)
        assert flops.to_pandas(by=by).to_dict(orient="list") == columns
        written = {}
        for format in ("csv", "json", "text"):
            assert main(["count", f"{tmp_path}/net.py:build", "--by", by, "--format", format]) == 0
            written[format] = capsys.readouterr().out
        assert pandas.DataFrame(json.loads(written["json"])["rows"]).to_dict(orient="list") == columns
        read = list(csv.DictReader(io.StringIO(written["csv"])))
        assert [{heading: str(cells[0]) for heading, cells in columns.items()}] == read
        assert "[2,8]" in written["text"] and "Convention: default (1 FLOP per multiply-add).\n" in written["text"]
    assert columns["outputs"] == ["float32[2, 4]"] and columns["flops"] == [64]


LONG = "a_very_long_name_of_a_module_" * 6


def make_saved(path):
    """Return an analysis of a saved trace, with lines of source, of a model with long names and an unsupported op."""
    model = nn.Sequential(Applied(unknown))
    model.add_module(LONG, nn.Sequential())
    model.get_submodule(LONG).add_module("层" * 40, nn.Linear(8, 2**20, device="meta"))
    path.write_text(FlopCountAnalysis(model, torch.ones(2, 8), lines=True, warn=False).trace().to_json())
    return FlopCountAnalysis.from_trace(Trace.from_json(path.read_text()), warn=False)


@pytest.mark.parametrize("by", ["op", "call", "line"])
def test_calls_of_a_saved_trace_in_all_formats(by, tmp_path):
    flops = make_saved(tmp_path / "trace.json")
    report = call_report(analysed_run(flops), by, list_call_rows(flops, by))
    total = 2 * 8 * 2**20
    text = write_document(report, "text", width=80)
    assert max(map(take_cells, text.split("\n"))) <= 80 and f"{total:,}" in text
    assert "Unsupported, so not counted: fvflops_calls::scan" in text
    rows = list(csv.DictReader(io.StringIO(write_document(report, "csv"))))
    columns = flops.to_dict(by=by)
    assert list(rows[0]) == list(columns) and len(rows) == len(columns["flops"])
    assert [row["flops"] for row in rows] == ["" if count is None else str(count) for count in columns["flops"]]
    record = json.loads(write_document(report, "json"))
    assert (record["format"], record["schema"]) == ("fvflops.calls", 2) and record["about"]["table"] == "default"
    assert [row["flops"] for row in record["rows"]] == columns["flops"] and list(record["rows"][0]) == list(columns)
    shown = len(rows) + (by == "op")
    lines = write_document(report, "markdown").split("\n")
    assert len([line for line in lines if line.startswith("| ")]) == shown + 2
    assert len({len(re.findall(r"(?<!\\\\)\|", line)) for line in lines if line.startswith("| ")}) == 1
    page = ElementTree.fromstring(re.search(r"<table>.*</table>", write_document(report, "html"), re.DOTALL).group())
    assert len(list(page.iter("tr"))) == shown + 1
    latex = write_document(report, "latex")
    assert re.findall(r"\\begin{(\w+)}", latex) == re.findall(r"\\end{(\w+)}", latex) == ["tabular", "itemize"]
    named = list(csv.DictReader(io.StringIO(write_document(report.ranked(sort="name"), "csv"))))
    key = {"op": "name", "call": "module", "line": "line"}[by]
    assert [row[key] for row in named] == sorted((row[key] for row in rows), key=natural_key)
    ranked = write_document(report.ranked(sort="flops", top=1), "csv").splitlines()
    assert len(ranked) == 2 and str(total) in ranked[1]


def test_a_count_that_is_not_known_is_no_number():
    pytest.importorskip("pandas")
    flops = analyse(nn.Sequential(Applied(unknown), nn.Linear(8, 2**30, device="meta"))).unsupported_ops_warnings(False)
    assert flops.to_dict(by="op")["flops"] == [None, 2 * 8 * 2**30]
    assert flops.to_pandas(by="op")["flops"].tolist() == [None, 2 * 8 * 2**30]
    lines = flops.module_call_table().splitlines()
    assert lines[0].endswith("  unsupported ops") and [line.split()[-1] for line in lines[2:]] == ["1", "1", "0"]
    assert "Unsupported by default, so not counted: fvflops_calls::scan (1 call)." in flops.op_table()


def test_calls_are_a_view_of_flops_alone():
    with pytest.raises(ValueError, match="is a view of FlopCountAnalysis only"):
        ActivationCountAnalysis(Net(), torch.ones(2, 8)).to_dict(by="op")


@pytest.mark.parametrize(("weight", "total"), [(None, 416_520), ("macs", 416_520), ("bytes", 366_736)])
def test_counted_work_is_exported_beside_the_report(capsys, tmp_path, weight, total):
    paths = {name: str(tmp_path / name) for name in ("trace", "speedscope", "flamegraph")}
    options = [text for name, path in paths.items() for text in (f"--{name}", path)]
    assert main(["count", "zoo:lenet5", *options, *(["--weight", weight] if weight else [])]) == 0
    assert capsys.readouterr().out.startswith("module ")
    texts = {name: (tmp_path / name).read_text() for name in paths}
    assert sum(int(line.rpartition(" ")[2]) for line in texts["flamegraph"].splitlines()) == total
    assert sum(json.loads(texts["speedscope"])["profiles"][0]["weights"]) == total
    root = next(event for event in json.loads(texts["trace"])["traceEvents"] if event["name"] == "LeNet5")
    assert round(root["dur"] * 1000) == total


def read_graph(text):
    """Return node → label, and the edges by the labels' first lines."""
    labels = dict(re.findall(r'^ *(n\d+) \[label="((?:\\.|[^"\\])*)"', text, re.MULTILINE))
    names = {node: label.split("\\n")[0] for node, label in labels.items()}
    return labels, [(names[a], names[b]) for a, b in re.findall(r"^  (n\d+) -> (n\d+) ", text, re.MULTILINE)]


def test_the_graph_has_a_node_for_each_call_and_an_edge_for_each_tensor():
    labels, edges = read_graph(analyse(table="exact").to_graph())
    assert edges == [("fc", "act"), ("act", "fc"), ("fc", "add")]
    assert [*labels.values()] == [
        "fc\\nLinear\\n[2,8]\\n272 FLOPs, 47.2%",
        "act\\nReLU\\n[2,8]\\n16 FLOPs, 2.8%",
        "fc\\nLinear\\n[2,8]\\n272 FLOPs, 47.2%",
        "add\\n[2,8]\\n16 FLOPs, 2.8%",
    ]


def test_the_graph_ends_at_the_depth(capsys):
    assert main(["count", "zoo:resnet50", "--format", "dot", "--depth", "1"]) == 0
    text = capsys.readouterr().out
    names = ["conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4", "avgpool", "fc"]
    assert read_graph(text)[1] == list(pairwise(names))
    assert "subgraph" not in text
    deep = FlopCountAnalysis(build("resnet50").eval(), torch.ones(1, 3, 224, 224)).to_graph()
    residual = [edge for edge in read_graph(deep)[1] if edge[1] == "add"]
    assert len(residual) == 2 * 16 and ("layer1.0.downsample.1", "add") in residual


def test_the_graph_says_what_is_unknown_and_left_out():
    flops = analyse(nn.Sequential(Applied(unknown), nn.Tanh())).unsupported_ops_warnings(False)
    assert [label.split("\\n")[-1] for label in read_graph(flops.to_graph())[0].values()] == [
        "unsupported: fvflops_calls::scan",
        "ignored by this convention",
    ]


@pytest.mark.parametrize("name", ['a"b', "c\\", "\\N\n\x1b[31m&lt;", "</script>" + "x" * 10_000])
def test_the_graph_shows_any_name_as_text(name, tmp_path):
    model = nn.Sequential()
    model.add_module(name, nn.Sequential(nn.Linear(8, 8)))
    text = analyse(model).to_graph()
    [label] = read_graph(text)[0].values()
    shown = label.split("\\n[2,8]")[0].replace("\\\\", "\\").replace('\\"', '"').replace("&amp;", "&")
    assert shown.split("…")[0].removesuffix("\\nLinear").startswith(printable(name)[:50])
    assert text.replace("\n", "").isprintable()
    if which("dot") is not None:
        drawn = subprocess.run(["dot", "-Tplain"], input=text, capture_output=True, text=True, check=True)
        assert not drawn.stderr


def test_model_explorer_gets_the_same_edges_and_exact_counts(capsys):
    flops = FlopCountAnalysis(build("resnet50").eval(), torch.ones(1, 3, 224, 224), table="exact")
    [graph] = json.loads(flops.to_graph("model-explorer"))["graphs"]
    nodes = {node["id"]: node for node in graph["nodes"]}
    counts = [{attr["key"]: attr["value"] for attr in node["attrs"]} for node in graph["nodes"]]
    assert sum(int(count["FLOPs"]) for count in counts) == flops.total()
    assert {edge["sourceNodeId"] for node in graph["nodes"] for edge in node["incomingEdges"]} <= nodes.keys()
    assert (nodes["14"]["label"], nodes["14"]["namespace"]) == ("add", "layer1/0")
    assert [edge["sourceNodeId"] for edge in nodes["14"]["incomingEdges"]] == ["11", "13"]
    assert nodes["14"]["outputsMetadata"][0]["attrs"][0]["value"] == "float32[1, 256, 56, 56]"
    assert {node["namespace"] for node in graph["nodes"]} <= graph["groupNodeAttributes"].keys()
    with pytest.raises(ValueError, match="graph format must be one of dot, model-explorer; got 'netron'"):
        flops.to_graph("netron")


def test_each_op_has_the_line_of_the_model_that_called_it():
    flops = analyse(table="exact", lines=True)
    first = Net.forward.__code__.co_firstlineno + 1
    lines = [f"tests/analysis/test_calls.py:{first}"] * 3 + [f"tests/analysis/test_calls.py:{first + 1}"] * 2
    assert [call.line.rpartition("test_calls")[2] for call in flops.op_calls()] == [
        line.rpartition("test_calls")[2] for line in lines
    ]
    assert [(line.calls, line.flops, line.macs) for line in flops.line_counts()] == [(3, 560, 256), (2, 16, 0)]
    assert Trace.from_json(flops.trace().to_json()) == flops.trace()
    real = analyse(table="exact", lines=True, execution="real")
    assert [call.line for call in real.op_calls()] == [call.line for call in flops.op_calls()]


def test_recording_lines_changes_no_count():
    plain, located = analyse(), analyse(lines=True)
    assert plain.op_calls() == tuple(call._replace(line="") for call in located.op_calls())
    assert plain.trace().calls == located.trace().calls
    with pytest.raises(TraceError, match="no source lines were recorded: create the analysis with lines=True"):
        plain.line_counts()


def test_what_no_line_of_the_model_calls_has_none(capsys, tmp_path):
    (tmp_path / "net.py").write_text("import torch\ndef build():\n    return torch.nn.Linear(8, 4), torch.ones(2, 8)\n")
    assert main(["count", f"{tmp_path}/net.py:build", "--by", "line"]) == 0
    assert capsys.readouterr().out.splitlines()[4].startswith("(outside the model's code)         1     64")
    assert main(["count", "zoo:lenet5", "--by", "line", "--format", "csv"]) == 0
    assert re.match(
        r"fvflops/zoo/lenet5.py:\d+,12,416520,416520,6518,366736,0$", capsys.readouterr().out.splitlines()[1]
    )
