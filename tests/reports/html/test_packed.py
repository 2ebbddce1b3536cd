"""Packed columns: what is packed and unpacked is as before."""

import random
import time

from fvflops.reports.html import pack
from tests.support.reports.breakdowns import unpack

KINDS = [0, 1, 7, 2**52, str(2**60), 1.5]


def draw_column(numbers):
    """Return a pattern that repeats, with steps, between values that do not."""
    pattern = [numbers.choice(KINDS) for _ in range(numbers.randint(1, 7))]
    steps = [numbers.choice([0, 0, 1, 3]) if isinstance(value, int) else 0 for value in pattern]
    before, after = ([numbers.choice(KINDS) for _ in range(numbers.randint(0, 5))] for _ in range(2))
    repeated = [
        value + repetition * step if step else value
        for repetition in range(numbers.randint(0, 12))
        for value, step in zip(pattern, steps, strict=True)
    ]
    return [*before, *repeated, *after]


def test_any_column_is_itself_again():
    numbers = random.Random(0)
    columns = [draw_column(numbers) for _ in range(2000)]
    packed = [pack(column) for column in columns]
    assert [unpack(column) for column in packed] == columns
    assert sum(isinstance(column, dict) for column in packed) > 300


def test_packing_takes_no_time_to_speak_of():
    numbers = random.Random(0)
    for column in [[numbers.randint(0, 1) for _ in range(20_000)], [n * n for n in range(20_000)], [0] * 20_000]:
        start = time.process_time()
        assert unpack(pack(column)) == column
        assert time.process_time() - start < 1
