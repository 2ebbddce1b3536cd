"""Cases that answer differently, which a comparison has to see."""

import sys
import warnings

_calls = []
_warned = []


def count_calls() -> int:
    _calls.append(None)
    return len(_calls)


def depend_on_import() -> bool:
    """Return whether another part of the process has imported a module."""
    return "torch._dynamo" in sys.modules


def warn_once():
    if not _warned:
        _warned.append(None)
        warnings.warn("for the first time", stacklevel=1)


CASES = {"calls": count_calls, "import": depend_on_import, "warning": warn_once, "none": lambda: 1}
