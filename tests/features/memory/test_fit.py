"""Whether memory fits a device."""

import pytest

from fvflops.features.memory.fit import describe_fit


@pytest.mark.parametrize(
    ("nbytes", "capacity", "expected"),
    [
        (80 * 10**9, 80e9, "Fits: 80 GB of the 80 GB of a card; 0 B are left for what is not predicted."),
        (60 * 10**9, 80e9, "Fits: 60 GB of the 80 GB of a card; 20 GB are left for what is not predicted."),
        (81 * 10**9, 80e9, "Does not fit: 81 GB is 1 GB more than the 80 GB of a card. Try less."),
        (81 * 10**9, None, "Predicted: 81 GB. The memory of a card is not known: give it in a file of devices."),
    ],
)
def test_a_fit_is_described(nbytes, capacity, expected):
    assert describe_fit(nbytes, "a card", capacity, advice="Try less.") == expected
