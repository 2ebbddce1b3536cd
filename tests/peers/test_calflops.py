"""calflops itself, run beside `table="calflops"`: flops, macs and parameters are equal, but for a short list."""

from importlib.metadata import version

import pytest

from fvflops import load_table
from tests.support.models.peer_cases import PIECES
from tests.support.models.whole_models import MODELS
from tests.support.peer_counts import CASES, classes_unused, count_by
from tests.support.processes.peer_process import run_peer

NAMES = (*CASES, *PIECES)

OPERATOR = "x @ y, which calflops does not see as it sees torch.matmul, and x.softmax(...)"
HELD = "it took hold of its activation function when it was built, before calflops put its own in place"
# Model → why it differs, and by how much fvflops counts more. Nothing else may differ, and each of these must.
KNOWN_DIFFERENCES: dict[str, tuple[str, dict[str, int]]] = {
    "toy": ("torch.relu, which calflops does not see as it sees the functional relu", {"flops": 8308}),
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
    "encoder layer": (HELD, {"flops": 160}),
    "decoder layer": (HELD, {"flops": 160}),
    "shared": ("a module that stands at two places: calflops counts it at each", {"flops": -128, "macs": -64}),
    "products by @": ("x @ y", {"flops": 720, "macs": 360}),
    "resize to a number": ("a size of 6 is 6 to calflops, and 6 * 6 to the op", {"flops": 30}),
    "conv transpose without a batch": ("calflops takes the channels for the batch", {"flops": 84}),
    "relu of torch": ("torch.relu", {"flops": 8}),
    "softmax by a method": ("x.softmax", {"flops": 8}),
    "gelu held": (HELD, {"flops": 8}),
    "add and mul of torch": ("torch.add and torch.mul, which the table takes for x + y and x * y", {"flops": -16}),
}
# What calflops cannot measure.
ERRORS = {
    "conv2d without a batch": "AssertionError",
    "conv2d without a batch, same": "AssertionError",
    "lstm, packed": "AttributeError",
    "gru, packed": "AttributeError",
    "rnn, packed": "AttributeError",
}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    return run_peer("calflops", NAMES, tmp_path_factory.mktemp("calflops"), table="calflops")


def test_the_table_names_the_version_that_is_installed():
    assert load_table("calflops").description.startswith(f"calflops {version('calflops')}'s")


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ERRORS])
def test_flops_macs_and_parameters_are_those_of_calflops(name, theirs):
    ours = count_by("calflops", name)
    assert theirs[name].keys() == {"flops", "macs", "parameters"}
    _, expected = KNOWN_DIFFERENCES.get(name, ("", {}))
    assert ours.less(theirs[name]) == expected
    assert not ours.unknown


@pytest.mark.parametrize(("name", "error"), ERRORS.items())
def test_what_calflops_cannot_measure_is_counted(name, error, theirs):
    assert theirs[name].partition(":")[0] == error
    assert count_by("calflops", name).numbers["flops"] > 0


def test_the_known_differences_are_few_and_say_something():
    assert KNOWN_DIFFERENCES.keys() | ERRORS.keys() <= {*NAMES}
    assert all(any(difference.values()) for _, difference in KNOWN_DIFFERENCES.values())
    assert len({*NAMES} & MODELS.keys() - KNOWN_DIFFERENCES.keys()) >= 35


def test_the_comparison_sees_a_difference(theirs):
    ours = count_by("calflops", "zoo:lenet5")
    wrong = {**theirs["zoo:lenet5"], "flops": theirs["zoo:lenet5"]["flops"] + 1}
    assert ours.less(wrong) == {"flops": -1}


def test_every_row_of_a_class_is_used():
    assert not classes_unused("calflops", NAMES)
    assert classes_unused("calflops", ["zoo:lenet5"])
