"""Peers that patch torch, run beside fvflops' tables of them: their numbers are equal, but for a short list."""

from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from fvflops import load_table
from tests.support.models.peer_cases import PIECES, TRACEABLE
from tests.support.models.whole_models import MODELS, USUAL
from tests.support.peer_counts import CASES, REAL, classes_unused, count_by
from tests.support.processes.peer_process import run_peers
from tests.support.processes.start import selected_cases
from tests.support.random_cases import long_except

FOUND = yaml.safe_load((Path(__file__).parent / "differences.yaml").read_text(encoding="utf-8"))
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
    shown_by: tuple[str, ...] = ()  # models that alone have a row, or a kind of difference

    @property
    def usual(self):
        """The cases by default: all but most whole models, as the models of transformers share their layers."""
        models = [name for name in USUAL if name == "transformers:BertModel" or not name.startswith("transformers:")]
        return [name for name in self.names if name not in MODELS or name in models or name in self.shown_by]


def differences_of(*names):
    rows = [item for name in names for item in FOUND[name].items()]
    return {case: (row["why"], {key: row[key] for key in row if key != "why"}) for case, row in rows}


BOTH = (*CASES, *PIECES)
PEERS = {
    "calflops": Peer("calflops", BOTH, differences_of("shared", "calflops"), SHARED_ERRORS),
    "deepspeed": Peer("DeepSpeed", BOTH, differences_of("shared", "deepspeed"), SHARED_ERRORS),
    "torch_flops": Peer(
        *("torch_flops", (*REAL, *TRACEABLE), differences_of("torch_flops")),
        dict.fromkeys(sorted(UNTRACEABLE), "TraceError"),
        ("flops",),
        ("timm:xcit_nano_12_p16_224", "timm:poolformer_s12", "torchvision:swin_t"),
    ),
}
# What peers' pages say; torch_flops' of the models as they were when it was written.
PUBLISHED = {tuple(key.split(", ", 1)): numbers for key, numbers in FOUND["published"].items()}


def cases_of(has_error):
    """Return each peer and case that the peer fails on, or those that it measures."""
    cases = [(key, name) for key, peer in PEERS.items() for name in peer.names if (name in peer.errors) == has_error]
    return long_except([(key, name) for key, name in cases if name in PEERS[key].usual], cases)


@pytest.fixture(scope="module")
def theirs(request, tmp_path_factory):
    """Return peer → case → its numbers, or its error, for the selected cases and one that other tests need."""
    cases = [*((peer, "zoo:lenet5") for peer in PEERS), *selected_cases(request, "peer", "name")]
    names = {key: list(dict.fromkeys(name for peer, name in cases if peer == key)) for key in PEERS}
    return run_peers(names, tmp_path_factory.mktemp("peers"))


@pytest.mark.parametrize("peer", PEERS)
def test_the_table_names_the_version_that_is_installed(peer):
    assert load_table(peer).description.startswith(f"{PEERS[peer].title} {version(peer)}'s")


@pytest.mark.parametrize(("peer", "name"), cases_of(False))
def test_the_numbers_are_the_peers(peer, name, theirs):
    ours = count_by(peer, name)
    assert theirs[peer][name].keys() == {*PEERS[peer].numbers}
    _, expected = PEERS[peer].differences.get(name, ("", {}))
    assert ours.less(theirs[peer][name]) == expected
    assert not ours.unknown


@pytest.mark.parametrize(("peer", "name"), cases_of(True))
def test_what_a_peer_cannot_measure_is_counted(peer, name, theirs):
    assert theirs[peer][name].partition(":")[0] == PEERS[peer].errors[name]
    assert count_by(peer, name).numbers["flops"] > 0


@pytest.mark.parametrize(("peer", "name"), PUBLISHED)
def test_a_published_figure_is_reproduced(peer, name, theirs):
    published = PUBLISHED[peer, name]
    assert theirs[peer][name] == published and not count_by(peer, name).less(published)


@pytest.mark.parametrize(("peer", "least"), [("calflops", 35), ("deepspeed", 35), ("torch_flops", 25)])
def test_the_known_differences_are_few_and_say_something(peer, least):
    _, names, differences, errors, *_ = PEERS[peer]
    assert differences.keys() | errors.keys() <= {*names}
    assert all(any(difference.values()) for _, difference in differences.values())
    assert len({*names} & MODELS.keys() - errors.keys() - differences.keys()) >= least


@pytest.mark.parametrize("peer", PEERS)
def test_the_comparison_sees_a_difference(peer, theirs):
    for number, value in theirs[peer]["zoo:lenet5"].items():
        assert count_by(peer, "zoo:lenet5").less({number: value + 1}) == {number: -1}


@pytest.mark.parametrize("peer", PEERS)
def test_every_row_of_a_class_is_used(peer):
    assert not classes_unused(peer, PEERS[peer].usual)
    assert classes_unused(peer, ["zoo:lenet5"])
