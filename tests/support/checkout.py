"""Folders of the checkout, and the imports of its files."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / "tools"
DATA = ROOT / "tests" / "data"


@cache
def imported_names(source: str) -> set[str]:
    """Return the dotted names that a file imports anywhere, "a.b" for `from a import b`."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {"." * node.level + f"{node.module or ''}.{alias.name}" for alias in node.names}
    return names
