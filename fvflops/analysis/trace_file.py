"""Load a Trace from an untrusted file."""

from __future__ import annotations

import os

from fvflops import paths
from fvflops.trace import Trace, TraceError

MAX_CHARACTERS = 1 << 28  # characters; a forward pass through 50,000 modules takes an eighth


def load_trace(path: str | os.PathLike[str], *, limit: int = MAX_CHARACTERS) -> Trace:
    """Return the Trace saved as JSON at a path or URI; any other file raises TraceError.

    The message names the file. One of more than `limit` characters is not read.

    >>> load_trace("fvflops://default.yaml")
    Traceback (most recent call last):
    fvflops.trace.records.TraceError: fvflops://default.yaml: not a trace: invalid JSON (Expecting value: \
line 1 column 1 (char 0)); pass a file written by Trace.to_json()
    """
    name = os.fspath(path)
    try:
        # The JSON of a saved Trace is ASCII: a character is a byte.
        if "://" not in name and os.path.isfile(name) and os.path.getsize(name) > limit:
            raise _too_large(name, limit)
        text = paths.read_text(name, limit)
    except FileNotFoundError:
        raise TraceError(f"{name}: there is no such file") from None
    except UnicodeDecodeError as error:
        raise TraceError(f"{name}: not a trace: it is not UTF-8 text ({error.reason})") from None
    except OSError as error:
        raise TraceError(f"{name}: cannot be read: {error.strerror or error}") from None
    if text is None:
        raise _too_large(name, limit)
    try:
        return Trace.from_json(text)
    except TraceError as error:
        raise TraceError(f"{name}: {error}") from None


def _too_large(name: str, limit: int) -> TraceError:
    return TraceError(
        f"{name}: the file has more than {limit:,} characters, the limit for a trace: "
        "save it without ordered events: use trace.aggregate().to_json()"
    )
