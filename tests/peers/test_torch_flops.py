"""torch_flops itself, run beside `table="torch_flops"`: its flops are equal, but for a short list."""

from importlib.metadata import version

import pytest

from fvflops import load_table
from tests.support.models.peer_cases import TRACEABLE
from tests.support.models.whole_models import MODELS
from tests.support.peer_counts import LARGE, REAL, classes_unused, count_by
from tests.support.processes.peer_process import run_peer

# Models that torch.fx cannot trace: their way depends on sizes, or they unpack what may be anything.
UNTRACEABLE = {
    "zoo:gpt2",
    "zoo:vit_b_16",
    "torchvision:fcn_resnet50",
    "torchvision:lraspp_mobilenet_v3_large",
    "timm:convit_tiny",
    "timm:mobilevit_xxs",
    *(name for name in MODELS if name.startswith("transformers:")),
}
NAMES = (*REAL, *TRACEABLE)

SIZES = "arithmetic on sizes (H * W, H == 224), a flop each to torch_flops, which no op does"
# Model → why it differs, and by how much fvflops counts more. Nothing else may differ, and each of these must.
KNOWN_DIFFERENCES: dict[str, tuple[str, int]] = {
    "torchvision:vit_b_16": (SIZES, -16),
    "timm:coat_lite_tiny": (SIZES, -24),
    "timm:botnet26t_256": (SIZES, -88),
    "timm:xcit_nano_12_p16_224": (
        "functional.normalize, one call that torch_flops does not know, divides inside; so does torch.div",
        602142,
    ),
    "timm:resnest14d": ("the functional softmax, which torch_flops does not know as it knows x.softmax", 4800),
    "fx: softmax by a function": ("the functional softmax", 22),
    "fx: add by a method": ("x.add(1), which torch_flops does not know as it knows x + 1", 8),
    "fx: sizes": (SIZES, -1),
}
# What torch_flops' page says, of the models as they were when it was written.
PUBLISHED = {
    "published: vit_base_patch16_224": 35_164_979_282,
    "published: resnet50": 8_227_340_288,
    "published: linear": 40,
    "published: linear and one": 44,
}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    return run_peer("torch_flops", NAMES, tmp_path_factory.mktemp("torch_flops"), table="torch_flops")


def test_the_table_names_the_version_that_is_installed():
    assert load_table("torch_flops").description.startswith(f"torch_flops {version('torch_flops')}'s")


@pytest.mark.parametrize("name", [name for name in NAMES if name not in UNTRACEABLE])
def test_flops_are_those_of_torch_flops(name, theirs):
    ours = count_by("torch_flops", name)
    _, difference = KNOWN_DIFFERENCES.get(name, ("", 0))
    assert ours.numbers["flops"] - theirs[name]["flops"] == difference
    assert not ours.unknown


@pytest.mark.parametrize("name", sorted(UNTRACEABLE - LARGE))
def test_what_torch_fx_cannot_trace_is_counted(name, theirs):
    assert theirs[name].startswith("TraceError")
    assert count_by("torch_flops", name).numbers["flops"] > 0


@pytest.mark.parametrize(("name", "flops"), PUBLISHED.items())
def test_a_published_figure_is_reproduced(name, flops, theirs):
    assert count_by("torch_flops", name).numbers["flops"] == flops
    assert theirs[name]["flops"] == flops


def test_the_known_differences_are_few_and_say_something():
    assert KNOWN_DIFFERENCES.keys() <= {*NAMES} and MODELS.keys() >= UNTRACEABLE
    assert all(difference for _, difference in KNOWN_DIFFERENCES.values())
    assert len({*NAMES} & MODELS.keys() - UNTRACEABLE - KNOWN_DIFFERENCES.keys()) >= 25


def test_the_comparison_sees_a_difference(theirs):
    ours = count_by("torch_flops", "zoo:lenet5")
    assert ours.less({"flops": theirs["zoo:lenet5"]["flops"] + 1}) == {"flops": -1}


def test_every_row_of_a_class_is_used():
    assert not classes_unused("torch_flops", NAMES)
    assert classes_unused("torch_flops", ["zoo:lenet5"])
