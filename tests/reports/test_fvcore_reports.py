"""The table, the tree and the table of parameters, byte for byte against fvcore."""

import importlib
import inspect
import sys
from collections import Counter
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import tabulate
import torch
from fvcore.nn import (
    ActivationCountAnalysis,
    FlopCountAnalysis,
    flop_count_str,
    flop_count_table,
    parameter_count_table,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fvflops.cli import main
from fvflops.reports import REPORTS, Report, fvcore_format
from fvflops.reports.count_report import write_text
from fvflops.reports.formats import FORMATS
from fvflops.reports.terminal.collapse import collapse
from fvflops.trace import Summary
from fvflops.views.summary_rows import View
from tests.support.random_cases import random_cases
from tests.support.reports.fvcore_text import TAKES_OPTION, print_as_fvcore
from tests.support.reports.report_formats import output_of
from tests.support.reports.summaries import make_deep, make_wide, read_modules, summarise

SUMMARY_REPORTS = {name: report for name, report in REPORTS.items() if report.source == "summary"}


def assert_same_text(ours, theirs):
    assert ours.splitlines() == theirs.splitlines()
    assert ours == theirs


def compare_with_fvcore(flops, activations, depth, show_param_shapes, summary):
    theirs = print_as_fvcore(flop_count_table, flops, depth, activations, show_param_shapes)
    assert_same_text(fvcore_format.write_table(summary, depth=depth, show_param_shapes=show_param_shapes), theirs)
    assert_same_text(fvcore_format.write_tree(summary), flop_count_str(flops, activations))
    if summary.columns["parameters"]:
        theirs = print_as_fvcore(parameter_count_table, flops._model, depth)
        assert_same_text(fvcore_format.write_parameter_table(summary.modules, depth=depth), theirs)


class Net(nn.Module):
    """Runs the modules that it is given one after the other, those named `idle...` excepted."""

    def __init__(self, **children):
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x):
        for name, child in self.named_children():
            if not name.startswith("idle"):
                x = child(x)
        return x


class Holder(nn.Module):
    """Parameters on the module itself, a list and a dict of modules, and a child called by its forward."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.gain = nn.Parameter(torch.ones(()))
        self.layers = nn.ModuleList([nn.Linear(8, 8, bias=False) for _ in range(2)])
        self.heads = nn.ModuleDict({"1": nn.Linear(8, 2), "b": nn.Linear(8, 8)})
        self.hidden = nn.Linear(8, 8)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) * self.scale * self.gain
        return self.heads["b"](self.hidden.forward(x))


class Wordy(nn.Linear):
    def extra_repr(self):
        return "first line\n  second line, indented\n\nlast line"


def chain(levels, last):
    for level in range(levels):
        last = Net(**{f"level{level}": last})
    return last


def share():
    block = Net(fc=nn.Linear(8, 8), act=nn.ReLU())
    return Net(first=block, middle=nn.Linear(8, 8), again=block, other=Net(deep=block, tail=nn.LayerNorm(8)))


def tie():
    net = Net(a=nn.Linear(8, 8), b=nn.Linear(8, 8), c=nn.Linear(8, 8))
    net.b.weight = net.a.weight
    net.c.weight, net.c.bias = net.a.weight, net.a.bias
    return net


MODELS = {
    "nested": lambda: nn.Sequential(
        nn.Linear(8, 300), nn.Sequential(nn.ReLU(), nn.Linear(300, 8)), nn.Sequential(nn.Sequential(nn.Linear(8, 8)))
    ),
    "shared": share,
    "tied": tie,
    "uncalled": lambda: Net(
        a=nn.Linear(8, 8), idle_one=nn.Linear(8, 800), idle_two=Net(x=nn.ReLU(), y=nn.Linear(9, 9)), z=nn.ReLU()
    ),
    "identity": lambda: Net(a=nn.Identity(), b=Net(c=nn.Identity(), d=nn.Linear(8, 8)), e=Net(f=nn.Identity())),
    "holder": Holder,
    "chain": lambda: chain(6, nn.Linear(8, 8)),
    "chain below": lambda: Net(a=chain(3, Net(p=nn.Linear(8, 8), q=chain(2, nn.Linear(8, 8)))), b=nn.Tanh()),
    "zero branches": lambda: Net(a=Net(b=nn.ReLU(), c=Net(d=nn.Dropout(0.0))), e=nn.Linear(8, 8), f=nn.Flatten()),
    "numbers": lambda: Net(**{"0": nn.Linear(8, 8), "10": Net(**{"1e3": nn.Linear(8, 8)}), "1": nn.LayerNorm(8)}),
    "wordy": lambda: Net(a=Wordy(8, 8), b=Net(c=Wordy(8, 8), d=nn.ReLU())),
    "no parameters": lambda: Net(a=nn.ReLU(), b=nn.Softmax(-1)),
    "bare leaf": lambda: nn.Linear(8, 8),
    "small numbers": lambda: Net(a=nn.LayerNorm(8, elementwise_affine=False), b=nn.LayerNorm(8)),
    "encoder": lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
    "big": lambda: Net(
        a=nn.Linear(8, 40_000), b=nn.utils.skip_init(nn.Linear, 40_000, 3_000), c=nn.Linear(3_000, 8)
    ),  # its 120M parameters are not read
}


def analyse(name):
    model = MODELS[name]()
    # Gradients are wanted so that the encoder does not run as one fused op, which fvcore cannot see into.
    inputs = torch.zeros(1, 4, 8)
    return FlopCountAnalysis(model, inputs), ActivationCountAnalysis(model, inputs)


@pytest.mark.parametrize("name", MODELS)
def test_the_reports_read_as_those_of_fvcore(name):
    flops, activations = analyse(name)
    for depth in range(6):
        for shapes in (True, False):
            compare_with_fvcore(flops, None, depth, shapes, summarise(flops))
            compare_with_fvcore(flops, activations, depth, shapes, summarise(flops, activations))


def test_the_table_is_indented_whatever_tabulate_is_installed():
    flops, _ = analyse("nested")
    assert fvcore_format.write_table(summarise(flops), depth=2) == (
        "| module         | #parameters or shape   | #flops   |\n"
        "|:---------------|:-----------------------|:---------|\n"
        "| model          | 5.18K                  | 19.456K  |\n"
        "|  0             |  2.7K                  |  9.6K    |\n"
        "|   0.weight     |   (300, 8)             |          |\n"
        "|   0.bias       |   (300,)               |          |\n"
        "|  1.1           |  2.408K                |  9.6K    |\n"
        "|   1.1.weight   |   (8, 300)             |          |\n"
        "|   1.1.bias     |   (8,)                 |          |\n"
        "|  2.0.0         |  72                    |  0.256K  |\n"
        "|   2.0.0.weight |   (8, 8)               |          |\n"
        "|   2.0.0.bias   |   (8,)                 |          |"
    )


KEYS = ["0", "1", "10", "a", "b", "fc", "conv1", "a_b", "1e3", "é", "=1+1", "x|y", "weight"]
COUNTS = [0, 0, 0, 1, 20, 20, 100, 101, 1000, 12345, 10**5 + 1, 10**8 + 1, 10**11 + 1, 3 * 10**15]
REPRS = ["", "", "size=3", "one\ntwo", "\n"]


class Made(nn.Module):
    def __init__(self, words, shapes):
        super().__init__()
        self.words = words
        for index, shape in enumerate(shapes):
            self.register_parameter(f"p{index}", nn.Parameter(torch.empty(shape, device="meta")))

    def extra_repr(self):
        return self.words


class MadeAnalysis:
    """Answers as an analysis of fvcore does, with numbers that were made up."""

    def __init__(self, model, counts, uncalled):
        self._model, self._counts, self._uncalled = model, counts, uncalled

    def by_module(self):
        return Counter(self._counts)

    def uncalled_modules(self):
        return self._uncalled

    def __getattr__(self, name):
        if name.endswith("_warnings"):
            return lambda setting: self
        raise AttributeError(name)


@st.composite
def make_models(draw):
    """A tree of up to 25 modules, some of them, and some parameters, at several places."""
    shapes = st.lists(st.sampled_from([(), (3,), (2, 3), (0, 4), (1000, 1000)]), max_size=2)
    modules = [Made(draw(st.sampled_from(REPRS)), draw(shapes)) for _ in range(draw(st.integers(1, 25)))]
    for index, module in enumerate(modules[1:], 1):
        # Parents come earlier, so no module can come to stand inside itself; few of them, so chains are long.
        for parent in draw(st.sets(st.integers(max(0, index - 3), index - 1), min_size=1, max_size=2)):
            free = [key for key in KEYS if not hasattr(modules[parent], key)]
            modules[parent].add_module(draw(st.sampled_from(free)), module)
    tensors = [tensor for module in modules for tensor in module._parameters.values()]
    for tensor in draw(st.lists(st.sampled_from(tensors), max_size=2)) if tensors else []:
        draw(st.sampled_from(modules)).tied = tensor
    return modules[0]


@st.composite
def make_analyses(draw, model):
    names = [place.name for place in read_modules(model).modules()]
    values = draw(st.lists(st.sampled_from(COUNTS), min_size=len(names), max_size=len(names)))
    uncalled = draw(st.sets(st.sampled_from(names), max_size=3))
    return MadeAnalysis(model, dict(zip(names, values, strict=True)), uncalled)


@random_cases(80)
@given(data=st.data(), depth=st.integers(0, 6), shapes=st.booleans(), with_activations=st.booleans())
def test_made_up_counts_read_as_in_fvcore(data, depth, shapes, with_activations):
    model = data.draw(make_models())
    flops = data.draw(make_analyses(model))
    activations = data.draw(make_analyses(model)) if with_activations else None
    compare_with_fvcore(flops, activations, depth, shapes, summarise(flops, activations))


CELLS = st.one_of(
    st.sampled_from(["", " ", "1", " 20", "  1.5", "1e3", "-3", "1,000", "nan", "inf", "True", "(3,)", "a|b", "é"]),
    st.text(alphabet="ab 1.,é|", max_size=6),
)


@given(data=st.data(), width=st.integers(1, 4))
def test_a_pipe_table_is_what_tabulate_draws_when_it_keeps_blanks(data, width):
    rows = data.draw(st.lists(st.tuples(*[CELLS] * width), max_size=6))
    headers = data.draw(st.lists(CELLS.map("#".__add__), min_size=width, max_size=width))
    if TAKES_OPTION:
        expected = tabulate.tabulate(rows, headers, tablefmt="pipe", preserve_whitespace=True)
    else:
        with patch.object(tabulate, "PRESERVE_WHITESPACE", True):
            expected = tabulate.tabulate(rows, headers, tablefmt="pipe")
    assert fvcore_format.pipe_table(headers, rows) == expected


def test_an_old_tabulate_is_left_alone(monkeypatch):
    """One without the option is copied, and only the copy is told to keep blanks."""

    def tabulate_without_option(rows, headers, tablefmt):
        raise AssertionError("the shared tabulate was asked")

    monkeypatch.setattr(fvcore_format, "tabulate", SimpleNamespace(tabulate=tabulate_without_option))
    text = fvcore_format.pipe_table(["a", "b"], [("x", " y")])
    own = fvcore_format._load_private_tabulate()
    assert own.PRESERVE_WHITESPACE is True and own is not tabulate and sys.modules["tabulate"] is tabulate
    assert tabulate.PRESERVE_WHITESPACE is False
    assert text.replace(" ", "") == "|a|b|\n|:----|:----|\n|x|y|"


def test_the_registry_offers_each_report_by_name():
    flops, _ = analyse("nested")
    summary = summarise(flops)
    assert list(REPORTS) == [
        *("text", "markdown", "csv", "json", "html", "latex"),
        *("fvcore", "tree", "paper", "svg", "png", "dot", "model-explorer", "trace"),
    ]
    assert list(REPORTS)[: len(FORMATS)] == list(FORMATS)
    for render in SUMMARY_REPORTS.values():
        assert render(summary) == render(summary, by="module", depth=None)
        with pytest.raises(ValueError, match="no view by 'layer'"):
            render(summary, by="layer")
    assert REPORTS["fvcore"](summary).startswith(f"{fvcore_format.write_table(summary, depth=3)}\n\n")
    for report in REPORTS.values():
        module, _, function = report.function.partition(":")
        accepted = inspect.signature(getattr(importlib.import_module(module), function)).parameters
        assert set(report.options) <= {*accepted, "collapse", *(View._fields if "options" in accepted else ())}


SHOUT = """
def render(summary, *, by="module", depth=None):
    return f"{summary.about['model'].upper()} by {by}: {summary.columns['flops']['']}!"
"""


def test_a_report_of_one_file_and_one_entry_is_a_format_of_count(tmp_path, monkeypatch, capsys):
    (tmp_path / "shout_report.py").write_text(SHOUT)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(REPORTS, "shout", Report("one loud line", "shout_report:render", views=("module", "operator")))
    text = output_of(capsys, "count", "zoo:lenet5", "--format", "shout", "--by", "operator")
    assert text == "LENET5 by operator: 416520!\n"
    assert main(["count", "zoo:lenet5", "--format", "shout", "--by", "both"]) == 2
    assert "--format shout supports --by module, operator; got both" in capsys.readouterr().err
    assert main(["count", "zoo:lenet5", "--format", "shout", "--top", "3"]) == 2
    assert "--top does not apply to --format shout" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["count", "--help"])
    assert "shout (one loud line)" in " ".join(capsys.readouterr().out.split())


def test_the_tree_has_one_view_and_can_be_cut():
    flops, _ = analyse("nested")
    summary = summarise(flops)
    with pytest.raises(ValueError, match="the tree has no view by 'operator': use 'module'"):
        fvcore_format.write_tree(summary, by="operator")
    assert fvcore_format.write_tree(summary, depth=0) == "Sequential(#params: 5.18K, #flops: 19.46K)"
    cut = fvcore_format.write_tree(summary, depth=1).splitlines()
    assert [line for line in cut if line.startswith("  (")] == [
        "  (0): Linear(",
        "  (1): Sequential(#params: 2.41K, #flops: 9.6K)",
        "  (2): Sequential(#params: 72, #flops: 0.26K)",
    ]


def test_what_fvcore_fails_on_is_shown():
    """A child that is None, a module inside itself, and a model without parameters."""
    net = Net(a=nn.ReLU(), gone=nn.ReLU())
    net.gone = None
    modules = read_modules(net)
    places = {**modules.by_name}
    assert (
        fvcore_format.write_tree(Summary(modules, {"flops": {"": 1}}))
        == "Net(\n  #flops: 1\n  (a): ReLU()\n  (gone): None\n)"
    )
    del places["a"]
    looped = Summary(type(modules)(places), {"flops": {}})
    assert fvcore_format.write_tree(looped) == "Net(\n  #flops: 0\n  (a): ...\n  (gone): None\n)"
    assert fvcore_format.write_parameter_table(modules).splitlines()[-1].replace(" ", "") == "|model|0|"


def test_a_column_that_fvcore_does_not_have_is_named_after_its_heading():
    summary = Summary(read_modules(Net(a=nn.ReLU())), {"bytes": {"": 2048, "a": 2048}}, uncalled={"bytes": frozenset()})
    assert fvcore_format.write_table(summary).splitlines() == [
        "| module   | #bytes   |",
        "|:---------|:---------|",
        "| a        | 2.048K   |",
    ]
    assert fvcore_format.write_tree(summary).splitlines()[1] == "  #bytes: 2.05K"


RENDERERS = {
    **SUMMARY_REPORTS,
    "terminal": lambda summary: write_text(summary, sort="name", width=80) if collapse(summary) else "",
    "parameters": lambda summary: fvcore_format.write_parameter_table(summary.modules, depth=10**9),
    "whole table": partial(fvcore_format.write_table, depth=10**9),
    "both": partial(REPORTS["csv"], by="both"),
}


def count_calls(render, summary):
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        render(summary)
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("name", RENDERERS)
def test_twice_the_modules_are_at_most_twice_the_work(name):
    once, twice = (count_calls(RENDERERS[name], make_wide(blocks)) for blocks in (40, 80))
    assert twice <= 2.1 * once


def test_the_measure_of_work_sees_fvcore_compare_each_name_with_each():
    from fvcore.nn.print_model_statistics import _group_by_module, _remove_zero_statistics

    once, twice = (
        count_calls(lambda summary: _remove_zero_statistics(_group_by_module(summary.columns)), make_wide(blocks))
        for blocks in (10, 20)
    )
    assert twice > 3 * once


@pytest.mark.parametrize("name", RENDERERS)
def test_a_deep_model_needs_no_recursion(name):
    limit = sys.getrecursionlimit()
    assert RENDERERS[name](make_deep(2))  # imports
    sys.setrecursionlimit(len(inspect.stack(0)) + 200)
    try:
        assert RENDERERS[name](make_deep(400))
    finally:
        sys.setrecursionlimit(limit)
