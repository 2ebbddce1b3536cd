"""thop itself, run beside `table="thop"`: its number is equal, for a model and each module, but for a short list."""

import warnings
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import version
from typing import Any

import pytest

from fvflops import load_table
from tests.support.models.peer_cases import build
from tests.support.peer_counts import CASES, REAL, Counted, calm, count_case

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it compares versions with a class that Python deprecates
    import thop

TABLE = load_table("thop")

# Case → why its number differs. Nothing else may differ, and each of these must.
KNOWN_DIFFERENCES = {
    "timm:coat_lite_tiny": "modules stand at several places: thop hooks them at each, and counts them at each",
    "shared": "a module stands at two places: thop hooks it at each, and counts it at each",
    "renamed": "a subclass of nn.Linear that changes nothing: thop goes by the very class, and counts 0",
}


@cache
def measure(name: str) -> tuple[Counted, dict[str, int]]:
    """Return what fvflops says of a case, and thop's numbers of it by module, "" being the whole."""
    model, inputs = build(name)
    with calm():
        ours = count_case((model, inputs), TABLE)
        macs, _, layers = thop.profile(model, inputs, verbose=False, ret_layer_info=True)
    return ours, {"": macs, **dict(flatten(layers))}


def flatten(layers: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, int]]:
    for name, (macs, _, inside) in layers.items():
        yield prefix + name, macs
        yield from flatten(inside, f"{prefix}{name}.")


def test_the_table_names_the_version_that_is_installed():
    assert version("thop") == "0.1.1-2209072238"  # which PyPI writes 0.1.1.post2209072238
    assert TABLE.description.startswith("thop 0.1.1's")


@pytest.mark.parametrize("name", CASES)
def test_the_number_is_thops(name):
    ours, theirs = measure(name)
    assert (ours.by_module[""] != theirs[""]) == (name in KNOWN_DIFFERENCES), (ours.by_module[""], theirs[""])


def test_the_known_differences_are_few():
    assert KNOWN_DIFFERENCES.keys() <= set(CASES)
    assert len(set(REAL) - KNOWN_DIFFERENCES.keys()) >= 20


@pytest.mark.parametrize("name", ["torchvision:mobilenet_v3_small", "torchvision:swin_t", "decoder layer"])
def test_the_number_of_each_module_is_thops(name):
    ours, theirs = measure(name)
    assert len(theirs) > 10
    assert {module: ours.by_module[module] for module in theirs} == theirs


def test_every_row_of_a_class_is_used():
    used = frozenset().union(*(measure(name)[0].classes for name in CASES))
    assert TABLE.modules.keys() == used


def test_what_thop_does_not_see_is_omitted_and_not_unknown():
    ours, _ = measure("attention")
    assert ours.by_module[""] == 0
    statuses = {entry.op: entry.status.name for entry in ours.counts.entries}
    assert statuses["aten::scaled_dot_product_attention"] == statuses["aten::linear"] == "IGNORED"
    assert set(statuses.values()) == {"ZERO_FLOP", "IGNORED"}
