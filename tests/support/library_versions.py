"""Installed releases of libraries: the suite runs on the releases of tools/constraints.txt and on the lower bounds."""

import re
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version

from tests.support.checkout import TOOLS


def is_older(library: str, than: str) -> bool:
    """Return whether the installed release of a library is older than another."""
    return _numbers(version(library)) < _numbers(than)


def pinned_version(library: str) -> str:
    """Return the release of a library in tools/constraints.txt."""
    found = re.search(rf"^{re.escape(library)}==([\d.]+)", (TOOLS / "constraints.txt").read_text(), re.MULTILINE)
    assert found, library
    return found[1]


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text.partition("+")[0])[:3]))


def installed_versions(names: Iterable[str]) -> dict[str, str]:
    """Return distribution → its version, or "not installed"."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
