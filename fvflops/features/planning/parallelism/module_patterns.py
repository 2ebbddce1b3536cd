"""Patterns of module names, as in transformers' plans."""

from __future__ import annotations

from fnmatch import fnmatch


def matches(name: str, pattern: str) -> bool:
    """Return whether a dotted name matches a pattern, part by part.

    >>> matches("layers.3.mlp", "layers.*.mlp"), matches("layers.3.mlp.down_proj", "layers.*.mlp")
    (True, False)
    """
    parts, pattern_parts = name.split("."), pattern.split(".")
    return len(parts) == len(pattern_parts) and all(map(fnmatch, parts, pattern_parts))
