"""Labels of a plot: none overlaps another or what is there, and each is where an offset put it."""

import random

from fvflops.reports.pictures.labels import PADDING, Frame, around, leader_of, place_labels

PAGE = Frame(0.0, 0.0, 4.0, 3.0)
SIDES = ((0.1, 0.0), (-0.1, 0.0), (0.0, 0.2), (0.0, -0.2))


def place(points, sizes, offsets=SIDES, *, occupied=(), lines=()):
    return place_labels(points, sizes, page=PAGE, occupied=occupied, lines=lines, rings=[offsets])


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


def test_a_label_avoids_lines_and_close_points_where_it_can():
    def sides(points, lines=()):
        frames = place(points, [(0.5, 0.1)] * len(points), lines=lines)
        return [round(frame.left - x, 2) for frame, (x, _) in zip(frames, points, strict=True)]

    line = ((1.3, 0.9), (1.3, 1.1))
    assert sides([(1.0, 1.0)]) == [0.1] and sides([(1.0, 1.0)], [line]) == [-0.6]
    everywhere = [((0.0, height / 20), (4.0, height / 20)) for height in range(60)]
    assert sides([(1.0, 1.0)], everywhere) == [0.1]
    assert sides([(1.0, 1.0), (1.65, 1.0)])[0] == -0.6  # on the right its end is 0.05 from the second point


def test_no_leader_passes_a_label_or_a_point():
    for seed in range(5):
        points, sizes = spread(30, seed)
        far = [(0.3, up / 10) for up in range(-5, 6)]
        frames = place(points, sizes, far, occupied=[around(point) for point in points])
        assert sum(frame is not None for frame in frames) > 10
        for point, frame in zip(points, frames, strict=True):
            if leader := frame and leader_of(point, frame):
                (x, y), (end, height) = leader
                steps = [(x + share / 100 * (end - x), y + share / 100 * (height - y)) for share in range(101)]
                others = [other for other in frames if other not in (frame, None)]
                others += [around(other, 0.02) for other in points if other != point]
                # A label may be between the squares of a leader and the marker of its own point.
                assert not any(around(step, 0.0).overlaps(other) for step in steps[40:] for other in others)
    assert leader_of((1.0, 1.0), Frame(1.1, 0.9, 2.0, 1.1)) is None
