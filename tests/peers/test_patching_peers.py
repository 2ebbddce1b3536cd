"""Peers that patch torch, run beside fvflops' tables of them: their numbers are equal, but for a short list."""

from importlib.metadata import version
from typing import NamedTuple

import pytest

from fvflops import FlopCountAnalysis, load_table, parameter_count
from tests.support.models.peer_cases import PIECES, TRACEABLE, build
from tests.support.models.whole_models import MODELS
from tests.support.peer_counts import CASES, REAL, classes_unused, count_by
from tests.support.processes.peer_process import run_peers

OPERATOR = "x @ y, which calflops does not see as it sees torch.matmul, and x.softmax(...)"
METHOD = "x.softmax(...), which DeepSpeed does not see as it sees the functional softmax"
HELD = "it took hold of its activation function when it was built, before the peer put its own in place"
SIZES = "arithmetic on sizes (H * W, H == 224), a flop each to torch_flops, which no op does"
# Of DeepSpeed and of calflops, whose code was DeepSpeed's.
SHARED_DIFFERENCES: dict[str, tuple[str, dict[str, int]]] = {
    "toy": ("torch.relu, which is not seen as the functional relu is", {"flops": 8308}),
    "encoder layer": (HELD, {"flops": 160}),
    "decoder layer": (HELD, {"flops": 160}),
    "resize to a number": ("a size of 6 is 6 to the peer, and 6 * 6 to the op", {"flops": 30}),
    "relu of torch": ("torch.relu", {"flops": 8}),
    "softmax by a method": ("x.softmax", {"flops": 8}),
    "gelu held": (HELD, {"flops": 8}),
    "add and mul of torch": ("torch.add and torch.mul, which the table takes for x + y and x * y", {"flops": -16}),
}
SHARED_ERRORS = {
    **dict.fromkeys(("conv2d without a batch", "conv2d without a batch, same"), "AssertionError"),
    **dict.fromkeys(("lstm, packed", "gru, packed", "rnn, packed"), "AttributeError"),
}
# Models that torch.fx cannot trace: their way depends on sizes, or they unpack what may be anything.
UNTRACEABLE = {
    "torchvision:fcn_resnet50",
    "torchvision:lraspp_mobilenet_v3_large",
    "timm:convit_tiny",
    "timm:mobilevit_xxs",
    *(name for name in MODELS if name.startswith("transformers:")),
}


class Peer(NamedTuple):
    """A peer: its title, the cases, why it differs in some and by how much fvflops counts more, its errors.

    Nothing else may differ, and each of these must.
    """

    title: str
    names: tuple[str, ...]
    differences: dict[str, tuple[str, dict[str, int]]]
    errors: dict[str, str]
    numbers: tuple[str, ...] = ("flops", "macs", "parameters")


PEERS = {
    "calflops": Peer(
        "calflops",
        (*CASES, *PIECES),
        {
            **SHARED_DIFFERENCES,
            "timm:convit_tiny": (OPERATOR, {"flops": 358029256, "macs": 177322752}),
            "timm:coat_lite_tiny": (
                "as the others, and calflops counts a module that stands at several places at each",
                {"flops": -72935296, "macs": -35367680},
            ),
            "timm:levit_128s": (OPERATOR, {"flops": 49187122, "macs": 24369504}),
            "timm:xcit_nano_12_p16_224": (OPERATOR, {"flops": 38584320, "macs": 19267584}),
            "timm:botnet26t_256": (OPERATOR, {"flops": 236601344, "macs": 118030336}),
            "timm:efficientformer_l1": (OPERATOR, {"flops": 6165768, "macs": 3073280}),
            "timm:visformer_tiny": (OPERATOR, {"flops": 133255500, "macs": 66382848}),
            "shared": ("a module that stands at two places: calflops counts it at each", {"flops": -128, "macs": -64}),
            "products by @": ("x @ y", {"flops": 720, "macs": 360}),
            "conv transpose without a batch": ("calflops takes the channels for the batch", {"flops": 84}),
        },
        SHARED_ERRORS,
    ),
    "deepspeed": Peer(
        "DeepSpeed",
        (*CASES, *PIECES),
        {
            **SHARED_DIFFERENCES,
            "timm:convit_tiny": (METHOD, {"flops": 3383752}),
            "timm:coat_lite_tiny": (METHOD, {"flops": 735360}),
            "timm:levit_128s": (METHOD, {"flops": 448114}),
            "timm:xcit_nano_12_p16_224": (METHOD, {"flops": 49152}),
            "timm:botnet26t_256": (METHOD, {"flops": 540672}),
            "timm:efficientformer_l1": (METHOD, {"flops": 19208}),
            "timm:visformer_tiny": (METHOD, {"flops": 489804}),
            "upsample by 1.5": ("3 * 1.5 places are 4.5 to DeepSpeed, and 4 in the output", {"flops": -25}),
            "conv transpose without a batch": ("DeepSpeed takes the channels for the batch", {"flops": 324}),
            "einsum of einops": ("DeepSpeed counts it, and the torch.einsum that it calls", {"flops": -481}),
        },
        SHARED_ERRORS,
    ),
    "torch_flops": Peer(
        "torch_flops",
        (*REAL, *TRACEABLE),
        {
            "torchvision:vit_b_16": (SIZES, {"flops": -16}),
            "timm:coat_lite_tiny": (SIZES, {"flops": -24}),
            "timm:botnet26t_256": (SIZES, {"flops": -88}),
            "timm:xcit_nano_12_p16_224": (
                "functional.normalize, one call that torch_flops does not know, divides inside; so does torch.div",
                {"flops": 602142},
            ),
            "timm:resnest14d": (
                "the functional softmax, which torch_flops does not know as it knows x.softmax",
                {"flops": 4800},
            ),
            "fx: softmax by a function": ("the functional softmax", {"flops": 22}),
            "fx: add by a method": ("x.add(1), which torch_flops does not know as it knows x + 1", {"flops": 8}),
            "fx: sizes": (SIZES, {"flops": -1}),
        },
        dict.fromkeys(sorted(UNTRACEABLE), "TraceError"),
        ("flops",),
    ),
}
# What peers' pages say; torch_flops' of the models as they were when it was written.
PUBLISHED = {
    ("deepspeed", "lenet5 on 32x32"): {"flops": 866_076_672, "macs": 426_516_480, "parameters": 61_706},
    ("torch_flops", "published: vit_base_patch16_224"): {"flops": 35_164_979_282},
    ("torch_flops", "published: resnet50"): {"flops": 8_227_340_288},
    ("torch_flops", "published: linear"): {"flops": 40},
    ("torch_flops", "published: linear and one"): {"flops": 44},
}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """Return peer → case → its numbers, or its error."""
    return run_peers({peer: PEERS[peer].names for peer in PEERS}, tmp_path_factory.mktemp("peers"))


@pytest.mark.parametrize("peer", PEERS)
def test_the_table_names_the_version_that_is_installed(peer):
    assert load_table(peer).description.startswith(f"{PEERS[peer].title} {version(peer)}'s")


@pytest.mark.parametrize(
    ("peer", "name"), [(key, name) for key, peer in PEERS.items() for name in peer.names if name not in peer.errors]
)
def test_the_numbers_are_the_peers(peer, name, theirs):
    ours = count_by(peer, name)
    assert theirs[peer][name].keys() == {*PEERS[peer].numbers}
    _, expected = PEERS[peer].differences.get(name, ("", {}))
    assert ours.less(theirs[peer][name]) == expected
    assert not ours.unknown


@pytest.mark.parametrize(
    ("peer", "name", "error"), [(key, *item) for key, peer in PEERS.items() for item in peer.errors.items()]
)
def test_what_a_peer_cannot_measure_is_counted(peer, name, error, theirs):
    assert theirs[peer][name].partition(":")[0] == error
    assert count_by(peer, name).numbers["flops"] > 0


@pytest.mark.parametrize(("peer", "name"), PUBLISHED)
def test_a_published_figure_is_reproduced(peer, name, theirs):
    published = PUBLISHED[peer, name]
    assert theirs[peer][name] == published and not count_by(peer, name).less(published)


def test_published_figures_are_those_of_the_analysis():
    model, inputs = build("lenet5 on 32x32")
    analysis, published = FlopCountAnalysis(model, inputs, table="deepspeed"), PUBLISHED["deepspeed", "lenet5 on 32x32"]
    assert (analysis.total(), analysis.macs(), parameter_count(model)[""]) == tuple(published.values())


@pytest.mark.parametrize(("peer", "least"), [("calflops", 35), ("deepspeed", 35), ("torch_flops", 25)])
def test_the_known_differences_are_few_and_say_something(peer, least):
    _, names, differences, errors, _ = PEERS[peer]
    assert differences.keys() | errors.keys() <= {*names}
    assert all(any(difference.values()) for _, difference in differences.values())
    assert len({*names} & MODELS.keys() - errors.keys() - differences.keys()) >= least


@pytest.mark.parametrize("peer", PEERS)
def test_the_comparison_sees_a_difference(peer, theirs):
    for number, value in theirs[peer]["zoo:lenet5"].items():
        assert count_by(peer, "zoo:lenet5").less({number: value + 1}) == {number: -1}


@pytest.mark.parametrize("peer", PEERS)
def test_every_row_of_a_class_is_used(peer):
    assert not classes_unused(peer, PEERS[peer].names)
    assert classes_unused(peer, ["zoo:lenet5"])
