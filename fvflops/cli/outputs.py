"""The outputs of a command: the files that its options name, looked at before the work."""

from __future__ import annotations

import argparse
import os

from fvflops import paths

_OPTIONS = ("output", "summary", "plot", "trace", "speedscope", "flamegraph", "html")
# What may be a file that is read, or FILE:NAME of what stands in one.
_INPUTS = ("model", "other", "budget", "table", "config", "config_b", "peaks", "device", "shard")


def check_outputs(arguments: argparse.Namespace) -> None:
    """Raise OSError where one of the files cannot be written, and ValueError where it is read too, or two are the same.

    >>> check_outputs(argparse.Namespace(output="a.txt", plot="./a.txt"))
    Traceback (most recent call last):
    ValueError: --plot ./a.txt: another file of this run has that path
    """
    named = [(option, path) for option in _OPTIONS if (path := getattr(arguments, option, None)) is not None]
    read, written = _find_inputs(arguments), set[str]()
    for option, path in named:
        if (place := _locate(path)) in read:
            raise ValueError(f"--{option} {path}: this run reads that file: choose another path")
        if place in written:
            raise ValueError(f"--{option} {path}: another file of this run has that path")
        written.add(place)
    for _, path in named:
        paths.check_writable(path)


def _find_inputs(arguments: argparse.Namespace) -> set[str]:
    texts = [text for option in _INPUTS if (text := getattr(arguments, option, None)) is not None]
    # What has no ending, such as a table's name, is no file.
    return {_locate(file) for text in texts for file in (text, text.rpartition(":")[0]) if os.path.splitext(file)[1]}


def _locate(path: str) -> str:
    try:
        return path if "://" in path else os.path.realpath(path)
    except (OSError, ValueError):  # a name that no file can have, of which check_writable tells
        return path
