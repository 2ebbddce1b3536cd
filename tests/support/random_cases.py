"""How many random cases a property test draws, and from which numbers: the same in every run, unless asked otherwise.

tools/test                                 the profile "fixed": every run draws the same cases
tools/test --hypothesis-profile random     ten times as many cases, other ones in each run; a failure prints a line
                                           that replays it (@reproduce_failure)
"""

from hypothesis import HealthCheck, settings

_USUAL = 100  # cases of a test that names no limit
# A loaded machine may be slow at drawing a case, or at running one; that is no fault of what is tested.
_PATIENT = {"deadline": None, "database": None, "suppress_health_check": [HealthCheck.too_slow]}

settings.register_profile("fixed", derandomize=True, max_examples=_USUAL, **_PATIENT)
settings.register_profile("random", derandomize=False, max_examples=10 * _USUAL, print_blob=True, **_PATIENT)


def random_cases(limit: int) -> settings:
    """Return the settings of a test that draws at most `limit` cases, and as many more as the profile asks for."""
    return settings(max_examples=limit * settings.default.max_examples // _USUAL)
