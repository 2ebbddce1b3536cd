"""The outputs of a command: the files that its options name, looked at before the work."""

from __future__ import annotations

import argparse

from fvflops import paths

_OPTIONS = ("output", "summary", "plot", "trace", "speedscope", "flamegraph", "html")


def check_outputs(arguments: argparse.Namespace) -> None:
    """Raise OSError where one of the files cannot be written, and ValueError where two have one path.

    >>> check_outputs(argparse.Namespace(output="a.txt", plot="a.txt"))
    Traceback (most recent call last):
    ValueError: --plot a.txt: another file of this run has that path
    """
    named = [(option, path) for option in _OPTIONS if (path := getattr(arguments, option, None)) is not None]
    for index, (option, path) in enumerate(named):
        if path in [other for _, other in named[:index]]:
            raise ValueError(f"--{option} {path}: another file of this run has that path")
    for _, path in named:
        paths.check_writable(path)
