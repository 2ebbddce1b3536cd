"""The trace file: a saved Trace read back, whatever somebody has put there."""

from __future__ import annotations

import os

from fvflops import paths
from fvflops.trace import Trace, TraceError

LIMIT = 1 << 28  # characters; a forward pass through 50,000 modules takes an eighth


def load_trace(path: str | os.PathLike[str], *, limit: int = LIMIT) -> Trace:
    """Return the Trace that was saved as JSON at a path or URI; whatever is no such file raises TraceError.

    The message names the file. One of more than `limit` characters is not read.

    >>> load_trace("fvflops://default.yaml")
    Traceback (most recent call last):
    fvflops.trace.trace.TraceError: fvflops://default.yaml: this is no whole trace: it is not JSON (Expecting value: \
line 1 column 1 (char 0))
    """
    name = os.fspath(path)
    try:
        if "://" not in name and not os.path.isfile(name):
            raise TraceError(f"{name}: there is no such file")
        # The size is looked at first: to read a gigabyte takes seconds.
        if "://" not in name and os.path.getsize(name) > 4 * limit:
            raise _too_large(name, limit)
        text = paths.read_text(name, limit)
    except UnicodeDecodeError as error:
        raise TraceError(f"{name}: this is no trace: it is not UTF-8 text ({error.reason})") from None
    except OSError as error:
        raise TraceError(f"{name}: cannot be read: {error.strerror or error}") from None
    if text is None:
        raise _too_large(name, limit)
    try:
        trace = Trace.from_json(text)
        _check_indexes(trace)
    except RecursionError:
        raise TraceError(f"{name}: this is no trace: it is nested too deeply") from None
    except (TraceError, AttributeError) as error:
        raise TraceError(f"{name}: {error}") from None
    return trace


def _too_large(name: str, limit: int) -> TraceError:
    return TraceError(
        f"{name}: this file has more than {limit:,} characters, which is more than a trace is read from: "
        "save it without its order of events, trace.aggregate().to_json()"
    )


def _check_indexes(trace: Trace) -> None:
    """Raise TraceError where a call names a signature, a stack or a module that is not there."""
    regions, places = len(trace.regions), trace.modules.places
    bad = "" not in places or any(region.kind == "module" and region.name not in places for region in trace.regions)
    bad = bad or any(not 0 <= index < regions for stack in trace.stacks for index in stack)
    for calls, signatures in ((trace.calls, len(trace.signatures)), (trace.region_calls, len(trace.region_signatures))):
        for item, stack, _ in calls:
            bad = bad or not 0 <= item < signatures or not 0 <= stack < len(trace.stacks)
        bad = bad or any(type(count) is not int or count < 0 for count in calls.values())
    if bad:
        raise TraceError("this trace is damaged: it names modules, stacks or signatures that it does not hold")
