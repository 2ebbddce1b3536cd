"""Labels of a plot: none overlaps another or what is there, and each is where an offset put it."""

import math
import random

import pytest

from fvflops.reports.pictures.labels import PADDING, Frame, Label, around, place_labels

PAGE = Frame(0.0, 0.0, 4.0, 3.0)
SIDES = ((0.1, 0.0), (-0.1, 0.0), (0.0, 0.2), (0.0, -0.2))


def place(points, sizes, offsets=SIDES, *, occupied=(), near=(), cost=lambda label, others: 0.0):
    return place_labels(points, sizes, page=PAGE, occupied=occupied, offsets=offsets, near=near, cost=cost)


def spread(count, seed):
    chance = random.Random(seed)
    points = [(chance.uniform(0.2, 3.8), chance.uniform(0.2, 2.8)) for _ in range(count)]
    sizes = [(chance.uniform(0.2, 1.0), 0.08) for _ in range(count)]
    return points, sizes


def test_no_label_overlaps_another_a_point_or_the_edge():
    for seed in range(20):
        points, sizes = spread(30, seed)
        markers = [around(point, 0.03) for point in points]
        frames = place(points, sizes, occupied=markers)
        placed = [frame for frame in frames if frame is not None]
        assert len(placed) > 10
        for index, frame in enumerate(placed):
            assert frame.is_within(PAGE)
            assert not any(frame.overlaps(other) for other in (*placed[:index], *placed[index + 1 :], *markers))


def test_an_offset_is_to_the_nearest_end_of_a_label():
    for offset, left, bottom in (((0.1, 0.0), 2.1, 0.95), ((-0.1, 0.5), 1.5, 1.45), ((0.0, -0.5), 1.8, 0.45)):
        (frame,) = place([(2.0, 1.0)], [(0.4, 0.1)], [offset])
        assert frame is not None
        assert [round(value, 9) for value in frame] == [left, bottom, round(left + 0.4, 9), round(bottom + 0.1, 9)]


def test_a_label_without_room_has_no_frame():
    assert place([(2.0, 1.0)], [(5.0, 0.1)]) == [None]
    assert place([(2.0, 1.0)], [(0.4, 0.1)], occupied=[PAGE]) == [None]
    # The padding is part of a label.
    wall = Frame(2.5 + PADDING[0] / 2, 0.0, 4.0, 3.0)
    assert place([(2.0, 1.0)], [(0.4, 0.1)], SIDES[:1], occupied=[wall]) == [None]


def test_labels_move_while_that_lowers_the_cost():
    def prefer_right(label: Label, others: object) -> float:
        return -label.frame.left

    # The right of the first point is free once the label of the second has moved there; then both have the best.
    frames = place([(1.0, 1.0), (1.9, 1.0)], [(0.5, 0.1)] * 2, near=SIDES[1:2], cost=prefer_right)
    assert [frame and round(frame.left, 2) for frame in frames] == [1.1, 2.0]


def test_a_cost_may_depend_on_the_other_labels():
    def avoid_height(label: Label, others: list[Label]) -> float:
        return sum(abs(other.frame.bottom - label.frame.bottom) < 0.05 for other in others)

    frames = place([(1.0, 1.0), (3.0, 1.0)], [(0.5, 0.1)] * 2, cost=avoid_height)
    assert len({round(frame.bottom, 2) for frame in frames if frame}) == 2


def test_the_cost_of_a_label_is_what_is_between_it_and_its_point():
    pytest.importorskip("numpy", reason="numpy, which matplotlib brings, is not installed")
    from fvflops.reports.pictures.labels import LabelCost, leader_of

    label = Label((1.0, 1.0), Frame(1.5, 0.95, 2.0, 1.05))
    assert leader_of(label) == ((1.0, 1.0), (1.5, 1.0))
    own, passed, beside = (1.0, 1.0), (1.25, 1.0), (1.7, 1.1)
    line = ((1.7, 0.5), (1.7, 1.5))

    def cost(points, lines=(), others=(), **options):
        return round(LabelCost([own, *points], lines, **options)(label, others), 3)

    assert cost([]) == 0.5  # the distance
    assert cost([(1.25, 2.0)]) == 0.5
    assert cost([passed]) == 1.0 and cost([beside]) == 0.55 and cost([], [line]) == 0.75
    across = Label((1.2, 0.5), Frame(1.1, 1.4, 1.3, 1.5))  # its leader crosses that of the label
    assert cost([], others=[across]) == 1.0
    on_leader = Label((1.3, 1.0), Frame(1.2, 0.95, 1.4, 1.05))
    assert cost([], others=[on_leader]) == 1.0
    assert cost([passed], clear=True) == cost([], others=[across], clear=True) == math.inf
    assert cost([beside], [line], clear=True) == 0.8
