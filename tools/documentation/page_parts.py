"""Replace a part of a page, between two comments."""

from __future__ import annotations


def replace_part(page: str, begin: str, end: str, part: str) -> str:
    """Return a page with another part between two comments, of which a missing one raises ValueError.

    >>> replace_part("a<!-- x -->old<!-- end -->b", "<!-- x -->", "<!-- end -->", "new")
    'a<!-- x -->new<!-- end -->b'
    """
    before, _, rest = page.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"the page needs the comments {begin.strip()} and {end}")
    return f"{before}{begin}{part}{end}{after}"
