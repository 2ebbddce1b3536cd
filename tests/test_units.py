"""Numbers as text, against the formats of fvcore and by hand."""

import re

import pytest
from fvcore.nn.print_model_statistics import _format_size
from hypothesis import given
from hypothesis import strategies as st

from fvflops.units import format_elements, format_percent, format_seconds, format_size

# Every power of ten and its neighbours: the edges of the steps are among them.
EDGES = [10**exponent + step for exponent in range(19) for step in (-1, 0, 1)]
INTEGERS = st.one_of(st.sampled_from(EDGES), st.integers(-(10**20), 10**20))


def disagrees_with_fvcore(format, count, digits, hide_zero):
    return format(count, digits=digits, hide_zero=hide_zero) != _format_size(count, digits, hide_zero)


@given(count=INTEGERS, digits=st.integers(0, 6), hide_zero=st.booleans())
def test_a_size_reads_as_in_fvcore(count, digits, hide_zero):
    assert not disagrees_with_fvcore(format_size, count, digits, hide_zero)


def test_the_comparison_with_fvcore_sees_a_wrong_step():
    def format(count, *, digits, hide_zero):
        return str(count) if count <= 999 else format_size(count, digits=digits, hide_zero=hide_zero)

    assert disagrees_with_fvcore(format, 101, 3, False)
    assert disagrees_with_fvcore(lambda count, **_: format_size(count, digits=2), 61706, 3, False)


@given(count=INTEGERS, digits=st.integers(1, 6))
def test_a_size_is_the_number_up_to_its_last_digit(count, digits):
    """The text, read back, is the number again but for half a unit of its last digit."""
    number, suffix = re.fullmatch(r"(-?[0-9.]+)([KMGTP]?)", format_size(count, digits=digits)).groups()
    unit = 1000 ** " KMGTP".index(suffix or " ")
    assert abs(float(number) * unit - count) <= (0.5000001 * unit * 10**-digits if suffix else 0)


@pytest.mark.parametrize(
    ("count", "text"),
    # The steps of fvcore's parameter_count_table; test_reports.py compares the whole table.
    [(0, "0"), (100, "100"), (101, "0.1K"), (100_001, "0.1M"), (100_000_001, "0.1G"), (10**13, "10000.0G")],
)
def test_elements_read_as_worked_out_by_hand(count, text):
    assert format_elements(count) == text


@given(part=st.integers(0, 10**18), rest=st.integers(0, 10**18))
def test_a_percentage_is_within_half_of_its_last_digit(part, rest):
    text = format_percent(part, part + rest)
    if part + rest == 0:
        assert text == ""
    elif text == "<0.1%":
        assert 0 < part * 2000 <= part + rest
    else:
        assert abs(float(text.removesuffix("%")) / 100 - part / (part + rest)) <= 0.000500001


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1, "1 s"), (59.96, "60 s"), (1234.5, "1,230 s"), (0.99, "990 ms"), (2.345e-6, "2.35 µs"), (1e-10, "0.1 ns")],
)
def test_a_time_reads_as_worked_out_by_hand(seconds, text):
    assert format_seconds(seconds) == text
