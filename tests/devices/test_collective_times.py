"""Times of collectives inside a node: what holds with the figures of all shipped networks, and measured ones."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fvflops.devices.kernel_models.collectives import (
    Collective,
    CollectiveFigures,
    Fabric,
    NodeLink,
    PeerFigures,
    collective_seconds,
    peer_seconds,
)
from fvflops.plan.step_time.calibration import load_networks

LINKS = {name: network.inside for name, network in load_networks().items() if isinstance(network.inside, NodeLink)}
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
PEERS = PeerFigures(start=4.5e-6, barrier=2.1e-6, peers=0.63)
kinds = st.sampled_from(KINDS)
ranks = st.integers(2, 8)
payloads = st.floats(1, 4e9)


@pytest.fixture(params=LINKS)
def link(request):
    return LINKS[request.param]


def least_seconds(kind, size, nbytes, fabric):
    """Return the seconds of the bytes that a GPU must send: its payload for an addition in the switch."""
    sent = nbytes * (size - 1) / size
    if kind == "all_reduce":
        sent = nbytes if fabric.adds else 2 * sent
    return sent / fabric.bandwidth


@given(kind=kinds, size=ranks, nbytes=payloads, factor=st.floats(1, 100))
@pytest.mark.parametrize("name", LINKS)
def test_more_bytes_take_longer_and_none_less_than_the_link_needs(name, kind, size, nbytes, factor):
    link = LINKS[name]
    seconds = link.seconds(kind, size, nbytes)
    assert seconds > link.figures.start + 0.999 * least_seconds(kind, size, nbytes, link.fabric)
    assert link.seconds(kind, size, factor * nbytes) >= seconds


@given(kind=kinds, size=st.integers(2, 7), nbytes=payloads)
@pytest.mark.parametrize("name", LINKS)
def test_more_ranks_take_longer(name, kind, size, nbytes):
    link = LINKS[name]
    # A switch that adds may be the slower way, and of links to each GPU more ranks have more.
    fabric = link.fabric._replace(adds=False, links=1)
    more, fewer = (collective_seconds(Collective(kind, n, nbytes), fabric, link.figures) for n in (size + 1, size))
    assert more > fewer


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_needs_no_time(link, kind):
    assert link.seconds(kind, 1, 1e9) == 0 == peer_seconds(Collective(kind, 1, 1e9), link.fabric, PEERS)


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "broadcast"])
def test_an_all_reduce_takes_two_passes(link, kind):
    fabric = link.fabric._replace(adds=False)
    one, two = (collective_seconds(Collective(each, 8, 1e9), fabric, link.figures) for each in (kind, "all_reduce"))
    assert 1.7 < two / one < 2


def test_the_switch_adds_floating_point_numbers_of_all_eight_gpus():
    link = LINKS["HGX B200 3200G"]
    floats, integers = (
        collective_seconds(Collective("all_reduce", 8, 1e9, floats), link.fabric, link.figures)
        for floats in (True, False)
    )
    assert integers == pytest.approx(1.2 * floats, rel=0.05)
    assert link.seconds("all_gather", 8, 1e9) == collective_seconds(
        Collective("all_gather", 8, 1e9), link.fabric._replace(adds=False), link.figures
    )


def test_protocols_change_where_their_times_meet():
    figures = CollectiveFigures(start=0, step=0, flagged=0.5, fence=20e-6, fenced=1, local=0, scattered=1, sharing=0)
    link = NodeLink(Fabric(100e9), figures)
    # LL128 needs 1e-11 s for a byte, and Simple half of that after the fence: they meet at 4e6 bytes on the link.
    assert link.seconds("all_gather", 2, 2e6) == pytest.approx(20e-6)
    assert link.seconds("all_gather", 2, 4e6) == pytest.approx(40e-6)
    assert link.seconds("all_gather", 2, 40e6) == pytest.approx(220e-6)


def test_links_that_share_a_root_get_slower_with_the_ranks():
    assert LINKS["L40S PCIe 4"].ring(2)[0] > 3 * LINKS["L40S PCIe 4"].ring(4)[0]
    # Other cards on PCIe 4 are not as slow as the node of L40S that was measured.
    assert LINKS["PCIe 4"].ring(8)[0] == LINKS["PCIe 5"].ring(8)[0] / 2 > 5 * LINKS["L40S PCIe 4"].ring(8)[0]
    assert LINKS["HGX B200 3200G"].ring(2) == pytest.approx(LINKS["HGX B200 3200G"].ring(8), rel=0.1)


@pytest.mark.parametrize("network", ["MI300X 3200G", "MI355X 3200G"])
def test_without_a_switch_a_group_uses_the_links_among_its_gpus(network):
    inside = LINKS[network]
    for ranks in range(2, 9):
        fabric = Fabric(inside.fabric.bandwidth * (ranks - 1) / 7)
        for kind in ("all_reduce", "all_gather", "all_to_all"):
            assert inside.seconds(kind, ranks, 1e9) == NodeLink(fabric, inside.figures).seconds(kind, ranks, 1e9)
        own = peer_seconds(Collective("all_reduce", ranks, 1e6), inside.fabric, PEERS)
        assert own == peer_seconds(Collective("all_reduce", ranks, 1e6), fabric, PEERS)
    assert inside.bandwidth == inside.ring(2)[0] < inside.fabric.bandwidth / 7


# Of NCCL, in microseconds; payloads are as in NVIDIA's AIConfigurator 0.12, message sizes times bytes of an element.
@pytest.mark.parametrize(
    ("network", "kind", "size", "nbytes", "measured"),
    [
        ("HGX B200 3200G", "all_gather", 4, 2**29, 711),
        ("HGX B200 3200G", "reduce_scatter", 8, 2**21, 22.2),
        ("HGX B200 3200G", "all_reduce", 8, 2**21, 32.1),
        ("HGX B200 3200G", "all_to_all", 8, 2**25, 82.0),
        ("L40S PCIe 4", "all_gather", 2, 2**26, 1732),
        ("PCIe 5", "all_reduce", 2, 2**29, 13745),
    ],
)
def test_measured_collectives(network, kind, size, nbytes, measured):
    assert math.log(LINKS[network].seconds(kind, size, nbytes) * 1e6 / measured) == pytest.approx(0, abs=0.2)


@given(size=ranks, nbytes=st.floats(1, 2**23))
def test_an_engines_own_all_reduce_reads_all_payloads_of_small_ones_at_once(size, nbytes):
    fabric = Fabric(450e9)
    seconds = peer_seconds(Collective("all_reduce", size, nbytes), fabric, PEERS)
    assert seconds >= PEERS.start + least_seconds("all_reduce", size, nbytes, fabric)
    at_once = PEERS.start + nbytes * (size - 1) / (fabric.bandwidth * PEERS.peers)
    assert seconds <= at_once
    if size == 2:
        assert seconds == at_once
