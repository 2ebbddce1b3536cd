#!/usr/bin/env python3
"""Checks the contents of the sdist and the wheel: tools/package_contents.py SOURCE fvflops-X.tar.gz fvflops-X.whl.

The sdist has every file of the folder SOURCE, the wheel every file of the package and of configs/, and neither has
anything else but metadata. Prints files and sizes; exits with 1 if a file is missing or superfluous. Needs no torch.
"""

from __future__ import annotations

import argparse
import re
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

_METADATA = re.compile(r"^(PKG-INFO|setup\.cfg)$|__pycache__|\.(egg|dist)-info/")
_MAX_SHOWN = 10


def list_files(path: Path) -> set[str]:
    """Return the files of a checkout, an sdist or a wheel, without metadata and leftovers of building."""
    if path.is_dir():
        names = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
    elif path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            names = {name for name in wheel.namelist() if not name.endswith("/")}
    else:
        with tarfile.open(path) as sdist:
            names = {member.name.partition("/")[2] for member in sdist.getmembers() if member.isfile()}
    return {name for name in names if not _METADATA.search(name)}


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
    source = list_files(arguments.source)
    in_wheel = {name for name in source if name.startswith("fvflops/")}
    in_wheel |= {f"fvflops/{name}" for name in source if name.startswith("configs/")}
    problems = []
    for path, expected in ((arguments.sdist, source), (arguments.wheel, in_wheel)):
        found = list_files(path)
        print(f"{path.name}: {len(found)} files, {path.stat().st_size / 1e6:.1f} MB")
        problems += describe_difference(path.name, found, expected)
    print(*problems, sep="\n", end="\n" if problems else "", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
