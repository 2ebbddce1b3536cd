"""Hostile names of modules, classes, parameters and ops, and a run of a model that has them."""

import json
from functools import cache
from typing import Any

import torch
from torch import nn

from fvflops import Trace, record
from tests.support.reports.timed_traces import measure

# Each can break a page, a terminal, Markdown, LaTeX, a spreadsheet, XML or a file. None contains a dot.
NAMES = (
    "</script><script>HACKED=1</script>",
    "<img src=x onerror=HACKED=2>",
    "]]>",
    "<!--",
    "\x1b[31mred\x1b]0;title\x07\x9b31m\x0b\x0c\x1c",
    "one\ntwo\r\nthree\u2028four\x85",
    "\rover",
    "\t=1",
    "=cmd|' /C calc'!A0",
    "+1",
    "-1",
    "@x",
    "＝1",
    "a|b`c`*d*[e](f)_",
    "$&%#_{}~^\\",
    "nul\0",
    "\ud800 alone",
    "\u202eleft\u2066\u200b\ufeff",
    "שלום\U0001f469\u200d\U0001f680" + "e" + "\u0301" * 40,
    "9" * 5_000,
    "L" * 10_000,
    "\"'",
    "  ",
    " ** x  y_ ",
    "::set-output name=x::y",
    " ::error::x",
    "##[error]x",
    "##vso[task]x",
)
ALL = " ".join(NAMES)
# More that a cell of a table must show as it is.
CELLS = (
    *("\\input{/etc/passwd}", "%", "a & b \\\\", "$x^2_3$ #1 ~", "[9em]", "*", "**", "*x*", "__x__", "_", "_x_", "``"),
    *("--'',,``", '"quoted"', " ", "   ", " x", "x ", "* x  y *", "\\ ", "\u00a0", "\u3000x\u2003", "@SUM(A1)"),
    *("\u202eabc", " =1"),
    *("=1+1", "a|b", "`x`", "<b>&amp;", "&lt;", "{{data}}", "[z](u)", "\\|", "~~s~~", "$m$", "#1", "a,b", "'", "\r"),
    *(name for name in NAMES if name.isascii()),
)


class Part(nn.Module):
    """A module with a weight, by which its input is multiplied."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def extra_repr(self) -> str:
        return "TOKEN"

    def forward(self, x):
        return torch.tanh(x @ self.weight)


@cache
def _record() -> Trace:
    model = nn.Sequential()
    for index in range(len(NAMES) + 1):
        model.add_module(f"TOKEN{index:02}", type(f"TOKEN{index:02}", (Part,), {})())
    optimizer = torch.optim.SGD([{"params": list(model.parameters()), "name": "TOKEN"}], lr=0.1)
    with record(model) as run:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    return measure(run.trace(), memory=True)


@cache
def record_benign() -> Trace:
    """Return a training step, with made-up times, of a model with a module for each name and one for all."""
    return _rename_all({"aten::tanh": "good::tanh"})


@cache
def record_hostile() -> Trace:
    """Return the same step of the same model, whose modules, parameters, classes, ops and inputs have hostile names."""
    words = {f"TOKEN{index:02}": name for index, name in enumerate((*NAMES, ALL))}
    words |= {"TOKEN": ALL, "aten::tanh_backward": f"evil::{ALL}", "aten::tanh": f"evil::{ALL} too"}
    words |= {"Sequential": ALL, "weight": ALL, "float32[2, 4]": ALL}
    return _rename_all(words)


def _rename_all(words: dict[str, str]) -> Trace:
    saved = json.loads(_record().to_json())
    saved.pop("checksum", None)  # it is the checksum of the old names
    return Trace.from_json(json.dumps(_rename(saved, words)))


def _rename(value: Any, words: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {_rename(key, words): _rename(item, words) for key, item in value.items()}
    if isinstance(value, list):
        return [_rename(item, words) for item in value]
    if isinstance(value, str):
        for token, word in words.items():
            value = value.replace(token, word)
    return value
