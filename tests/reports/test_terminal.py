"""The table on a terminal: its width, bars and colours; and the order, cut and collapse of rows in every list."""

import csv
import errno
import fcntl
import io
import os
import pty
import re
import struct
import sys
import termios
import threading
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

from fvflops import ActivationCountAnalysis, FlopCountAnalysis, flop_count_table, record, summarise
from fvflops.analysis.model_analysis import analysed_run
from fvflops.cli import main
from fvflops.cli.progress import find_terminal
from fvflops.reports import REPORTS, fvcore_format
from fvflops.reports.count_report import write_markdown, write_text
from fvflops.reports.display_width import truncate_middle, wrap
from fvflops.reports.formats.text import Terminal
from fvflops.reports.terminal.collapse import collapse
from fvflops.units import format_short
from fvflops.views.analysed_run import make_summary, with_columns
from fvflops.views.summary_rows import count_itself
from fvflops.zoo import build
from tests.support.reports.report_formats import output_of, take_cells
from tests.support.reports.summaries import NET, name_everything

SGR = re.compile(r"\x1b\[[0-9;]*m")
VIEWS = ("module", "operator", "both")


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 8)

    def forward(self, x):
        return self.down(self.act(self.up(x)))


def stack(*widths):
    """Return a model whose `layers` are blocks of these widths, each 16 multiply-adds for each unit of width."""
    model = nn.Module()
    model.layers, model.head = nn.Sequential(*map(Block, widths)), nn.Linear(8, 2)
    model.forward = lambda x: model.head(model.layers(x))
    return model


def summarise_stack(*widths):
    flops = FlopCountAnalysis(stack(*widths), torch.ones(1, 8))
    return summarise(flops, ActivationCountAnalysis.from_trace(flops.trace()))


NETS_MODULES = replace(
    NET,
    columns={
        heading: {name: count for name, count in column.items() if name in NET.modules.by_name}
        for heading, column in NET.columns.items()
    },
)


def test_the_table_as_it_looks():
    # Of 70 cells 50 are names, figures and gaps. fc1's bar is 20 * 400/920 cells, 70 eighths; head's 90, fc2's 35.
    assert write_text(NETS_MODULES, width=70).split("\n\n")[0] == (
        "module   parameters  FLOPs  activations  % FLOPs\n"
        "-------  ----------  -----  -----------  -------  --------------------\n"
        "model           337    920           50   100.0%  ████████████████████\n"
        "  fc1           220    400           40    43.5%  ████████▊\n"
        "  head          105    520           10    56.5%  ███████████▎\n"
        "    fc2         105    200           10    21.7%  ████▍\n"
        "    act                320            0    34.8%  ███████\n"
        "  aux            12                         0.0%"
    )
    bars = re.findall(r"#+$", write_text(NETS_MODULES, width=70, encoding="ascii"), re.MULTILINE)
    assert list(map(len, bars)) == [20, 9, 11, 4, 7]


HOSTILE = ["fc", "层层层.卷积卷积", "é" * 9 + "e\u0301" * 9, "x\x1b[31m\n\u202ey", "a" * 30 + ".b.c"]


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("by", VIEWS)
def test_no_line_is_wider_than_the_terminal_whatever_the_names(by, name):
    summary = name_everything(name)
    for width in (*range(4, 24), 37, 60, 80, 200):
        for encoding in ("utf-8", "ascii"):
            text = write_text(summary, by=by, depth=9, width=width, encoding=encoding)
            lines = text.split("\n")
            assert max(map(take_cells, lines)) <= width
            assert all(line.isprintable() for line in lines)
            assert encoding == "utf-8" or text.isascii()
            painted = write_text(summary, by=by, depth=9, width=width, encoding=encoding, colour=True)
            assert SGR.sub("", painted) == text != painted
    assert name_everything("n" * 300).about["table"] in write_text(name_everything("n" * 300)).replace("\n", "")


def test_what_has_no_room_is_left_out_in_order_and_told():
    told = {
        width: (text.split("\n")[0].split(), re.findall(r"Columns hidden at width \d+: (.*)\.", text))
        for width in (80, 50, 42, 30, 16)
        for text in [write_text(NETS_MODULES, width=width)]
    }
    assert told[80] == (["module", "parameters", "FLOPs", "activations", "%", "FLOPs"], [])
    assert told[50] == (["module", "parameters", "FLOPs", "activations", "%", "FLOPs"], ["bars"])
    assert told[42] == (["module", "parameters", "FLOPs", "%", "FLOPs"], ["activations"])
    assert told[30][0] == ["module", "FLOPs", "%", "FLOPs"]
    assert told[16][0] == ["module", "FLOPs"]


def test_colours_tell_what_is_missing_and_nothing_else_is_red():
    text = write_text(NET, colour=True)
    assert re.findall("\x1b\\[31m(.*?)\x1b", text) == [
        "Unsupported, so not counted: mylib::scan (2 calls, 4,096 output elements)."
    ]
    assert text.startswith("\x1b[1mmodule ") and "\x1b[36m█" in text and "\x1b" not in write_text(NET)


def test_blank_cells_and_many_equal_rows_are_explained():
    class Net(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Embedding(8, 4), *(nn.Linear(4, 4) for _ in range(40)), nn.Linear(4, 8, bias=False))
            self[-1].weight, self.off = self[0].weight, nn.Linear(4, 4)

        def forward(self, x):
            for layer in list(self)[:-1]:
                x = layer(x)
            return x

    analysis = FlopCountAnalysis(Net(), torch.zeros(1, 2, dtype=torch.long)).uncalled_modules_warnings(False)
    summary = summarise(analysis)
    notes = write_text(summary).split("\n\n")[1].splitlines()
    collapsing = "--collapse shows consecutive equal layers as one row."
    assert notes == ["41 has the parameters of 0, counted there.", "Not called: off.", collapsing]
    assert collapsing not in write_text(collapse(summary))
    with record(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))) as nothing:
        pass
    assert "\nNot called: model, 0, 1.\n" in write_text(summarise(nothing))


def test_a_text_is_cut_in_its_middle_and_wrapped_between_words():
    assert [truncate_middle("层层层层e\u0301", width) for width in (9, 8, 5, 2, 1)] == [
        "层层层层e\u0301",
        "层层…层e\u0301",
        "层…e\u0301",
        "…e\u0301",
        "…",
    ]
    assert wrap("a 层层层 bb", 4) == ["a", "层层", "层", "bb"]


def test_rows_are_ordered_and_cut_alike_in_every_list():
    rows = list(csv.DictReader(io.StringIO(REPORTS["csv"](NET, sort="activations", top=3))))
    assert [row["module"] for row in rows] == ["", "fc1", "head"]
    for render, more in ((fvcore_format.write_table, 3), (write_text, 3), (write_markdown, 3)):
        text = render(NET, sort="activations", top=3)
        named = re.findall(r"^\W*(model|fc1|head(?:\.\w+)?|aux)\b", text, re.MULTILINE)
        assert named == ["model", "fc1", "head"] and f"{more} more modules." in text
    by_name = list(csv.DictReader(io.StringIO(REPORTS["csv"](NET, by="both", sort="name"))))
    assert [row["module"] for row in by_name] == ["", "", "fc1", "head", "head", "head.act", "head.fc2"]
    assert "gelu" not in fvcore_format.write_table(
        NET, by="operator", top=1
    ) and "1 more operator." in fvcore_format.write_table(NET, by="operator", top=1)
    for options, message in (({"sort": "flps"}, "did you mean 'flops'"), ({"top": 0}, "an integer >= 1, not 0")):
        for name in ("text", "fvcore", "csv", "markdown", "latex", "paper"):
            with pytest.raises(ValueError, match=message):
                REPORTS[name](NET, **options)


def test_equal_layers_are_one_row_with_their_sum_and_unequal_ones_stay():
    whole, found = summarise_stack(8, 4, 4, 4, 8), collapse(summarise_stack(8, 4, 4, 4, 8))
    assert found.labels == {"layers.1": "layers.1–3 × 3"}
    for heading, column in whole.columns.items():
        layers = [column[f"layers.{number}"] for number in range(5)]
        assert found.columns[heading]["layers.1"] == sum(layers[1:4]) == 3 * layers[1]
        assert [found.columns[heading][f"layers.{number}"] for number in (0, 4)] == [layers[0], layers[4]]
        assert found.columns[heading]["layers.1.up"] == column["layers.1.up"]
        assert not {"layers.2", "layers.2.up", "layers.2.up.weight"} & found.columns[heading].keys()
    assert [row["flops"] for row in csv.DictReader(io.StringIO(REPORTS["csv"](found, depth=2)))][1:5] == [
        str(flops) for flops in (448, 128, 192, 128)
    ]
    text = write_text(found, width=80)
    assert re.findall(r"^ +\S.*? (?= )", text, re.MULTILINE)[:4] == ["  layers ", "    0 ", "      up ", "      down "]
    assert "    1–3 × 3  " in text and "      1.up " in text and "sum of N equal modules; rows of their" in text
    assert "sum of N equal modules.\n" in write_text(found, width=80, depth=2)
    assert "layers.1–3 × 3" in fvcore_format.write_table(found) and "layers.1–3 × 3 | Block |" in write_markdown(found)
    assert collapse(summarise_stack(8, 4, 8)).labels == {}
    for name in ("tree", "json"):
        with pytest.raises(ValueError, match="has a row for every module"):
            REPORTS[name](found)


def test_layers_with_equal_totals_and_unequal_insides_stay():
    model = nn.Sequential(
        nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 8)), nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 8))
    )
    assert collapse(summarise(FlopCountAnalysis(model, torch.ones(1, 8)))).labels == {"0": "0–1 × 2"}
    model[1] = nn.Sequential(nn.Linear(8, 4), nn.Identity(), nn.Linear(4, 8))
    assert collapse(summarise(FlopCountAnalysis(model, torch.ones(1, 8)))).labels == {}


def test_the_python_table_takes_the_same_options_and_is_fvcores_without_them():
    flops = FlopCountAnalysis(stack(4, 4), torch.ones(1, 8))
    plain = flop_count_table(flops)
    assert " layers.1.up " in plain and "×" not in plain
    assert flop_count_table(flops, collapse=True, top=2) == (
        "| module         | #parameters   | #flops   |\n"
        "|:---------------|:--------------|:---------|\n"
        "| model          | 0.17K         | 0.144K   |\n"
        "| layers.0–1 × 2 | 0.152K        | 0.128K   |\n\n"
        "3 more modules.\n"
        "A row with × N is the sum of N equal modules."
    )


@pytest.mark.parametrize(
    ("environment", "screen"),
    [
        ({}, (True, Terminal(80, True, "utf-8"))),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, (True, Terminal(80, False, "utf-8"))),
        ({"TERM": "dumb", "COLUMNS": "33"}, (True, Terminal(33, False, "utf-8"))),
        ({"TERM": "dumb", "CLICOLOR_FORCE": "1"}, (True, Terminal(80, True, "utf-8"))),
        ({"FORCE_COLOR": "0", "NO_COLOR": ""}, (True, Terminal(80, False, "utf-8"))),
        ({"COLUMNS": "33", "CLICOLOR_FORCE": "0"}, (False, None)),
        ({"FORCE_COLOR": "1"}, (False, Terminal(None, True, "utf-8"))),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, (False, None)),
    ],
)
def test_what_the_environment_says_of_the_screen(environment, screen):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    stream.isatty = lambda: screen[0]
    assert find_terminal(stream, environment) == screen[1]


def print_on_terminal(width, *argv):
    """Return what a command prints on a terminal of this width."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    parts = []
    # A terminal holds few characters until somebody reads them.
    reader = threading.Thread(target=lambda: parts.extend(read_terminal(leader)))
    reader.start()
    with pytest.MonkeyPatch.context() as patch, open(follower, "w", encoding="utf-8") as stream:
        for name in ("NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE", "COLUMNS", "TERM"):
            patch.delenv(name, raising=False)
        patch.setattr(sys, "stdout", stream)
        code = main(argv)
    reader.join()
    os.close(leader)
    assert code == 0
    return b"".join(parts).decode().replace("\r\n", "\n")


def read_terminal(leader):
    """Yield what is written to a terminal until its other end is closed, which Linux tells by an error."""
    try:
        while part := os.read(leader, 1 << 16):
            yield part
    except OSError as error:
        assert error.errno == errno.EIO


def test_a_terminal_gets_colours_and_a_pipe_or_file_the_same_table_without(tmp_path, capsys, monkeypatch):
    path = tmp_path / "net.py"
    path.write_text(
        "import torch\nfrom torch import nn\n"
        "def name(first):\n    net = nn.Sequential()\n    net.add_module(first, nn.Linear(4, 3))\n"
        "    net.add_module('act', nn.ReLU())\n    net.add_module('last', nn.Linear(3, 3))\n"
        "    return net, torch.ones(1, 4)\n"
        "def plain():\n    return name('first')\n"
        "def hostile():\n    return name('a\\x1b[2J\\u202e' + 'b' * 60 + '\\n' + 'c' * 10_000)\n"
    )
    shown = print_on_terminal(50, "count", f"{path}:hostile")
    lines = SGR.sub("", shown).split("\n")
    assert "\x1b[1m" in shown and max(map(take_cells, lines)) <= 50 and all(map(str.isprintable, lines))
    assert lines[3].startswith("  a\\x1b[") and "…" in lines[3]
    piped = output_of(capsys, "count", f"{path}:hostile")
    assert all(map(str.isprintable, piped.split("\n"))) and "█" in piped
    assert max(map(take_cells, piped.split("\n"))) == 80
    piped = output_of(capsys, "count", f"{path}:hostile", "--format", "fvcore")
    assert all(map(str.isprintable, piped.split("\n")))
    assert "|  a\\x1b[2J\\u202e" + "b" * 20 in piped and len(piped) < 10_000
    piped = output_of(capsys, "count", f"{path}:plain", "--format", "fvcore")
    assert "(3, 4)" in piped and print_on_terminal(50, "count", f"{path}:plain", "--format", "fvcore") == piped
    monkeypatch.setenv("COLUMNS", "50")
    piped = output_of(capsys, "count", f"{path}:plain")
    assert SGR.sub("", print_on_terminal(50, "count", f"{path}:plain")) == piped
    monkeypatch.delenv("COLUMNS")
    assert print_on_terminal(80, "count", f"{path}:plain", "--output", str(tmp_path / "out")) == ""
    assert (tmp_path / "out").read_text() == output_of(capsys, "count", f"{path}:plain")


@pytest.mark.parametrize("repeated", [False, True])
def test_what_a_module_does_outside_its_submodules_has_a_row(repeated):
    flops = FlopCountAnalysis(build("gpt2", device="meta"), torch.ones(1, 1024, dtype=torch.int64))
    own = Counter()  # by the calls themselves
    for call in flops.op_calls():
        own[call.module] += call.flops or 0
    summary = make_summary(with_columns(analysed_run(flops)))
    summary = collapse(summary) if repeated else summary
    text = write_text(summary, depth=4)
    rows = [line.split() for line in text.splitlines() if "(itself)" in line]
    attentions = [name for name in own if name.endswith(".attn") and (name == "h.0.attn" or not repeated)]
    assert [row[2] for row in rows] == [format_short(own[name]) for name in attentions] and attentions
    assert count_itself(summary, ["h.0.attn"], "flops")["h.0.attn"]["flops"] == own["h.0.attn"]
    assert "(itself)" in write_markdown(summary, depth=4) and "(itself)" not in write_markdown(summary, sort="flops")
