"""Whether memory fits a device."""

import pytest

from fvflops.features.memory.fit import Verdict

GB = 10**9


@pytest.mark.parametrize(
    ("needed", "memory", "reserve", "fits", "expected"),
    [
        (80 * GB, 80e9, 0, True, "Fits: 80 GB of 80 GB. 0 B are left of a card."),
        (
            60 * GB,
            80e9,
            GB,
            True,
            "Fits: 60 GB of 80 GB. 19 GB are left of a card, where 1 GB are set aside for NCCL (an ",
        ),
        (
            80 * GB,
            80e9,
            GB,
            False,
            "Does not fit: 80 GB of 80 GB. That is 1 GB too much for a card, where 1 GB are set ",
        ),
        (81 * GB, 80e9, 0, False, "Does not fit: 81 GB of 80 GB. That is 1 GB too much for a card. Try less."),
        (81 * GB, None, 0, None, "Needs 81 GB: the memory of a card is not known. Try less."),
    ],
)
def test_a_verdict(needed, memory, reserve, fits, expected):
    verdict = Verdict(needed, "a card", memory, reserve, "NCCL" if reserve else "", "Try less.")
    assert verdict.fits is fits and str(verdict).startswith(expected)
    data = verdict.encode()
    assert (data["text"], data["fits"], data["needed"], data["memory"]) == (str(verdict), fits, needed, memory)
    assert str(Verdict(81 * GB)) == "Needs 81 GB: no device is named."
