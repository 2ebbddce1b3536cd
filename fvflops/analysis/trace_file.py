"""Save a Trace to a file, and load one from an untrusted file."""

from __future__ import annotations

import gzip
import io
import os
import zlib

from fvflops import paths
from fvflops.trace import Trace, TraceError

MAX_CHARACTERS = 1 << 28  # characters; a forward pass through 50,000 modules takes an eighth
ENDINGS = (".json", ".json.gz")  # suffixes of saved Traces


def save_trace(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write a Trace as JSON, compressed if the name ends in .gz; `load_trace` reads it."""
    name = os.fspath(path)
    if name.endswith(".gz"):
        # Without a time in the header, equal traces are equal files.
        paths.write_bytes(name, gzip.compress(trace.to_json().encode("ascii"), mtime=0))
    else:
        paths.write_text(name, trace.to_json())


def load_trace(path: str | os.PathLike[str], *, limit: int = MAX_CHARACTERS) -> Trace:
    """Return the Trace saved as JSON at a path or URI, compressed or not; any other file raises TraceError."""
    name = os.fspath(path)
    try:
        # The JSON of a saved Trace is ASCII: a character is a byte.
        if "://" not in name and os.path.isfile(name) and os.path.getsize(name) > limit:
            text = None
        elif name.endswith(".gz"):
            with gzip.open(io.BytesIO(paths.read_bytes(name))) as file:
                data = file.read(limit + 1)
            text = None if len(data) > limit else data.decode()
        else:
            text = paths.read_text(name, limit)
    except FileNotFoundError:
        raise TraceError(f"{name}: there is no such file") from None
    except UnicodeDecodeError as error:
        raise TraceError(f"{name}: not a trace: it is not UTF-8 text ({error.reason})") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"{name}: not a trace: it is not a complete gzip file ({error})") from None
    except OSError as error:
        raise TraceError(f"{name}: cannot be read: {error.strerror or error}") from None
    if text is None:
        raise TraceError(
            f"{name}: the file has more than {limit:,} characters, the limit for a trace: "
            "save it without ordered events: use trace.aggregate().to_json()"
        )
    try:
        return Trace.from_json(text)
    except TraceError as error:
        raise TraceError(f"{name}: {error}") from None
