"""Packed columns: unpacking restores a column."""

import random
import time

from fvflops.reports.html import pack
from tests.support.reports.breakdowns import unpack

KINDS = [0, 1, 7, 2**52, str(2**60), 1.5]


def draw_column(rng):
    """Return a random column: a repeated pattern, whose values may grow by steps, between other values."""
    pattern = [rng.choice(KINDS) for _ in range(rng.randint(1, 7))]
    steps = [rng.choice([0, 0, 1, 3]) if isinstance(value, int) else 0 for value in pattern]
    before, after = ([rng.choice(KINDS) for _ in range(rng.randint(0, 5))] for _ in range(2))
    repeated = [
        value + repetition * step if step else value
        for repetition in range(rng.randint(0, 12))
        for value, step in zip(pattern, steps, strict=True)
    ]
    return [*before, *repeated, *after]


def test_unpacking_restores_any_column():
    rng = random.Random(0)
    columns = [draw_column(rng) for _ in range(2000)]
    packed = [pack(column) for column in columns]
    assert [unpack(column) for column in packed] == columns
    assert sum(isinstance(column, dict) for column in packed) > 300


def test_packing_20_000_values_takes_less_than_a_second():
    rng = random.Random(0)
    for column in [[rng.randint(0, 1) for _ in range(20_000)], [n * n for n in range(20_000)], [0] * 20_000]:
        start = time.process_time()
        assert unpack(pack(column)) == column
        assert time.process_time() - start < 1
