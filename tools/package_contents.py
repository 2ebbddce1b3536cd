#!/usr/bin/env python3
"""Checks the contents of the sdist and the wheel: tools/package_contents.py SOURCE fvflops-X.tar.gz fvflops-X.whl.

The sdist has every file of the folder SOURCE, the wheel every file of the package and of configs/, and neither has
anything else but metadata. Prints files and sizes; exits with 1 if a file is missing or superfluous. Needs no torch.
"""

from __future__ import annotations

import argparse
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

_METADATA = ("PKG-INFO", "setup.cfg")
_MAX_SHOWN = 10


def list_source(folder: Path) -> set[str]:
    """Return the files of a checkout without leftovers of building."""
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return {name for name in files if "__pycache__" not in name and ".egg-info/" not in name}


def list_sdist(path: Path) -> set[str]:
    """Return the files of an sdist, without its top folder and the metadata that the build adds."""
    with tarfile.open(path) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    return {name for name in names if ".egg-info/" not in name and name not in _METADATA}


def list_wheel(path: Path) -> set[str]:
    """Return the files of a wheel without its metadata."""
    with zipfile.ZipFile(path) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name and not name.endswith("/")}


def in_wheel(source: set[str]) -> set[str]:
    """Return the files that a wheel of this source contains: the package, and configs/ inside it."""
    package = {name for name in source if name.startswith("fvflops/")}
    return package | {f"fvflops/{name}" for name in source if name.startswith("configs/")}


def describe_difference(name: str, found: set[str], expected: set[str]) -> list[str]:
    """Return a line for the missing files and one for the superfluous ones.

    >>> describe_difference("x.whl", {"a", "b"}, {"b", "c"})
    ['x.whl lacks 1 files: c', 'x.whl has 1 files too many: a']
    """
    lines = []
    for verb, files, end in (("lacks", expected - found, ""), ("has", found - expected, " too many")):
        if files:
            lines.append(f"{name} {verb} {len(files)} files{end}: {', '.join(sorted(files)[:_MAX_SHOWN])}")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("source", "sdist", "wheel"):
        parser.add_argument(name, type=Path)
    arguments = parser.parse_args(argv)
    source = list_source(arguments.source)
    problems = []
    for path, found, expected in (
        (arguments.sdist, list_sdist(arguments.sdist), source - set(_METADATA)),
        (arguments.wheel, list_wheel(arguments.wheel), in_wheel(source)),
    ):
        print(f"{path.name}: {len(found)} files, {path.stat().st_size / 1e6:.1f} MB")
        problems += describe_difference(path.name, found, expected)
    print(*problems, sep="\n", end="\n" if problems else "", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
