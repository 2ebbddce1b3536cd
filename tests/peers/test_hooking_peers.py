"""thop and torchinfo, which hook modules, beside fvflops' tables of them: equal numbers, but for a short list."""

import warnings
from collections import Counter
from functools import cache
from importlib.metadata import version

import pytest
import torchinfo

from fvflops import load_table
from tests.support.models.peer_cases import build
from tests.support.peer_counts import CASES, REAL, USUAL_CASES, calm, count_case
from tests.support.random_cases import long_except

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it compares versions with a class that Python deprecates
    import thop

# Case → why its number differs. Nothing else may differ, and each of these must.
KNOWN_DIFFERENCES = {
    "thop": {
        "timm:coat_lite_tiny": "modules stand at several places: thop hooks them at each, and counts them at each",
        "shared": "a module stands at two places: thop hooks it at each, and counts it at each",
        "renamed": "a subclass of nn.Linear that changes nothing: thop goes by the very class, and counts 0",
    },
    "torchinfo": {
        "small_einsum": "a class of the tests' own with a parameter `weight`: torchinfo counts it in every class"
    },
}
PEERS = tuple(KNOWN_DIFFERENCES)
# By default, with models that alone have a row of a class.
DEFAULT = (*USUAL_CASES, "torchvision:convnext_tiny", "timm:nf_resnet26", "timm:poolformer_s12")


@cache
def measure(name):
    """Return of each peer what fvflops says of a case, and its own numbers of modules, "" being the whole."""
    case = build(name)
    with calm():
        return {
            peer: (count_case(case, load_table(peer)), ask(*case))
            for peer, ask in (("torchinfo", ask_torchinfo), ("thop", ask_thop))
        }


def ask_thop(model, inputs):
    macs, _, layers = thop.profile(model, inputs, verbose=False, ret_layer_info=True)
    return {"": macs, **dict(flatten(layers))}


def flatten(layers, prefix=""):
    for name, (macs, _, inside) in layers.items():
        yield prefix + name, macs
        yield from flatten(inside, f"{prefix}{name}.")


def ask_torchinfo(model, inputs):
    summary = torchinfo.summary(model, input_data=list(inputs), verbose=0)
    names = {id(module): path for path, module in model.named_modules()}
    sums = Counter()
    for layer in summary.summary_list:
        if layer.is_leaf_layer:
            sums[names[layer.layer_id]] += layer.macs
    return {**sums, "": summary.total_mult_adds}


def test_the_tables_name_the_versions_that_are_installed():
    assert version("thop") == "0.1.1-2209072238"  # which PyPI writes 0.1.1.post2209072238
    assert load_table("thop").description.startswith("thop 0.1.1's")
    assert load_table("torchinfo").description.startswith(f"torchinfo {version('torchinfo')}'s")


@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.parametrize("name", long_except(DEFAULT, CASES))
def test_the_number_is_the_peers(name, peer):
    ours, theirs = measure(name)[peer]
    assert (ours.by_module[""] != theirs[""]) == (name in KNOWN_DIFFERENCES[peer]), (ours.by_module[""], theirs[""])


@pytest.mark.parametrize("peer", PEERS)
def test_the_known_differences_are_few(peer):
    assert KNOWN_DIFFERENCES[peer].keys() <= set(CASES)
    assert len(set(REAL) - KNOWN_DIFFERENCES[peer].keys()) >= 20


@pytest.mark.parametrize(
    ("peer", "name"),
    [
        *(("thop", name) for name in ("torchvision:mobilenet_v3_small", "decoder layer")),
        *(("torchinfo", name) for name in ("torchvision:mobilenet_v3_small", "shared", "encoder layer")),
        *(pytest.param(peer, "torchvision:swin_t", marks=pytest.mark.long) for peer in PEERS),
    ],
)
def test_the_number_of_each_module_is_the_peers(peer, name):
    ours, theirs = measure(name)[peer]
    assert {module: ours.by_module[module] for module in theirs} == theirs
    assert len(theirs) > 10 if peer == "thop" else sum(theirs.values()) == 2 * theirs[""] > 0


@pytest.mark.parametrize("peer", PEERS)
def test_every_row_of_a_class_is_used(peer):
    used = frozenset().union(*(measure(name)[peer][0].classes for name in DEFAULT))
    assert load_table(peer).modules.keys() == used


@pytest.mark.parametrize("peer", PEERS)
def test_what_a_peer_does_not_see_is_ignored_and_not_unknown(peer):
    ours, _ = measure("attention")[peer]
    assert ours.by_module[""] == 0
    statuses = {entry.op: entry.status.name for entry in ours.counts.entries}
    assert statuses["aten::scaled_dot_product_attention"] == statuses["aten::linear"] == "IGNORED"
    assert set(statuses.values()) == {"ZERO_FLOP", "IGNORED"}
