"""Which cases a test has by default, and how many a property test draws, from which numbers.

Unless asked otherwise, every run draws the same.

tools/test                                 the profile "fixed": every run draws the same cases
tools/test --hypothesis-profile random     ten times as many cases, other ones in each run; a failure prints a line
                                           that replays it (@reproduce_failure)
"""

import pytest
from hypothesis import HealthCheck, settings

_USUAL = 100  # cases of a test that names no limit
# A loaded machine may be slow at drawing a case, or at running one; that is not a fault of what is tested.
_PATIENT = {"deadline": None, "database": None, "suppress_health_check": [HealthCheck.too_slow]}

settings.register_profile("fixed", derandomize=True, max_examples=_USUAL, **_PATIENT)
settings.register_profile("random", derandomize=False, max_examples=10 * _USUAL, print_blob=True, **_PATIENT)


def random_cases(limit: int) -> settings:
    """Return the settings of a test that draws at most `limit` cases, and as many more as the profile asks for."""
    return settings(max_examples=limit * settings.default.max_examples // _USUAL)


def long_except(default, cases):
    """Return a test's cases, of which all but the default ones are long; one of several parameters is a tuple."""
    cases = list(cases)
    assert set(default) <= set(cases), "a default case is not a case"
    rest = (case if isinstance(case, tuple) else (case,) for case in cases if case not in default)
    return [*default, *(pytest.param(*case, marks=pytest.mark.long) for case in rest)]
