"""The page on migration beside the tools it names: its hooks, and the table of numbers that differ by design."""

import io
import re
import warnings
from contextlib import redirect_stdout

import ptflops
import pytest
import torch
from fvcore import nn as fvcore
from torch import nn
from torch.nn import functional as F

from fvflops import FlopCountAnalysis
from tests.support.documentation.pages import PAGES, shown_files
from tests.support.models.whole_models import Function
from tests.support.peer_counts import calm

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it compares versions with a class that Python deprecates
    import thop

PAGE = PAGES["docs/guides/migrate.md"]
ROWS = {
    label: re.findall(r"[\d,]+", cells)
    for label, cells in re.findall(r"^\| (.+?) \| ((?:[\d,]+ \| ){4})", PAGE, re.MULTILINE)
}


class MyLinear(nn.Linear):
    """A subclass that changes nothing."""


CASES = {
    "`nn.Linear(64, 64)`, 8 × 64": (nn.Linear(64, 64), torch.zeros(8, 64)),
    "a subclass of it, 1 × 64": (MyLinear(64, 64), torch.zeros(1, 64)),
    "`nn.BatchNorm2d(8)`, 1 × 8 × 32 × 32": (nn.BatchNorm2d(8).eval(), torch.zeros(1, 8, 32, 32)),
    '`nn.Conv2d(8, 8, 3, padding="same")`, 1 × 8 × 32 × 32': (
        nn.Conv2d(8, 8, 3, padding="same"),
        torch.zeros(1, 8, 32, 32),
    ),
    "`nn.ConvTranspose2d(8, 8, 2, stride=2)`, 1 × 8 × 32 × 32": (
        nn.ConvTranspose2d(8, 8, 2, stride=2),
        torch.zeros(1, 8, 32, 32),
    ),
    "`nn.LSTM(64, 64)`, 32 × 1 × 64": (nn.LSTM(64, 64), torch.zeros(32, 1, 64)),
    "`x @ x.mT`, 1 × 128 × 64": (Function(lambda x: x @ x.mT), torch.zeros(1, 128, 64)),
    "`F.scaled_dot_product_attention(x, x, x)`, 1 × 4 × 128 × 64": (
        Function(lambda x: F.scaled_dot_product_attention(x, x, x)),
        torch.zeros(1, 4, 128, 64),
    ),
}


def ask_ptflops(model, x, **options):
    with redirect_stdout(io.StringIO()):
        return ptflops.get_model_complexity_info(
            model, (1,), input_constructor=lambda size: x, as_strings=False, print_per_layer_stat=False, **options
        )[0]


def test_the_table_has_these_cases():
    assert ROWS.keys() == CASES.keys()


@pytest.mark.parametrize("label", CASES)
def test_the_numbers_of_the_table_are_the_tools(label):
    model, x = CASES[label]
    with calm():
        measured = (
            fvcore.FlopCountAnalysis(model, x).total(),
            thop.profile(model, inputs=(x,), verbose=False)[0],
            ask_ptflops(model, x),
            FlopCountAnalysis(model, x).total(),
        )
    assert ROWS[label] == [f"{int(number):,}" for number in measured]


def test_hooks_and_handles_of_the_page_count_the_same():
    shown = {"__name__": "hooks"}
    exec(shown_files(PAGE)["hooks.py"], shown)  # the page's own text
    model, x = shown["build"]()
    (said,) = re.findall(r"^Both of thop's numbers are ([\d,]+), and both of ptflops' ([\d,]+)\.", PAGE, re.MULTILINE)
    with calm():
        theirs = thop.profile(model, inputs=(x,), custom_ops={shown["Scan"]: shown["thop_hook"]}, verbose=False)[0]
        by_ptflops = ask_ptflops(model, x, custom_modules_hooks={shown["Scan"]: shown["ptflops_hook"]})
    ours = [
        FlopCountAnalysis(model, x, table=table).set_module_handle(shown["Scan"], shown["handle"]).total()
        for table in ("thop", "ptflops")
    ]
    assert said == (f"{int(theirs):,}", f"{by_ptflops:,}") == tuple(f"{number:,}" for number in ours)
