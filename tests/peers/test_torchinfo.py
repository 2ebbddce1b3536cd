"""torchinfo itself, run beside `table="torchinfo"`: its number is equal, for a model and for each module."""

from collections import Counter
from functools import cache
from importlib.metadata import version

import pytest
import torchinfo

from fvflops import load_table
from tests.support.models.peer_cases import build
from tests.support.peer_counts import CASES, REAL, Counted, calm, count_case

TABLE = load_table("torchinfo")

# Case → why its number differs. Nothing else may differ, and each of these must.
KNOWN_DIFFERENCES = {
    "small_einsum": "a class of the tests' own with a parameter `weight`: torchinfo counts it in every class",
}


@cache
def measure(name: str) -> tuple[Counted, dict[str, int]]:
    """Return what fvflops says of a case, and torchinfo's numbers of the modules in its total, "" being the whole."""
    model, inputs = build(name)
    with calm():
        ours = count_case((model, inputs), TABLE)
        summary = torchinfo.summary(model, input_data=list(inputs), verbose=0)
    names = {id(module): path for path, module in model.named_modules()}
    sums: Counter[str] = Counter()
    for layer in summary.summary_list:
        if layer.is_leaf_layer:
            sums[names[layer.layer_id]] += layer.macs
    return ours, {**sums, "": summary.total_mult_adds}


def test_the_table_names_the_version_that_is_installed():
    assert TABLE.description.startswith(f"torchinfo {version('torchinfo')}'s")


@pytest.mark.parametrize("name", CASES)
def test_the_number_is_torchinfos(name):
    ours, theirs = measure(name)
    assert (ours.by_module[""] != theirs[""]) == (name in KNOWN_DIFFERENCES), (ours.by_module[""], theirs[""])


def test_the_known_differences_are_few():
    assert KNOWN_DIFFERENCES.keys() <= set(CASES)
    assert len(set(REAL) - KNOWN_DIFFERENCES.keys()) >= 20


@pytest.mark.parametrize("name", ["torchvision:mobilenet_v3_small", "torchvision:swin_t", "shared", "encoder layer"])
def test_the_number_of_each_module_is_torchinfos(name):
    ours, theirs = measure(name)
    assert {module: ours.by_module[module] for module in theirs} == theirs
    assert sum(theirs.values()) == 2 * theirs[""] > 0


def test_every_row_of_a_class_is_used():
    used = frozenset().union(*(measure(name)[0].classes for name in CASES))
    assert TABLE.modules.keys() == used


def test_what_torchinfo_does_not_see_is_omitted_and_not_unknown():
    ours, _ = measure("attention")
    assert ours.by_module[""] == 0
    statuses = {entry.op: entry.status.name for entry in ours.counts.entries}
    assert statuses["aten::scaled_dot_product_attention"] == statuses["aten::linear"] == "IGNORED"
    assert set(statuses.values()) == {"ZERO_FLOP", "IGNORED"}
