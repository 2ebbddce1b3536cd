"""Write ASCII where the terminal or the locale is not UTF-8: this program's characters as ASCII, names as escapes."""

from __future__ import annotations

import codecs
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

# As wide as the character, where a column of a table may contain it.
_ASCII: Mapping[int, int | str] = {
    **str.maketrans("–—‐‑−─Δ×µμ≈│∕‘’“”\u00a0█▉▊▋▌▍▎▏", "------dxuu~|/''\"\" ########"),
    ord("→"): "->",
    ord("≥"): ">=",
    ord("≤"): "<=",
    ord("∞"): "inf",
}


@contextmanager
def ascii_streams(environment: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Write standard streams in ASCII where they are not UTF-8, or the locale is C, in which Python writes UTF-8."""
    changed: list[tuple[Any, str, str]] = []
    try:
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure") and stream.encoding:
                changed.append((stream, stream.encoding, stream.errors or "strict"))
                if is_utf8(stream, environment):
                    stream.reconfigure(errors="backslashreplace")
                else:
                    stream.reconfigure(encoding="ascii", errors=_register(stream.encoding))
        yield
    finally:
        for stream, encoding, errors in changed:
            if not stream.closed:
                stream.reconfigure(encoding=encoding, errors=errors)


def is_utf8(stream: TextIO, environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether a stream and the locale take UTF-8.

    >>> import io
    >>> stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    >>> is_utf8(stream, {}), is_utf8(stream, {"LANG": "C"}), is_utf8(stream, {"LC_ALL": "C", "PYTHONUTF8": "1"})
    (True, False, True)
    """
    if not codecs.lookup(stream.encoding or "utf-8").name.startswith("utf"):
        return False
    if environment.get("PYTHONIOENCODING", "").partition(":")[0] or environment.get("PYTHONUTF8") == "1":
        return True
    ctype = environment.get("LC_CTYPE", "")
    is_coerced = ctype in ("C.UTF-8", "C.utf8", "UTF-8")  # by Python, in a C locale (PEP 538)
    named = environment.get("LC_ALL") or ("" if is_coerced else ctype) or environment.get("LANG")
    return named not in ("C", "POSIX")


def to_ascii(text: str, encoding: str = "ascii") -> str:
    """Return a text with this program's characters in ASCII; others that `encoding` lacks are escaped.

    >>> to_ascii("layers.0–31 × 32: 3 µs, layers…_attn, and so on …")
    'layers.0-31 x 32: 3 us, layers~_attn, and so on ...'
    >>> to_ascii("é", "latin-1"), to_ascii("é")
    ('é', '\\\\xe9')
    """
    text = re.sub(r"…(?=[\w.}])", "~", text).replace("…", "...")  # in a name, one cell as in its column
    text = text.replace("· ", "- ").replace("·", "*")  # a separator, or a product
    return text.translate(_ASCII).encode(encoding, "backslashreplace").decode(encoding)


def to_ascii_markup(text: str) -> str:
    """Return HTML or SVG in ASCII, which means the same: references, and in scripts and styles their own escapes.

    >>> print(to_ascii_markup('<p>×</p><script>"×"</script><style>p {content: "×"}</style>'))
    <p>&#215;</p><script>"\\u00d7"</script><style>p {content: "\\d7 "}</style>
    """
    parts = re.split(r"(<(?:script|style)\b.*?</(?:script|style)>)", text, flags=re.DOTALL)
    return "".join(map(_escape_markup, parts))


def _escape_markup(part: str) -> str:
    if part.isascii():
        return part
    if part.startswith("<script"):
        return re.sub(r"[^\x00-\x7f]", lambda match: json.dumps(match[0])[1:-1], part)
    if part.startswith("<style"):
        return re.sub(r"[^\x00-\x7f]", lambda match: f"\\{ord(match[0]):x} ", part)
    return part.encode("ascii", "xmlcharrefreplace").decode()


def is_ascii(stream: TextIO) -> bool:
    return codecs.lookup(stream.encoding or "utf-8").name == "ascii"


def _register(encoding: str) -> str:
    name = f"fvflops-{codecs.lookup(encoding).name}"
    target = "ascii" if encoding.lower().startswith("utf") else encoding

    def replace(error: UnicodeError) -> tuple[bytes, int]:
        if not isinstance(error, UnicodeEncodeError):
            raise error
        text = error.object[error.start : error.end + 1]
        replaced = to_ascii(text, target)[: None if error.end == len(error.object) else -1]
        return replaced.encode(target, "backslashreplace"), error.end

    codecs.register_error(name, replace)
    return name
