"""`exact` counts a comparison of two numbers as one FLOP: against plain programs over numbers that count theirs."""

import bisect
import math
from itertools import pairwise

import pytest
import torch

from fvflops import FlopCountAnalysis
from tests.support.oracle.number import Tally


def comparisons_of(program, *rows):
    """Return the comparisons of a program over rows of numbers."""
    tally = Tally()
    program(*[list(tally.numbers(row.flatten())) for row in rows])
    return tally.done["compare"]


def total_of(function, *tensors):
    analysis = FlopCountAnalysis(function, tensors, table="exact", execution="real")
    assert not analysis.unsupported_ops()
    return analysis.total()


def running(start, is_better):
    """Return a program that finds the best of a row, compared with `start` first."""

    def find(row):
        best = row[0].tally.number(start)
        for x in row:
            best = x if is_better(x, best) else best
        return best

    return find


def elementwise(compare):
    return lambda left, right: [compare(a, b) for a, b in zip(left, right, strict=True)]


LARGEST, SMALLEST = running(-math.inf, lambda x, best: x > best), running(math.inf, lambda x, best: x < best)
X, Y = torch.rand(7, generator=torch.Generator().manual_seed(0)), torch.rand(7)
# name → torch's function and the program; operands are X, and Y where it takes two.
SAME = {
    "lt": (torch.lt, elementwise(lambda a, b: a < b)),
    "le": (torch.le, elementwise(lambda a, b: a <= b)),
    "gt": (torch.gt, elementwise(lambda a, b: a > b)),
    "ge": (torch.ge, elementwise(lambda a, b: a >= b)),
    "eq": (torch.eq, elementwise(lambda a, b: a == b)),
    "ne": (torch.ne, elementwise(lambda a, b: a != b)),
    "equal": (lambda a, b: torch.equal(a, b) and a, lambda a, b: [x == z for x, z in zip(a, b, strict=True)]),
    "maximum": (torch.maximum, elementwise(lambda a, b: a if a > b else b)),
    "fmin": (torch.fmin, elementwise(lambda a, b: a if a < b else b)),
    "max": (torch.max, LARGEST),
    "max of a dimension": (lambda a: torch.max(a, 0).values, LARGEST),
    "amin": (torch.amin, SMALLEST),
    "argmax": (torch.argmax, LARGEST),
    "argmin": (torch.argmin, SMALLEST),
    "aminmax": (torch.aminmax, lambda row: (LARGEST(row), SMALLEST(row))),
    "cummax": (lambda a: torch.cummax(a, 0).values, LARGEST),
    "clamp": (lambda a: a.clamp(0.2, 0.7), lambda row: [(x < 0.2, x < 0.7) for x in row]),
    "relu": (torch.relu, lambda row: [x < 0 for x in row]),
    "isnan": (torch.isnan, lambda row: [x == x for x in row]),
    "unique_consecutive": (torch.unique_consecutive, lambda row: [a == b for a, b in pairwise([row[0], *row])]),
    "where": (lambda a: torch.where(torch.tensor(True), a, a), lambda row: row),
    "truth values": (lambda a: torch.logical_and(a, a), lambda row: row),
    "the largest": (lambda a: a.topk(1).values, LARGEST),
}


TWO = ("lt", "le", "gt", "ge", "eq", "ne", "equal", "maximum", "fmin")


@pytest.mark.parametrize("name", SAME)
def test_a_comparison_is_one_flop(name):
    function, program = SAME[name]
    operands = (X, Y) if name in TWO else (X,)
    assert total_of(function, *operands) == comparisons_of(program, *operands)


def merge_sort(row):
    if len(row) < 2:
        return row
    half = len(row) // 2
    left, right, merged = merge_sort(row[:half]), merge_sort(row[half:]), []
    while left and right:
        merged.append((right if right[0] < left[0] else left).pop(0))
    return merged + left + right


def largest(row, k):
    """Return the k largest: each number is compared with the least of them, and put in its place by bisection."""
    kept = []
    for x in row:
        if len(kept) < k or x > kept[0]:
            bisect.insort(kept, x)
            del kept[:-k]
    return kept


ORDERS = {
    "sort": (torch.sort, merge_sort),
    "argsort": (torch.argsort, merge_sort),
    "msort": (torch.msort, merge_sort),
    "median": (torch.median, merge_sort),
    "median of a dimension": (lambda a: torch.median(a, 0).values, merge_sort),
    "kthvalue": (lambda a: torch.kthvalue(a, 2).values, merge_sort),
    "mode": (lambda a: torch.mode(a).values, merge_sort),
    "topk": (lambda a: torch.topk(a, 5).values, lambda row: largest(row, 5)),
}


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("size", [8, 33, 100])
def test_an_order_takes_at_most_its_count(name, size):
    """The count is a bound that a plain program, on numbers in ascending order and in disorder, comes near to."""
    function, program = ORDERS[name]
    rows = (
        torch.arange(size, dtype=torch.float64),
        torch.randperm(size, generator=torch.Generator().manual_seed(1)).double(),
    )
    done = max(comparisons_of(program, row) for row in rows)
    assert done <= total_of(function, rows[1]) <= 2.5 * done


def test_a_quantile_is_read_from_an_order():
    x = torch.rand(4, 33)
    for read in (torch.quantile, torch.nanquantile):
        assert total_of(lambda a, read=read: read(a, 0.3), x) == total_of(torch.median, x) + 7
        in_rows = total_of(lambda a: torch.median(a, 1).values, x)
        assert total_of(lambda a, read=read: read(a, 0.3, dim=1), x) == in_rows + 4 * 7


def test_the_bin_among_given_edges_is_found_by_a_binary_search():
    x, edges = torch.rand(9, 2), torch.linspace(0, 1, 6)
    search = total_of(lambda a: torch.searchsorted(edges, a), x)
    assert total_of(lambda a: torch.histogram(a, edges)[0], x) == search + 18
    assert total_of(lambda a: torch.histogramdd(a, (edges, edges))[0], x) == search + 9


@pytest.mark.parametrize("bounds", [1, 7, 8, 20])
def test_a_binary_search(bounds):
    sequence, x = torch.arange(bounds, dtype=torch.float32), torch.rand(5) * bounds
    most = max(
        comparisons_of(lambda row, of: bisect.bisect(of, row[0]), torch.tensor([value - 0.5]), sequence)
        for value in range(bounds + 1)
    )
    assert total_of(lambda a: torch.searchsorted(sequence, a), x) == total_of(lambda a: torch.bucketize(a, sequence), x)
    assert total_of(lambda a: torch.searchsorted(sequence, a), x) == 5 * most


def test_integers_and_the_pieces_of_functions_are_not_compared():
    ids = torch.arange(6)
    for function in (torch.argmax, torch.sort, lambda a: a < 3, lambda a: torch.topk(a, 2).values):
        assert total_of(function, ids) == 0
    assert total_of(lambda a: torch.nn.functional.threshold(a, 0.5, 0.0), X) == 0
    assert total_of(lambda a: torch.nn.functional.hardshrink(a), X) == 0


def test_complex_numbers_are_compared_by_both_parts():
    z = torch.rand(6, dtype=torch.complex64)
    assert total_of(torch.eq, z, z.clone()) == 12
    assert total_of(torch.isnan, z) == 12


def test_isclose_and_allclose_agree():
    inside = total_of(torch.isclose, X, Y)
    assert total_of(lambda a, b: torch.allclose(a, b) or a, X, Y) == inside == 9 * len(X)
