"""DeepSpeed itself, run beside `table="deepspeed"`: flops, macs and parameters are equal, but for a short list."""

from importlib.metadata import version

import pytest

from fvflops import FlopCountAnalysis, load_table, parameter_count
from tests.support.models.peer_cases import PIECES, build
from tests.support.models.whole_models import MODELS
from tests.support.peer_counts import CASES, classes_unused, count_by
from tests.support.processes.peer_process import run_peer

NAMES = (*CASES, *PIECES)

METHOD = "x.softmax(...), which DeepSpeed does not see as it sees the functional softmax"
HELD = "it took hold of its activation function when it was built, before DeepSpeed put its own in place"
# Model → why it differs, and by how much fvflops counts more. Nothing else may differ, and each of these must.
KNOWN_DIFFERENCES: dict[str, tuple[str, dict[str, int]]] = {
    "toy": ("torch.relu, which DeepSpeed does not see as it sees the functional relu", {"flops": 8308}),
    "timm:convit_tiny": (METHOD, {"flops": 3383752}),
    "timm:coat_lite_tiny": (METHOD, {"flops": 735360}),
    "timm:levit_128s": (METHOD, {"flops": 448114}),
    "timm:xcit_nano_12_p16_224": (METHOD, {"flops": 49152}),
    "timm:botnet26t_256": (METHOD, {"flops": 540672}),
    "timm:efficientformer_l1": (METHOD, {"flops": 19208}),
    "timm:visformer_tiny": (METHOD, {"flops": 489804}),
    "encoder layer": (HELD, {"flops": 160}),
    "decoder layer": (HELD, {"flops": 160}),
    "upsample by 1.5": ("3 * 1.5 places are 4.5 to DeepSpeed, and 4 in the output", {"flops": -25}),
    "resize to a number": ("a size of 6 is 6 to DeepSpeed, and 6 * 6 to the op", {"flops": 30}),
    "conv transpose without a batch": ("DeepSpeed takes the channels for the batch", {"flops": 324}),
    "relu of torch": ("torch.relu", {"flops": 8}),
    "softmax by a method": ("x.softmax", {"flops": 8}),
    "gelu held": (HELD, {"flops": 8}),
    "add and mul of torch": ("torch.add and torch.mul, which the table takes for x + y and x * y", {"flops": -16}),
    "einsum of einops": ("DeepSpeed counts it, and the torch.einsum that it calls", {"flops": -481}),
}
# What DeepSpeed cannot measure.
ERRORS = {
    "conv2d without a batch": "AssertionError",
    "conv2d without a batch, same": "AssertionError",
    "lstm, packed": "AttributeError",
    "gru, packed": "AttributeError",
    "rnn, packed": "AttributeError",
}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    return run_peer("deepspeed", NAMES, tmp_path_factory.mktemp("deepspeed"), table="deepspeed")


def test_the_table_names_the_version_that_is_installed():
    assert load_table("deepspeed").description.startswith(f"DeepSpeed {version('deepspeed')}'s")


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ERRORS])
def test_flops_macs_and_parameters_are_deepspeeds(name, theirs):
    ours = count_by("deepspeed", name)
    assert theirs[name].keys() == {"flops", "macs", "parameters"}
    _, expected = KNOWN_DIFFERENCES.get(name, ("", {}))
    assert ours.less(theirs[name]) == expected
    assert not ours.unknown


@pytest.mark.parametrize(("name", "error"), ERRORS.items())
def test_what_deepspeed_cannot_measure_is_counted(name, error, theirs):
    assert theirs[name].partition(":")[0] == error
    assert count_by("deepspeed", name).numbers["flops"] > 0


def test_the_lenet5_that_deepspeed_publishes(theirs):
    published = {"flops": 866_076_672, "macs": 426_516_480, "parameters": 61_706}
    assert theirs["lenet5 on 32x32"] == published
    model, inputs = build("lenet5 on 32x32")
    analysis = FlopCountAnalysis(model, inputs, table="deepspeed")
    assert analysis.total() == published["flops"]
    assert analysis.macs() == published["macs"]
    assert parameter_count(model)[""] == published["parameters"]


def test_the_known_differences_are_few_and_say_something():
    assert KNOWN_DIFFERENCES.keys() | ERRORS.keys() <= {*NAMES}
    assert all(any(difference.values()) for _, difference in KNOWN_DIFFERENCES.values())
    assert len({*NAMES} & MODELS.keys() - KNOWN_DIFFERENCES.keys()) >= 35


def test_the_comparison_sees_a_difference(theirs):
    ours = count_by("deepspeed", "zoo:lenet5")
    wrong = {**theirs["zoo:lenet5"], "macs": theirs["zoo:lenet5"]["macs"] + 1}
    assert ours.less(wrong) == {"macs": -1}


def test_every_row_of_a_class_is_used():
    assert not classes_unused("deepspeed", NAMES)
    assert classes_unused("deepspeed", ["zoo:lenet5"])
