"""Griffe extension: doctests in docstrings become blocks of code, which Markdown would read as quotations."""

from __future__ import annotations

import re
from typing import Any

import griffe

DOCTEST = re.compile(r"^>>> .*(?:\n(?!\n).*)*", re.MULTILINE)


def fence_doctests(docstring: str) -> str:
    """Return a docstring with its doctests, each up to the next empty line, in fences.

    >>> print(fence_doctests("Add.\\n\\n>>> 1 + 1\\n2\\n\\nMore."))
    Add.
    <BLANKLINE>
    ```pycon
    >>> 1 + 1
    2
    ```
    <BLANKLINE>
    More.
    """
    return DOCTEST.sub(lambda match: f"```pycon\n{match[0]}\n```", docstring)


class FenceDoctests(griffe.Extension):
    """Rewrite the docstring of every object when it is loaded."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Fence the doctests of one object."""
        if obj.docstring:
            obj.docstring.value = fence_doctests(obj.docstring.value)
