"""Times of collectives: ring algorithms by hand, and over which links a group's ranks communicate."""

import pytest

from fvflops.plan.step_time.calibration import Link, Network
from fvflops.trace.process_group import ProcessGroupSpec

INSIDE, BETWEEN = 100e9, 10e9
NETWORK = Network(name="", gpus_per_node=8, inside=Link(INSIDE, 1e-6), between=Link(BETWEEN, 5e-6))
EXACT = Network(name="", gpus_per_node=8, inside=Link(INSIDE, 0.0), between=Link(BETWEEN, 0.0))
NBYTES = 10**9


def group(size, step=1):
    return ProcessGroupSpec("", size, "x", 0, step)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_ring_all_reduce_moves_twice_n_minus_1_over_n(size):
    share = (size - 1) / size
    assert EXACT.seconds("all_reduce", NBYTES, group(size)) == pytest.approx(2 * share * NBYTES / INSIDE)
    for collective in ("all_gather", "reduce_scatter"):
        assert EXACT.seconds(collective, NBYTES, group(size)) == pytest.approx(share * NBYTES / INSIDE)
    assert NETWORK.seconds("all_gather", 0, group(size)) == pytest.approx((size - 1) * 1e-6)


def test_an_all_reduce_by_two_trees_sends_the_payload_up_and_down_but_once_between_two_nodes():
    # All GPUs of a node share its adapters; a ring sends 2(n-1)/n of the payload over them.
    times = {size: EXACT.seconds("all_reduce", NBYTES, group(size)) for size in (12, 16, 24)}
    assert times[16] == pytest.approx(2 * NBYTES / INSIDE)  # more than NBYTES / (8 * BETWEEN)
    assert times[12] == pytest.approx(2 * NBYTES / INSIDE)  # six GPUs in each node
    assert times[24] == pytest.approx(2 * 23 / 24 * NBYTES / (8 * BETWEEN))  # a ring
    assert EXACT.seconds("all_reduce", NBYTES, group(4, step=4)) == pytest.approx(NBYTES / (2 * BETWEEN))


def test_a_group_communicates_over_the_links_that_it_crosses():
    assert NETWORK.span(group(8)) == (1, 8)
    assert NETWORK.span(group(16)) == (2, 8)
    assert NETWORK.span(group(4, step=8)) == (4, 1)
    assert NETWORK.span(ProcessGroupSpec("", 6, "x", 0, None)) == (6, 1)
    # A group with all GPUs of its nodes has all adapters, one with a GPU of each node a GPU's share.
    assert NETWORK.bandwidth(*NETWORK.span(group(16))) == 8 * BETWEEN
    assert NETWORK.bandwidth(*NETWORK.span(group(4, step=8))) == BETWEEN
    assert EXACT.seconds("send", NBYTES, group(2)) == NBYTES / INSIDE
    assert EXACT.seconds("send", NBYTES, group(2, step=8)) == NBYTES / BETWEEN


def test_one_rank_and_a_barrier_take_no_time():
    assert NETWORK.seconds("all_reduce", NBYTES, group(1)) == NETWORK.seconds("barrier", 0, group(8)) == 0


def test_more_bytes_and_more_ranks_never_take_less():
    for collective in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        times = [NETWORK.seconds(collective, NBYTES, group(size)) for size in (2, 4, 8, 16, 64, 512)]
        assert times == sorted(times), collective
        sizes = [NETWORK.seconds(collective, nbytes, group(16)) for nbytes in (0, 10**3, 10**6, 10**9)]
        assert sizes == sorted(sizes), collective
