"""Sizes that may only fall: lines and files of each folder, large functions and files, equal file names.

A change that adds code removes as much elsewhere; one that makes a folder smaller lowers its limit here.
"""

import ast
from collections import Counter

import pytest

from tests.support.checkout import ROOT

PACKAGE = ROOT / "fvflops"
# Folder → the most lines and files of Python.
LIMITS = {
    "fvflops": (80602, 452),
    "fvflops/analysis": (2831, 16),
    "fvflops/capture": (17603, 94),
    "fvflops/cli": (5398, 35),
    "fvflops/comparison": (4061, 17),
    "fvflops/compat": (744, 3),
    "fvflops/counting": (1682, 11),
    "fvflops/devices": (2115, 13),
    "fvflops/formulas": (4065, 27),
    "fvflops/integrations": (756, 7),
    "fvflops/measure": (5349, 22),
    "fvflops/plan": (10870, 51),
    "fvflops/reports": (4593, 33),
    "fvflops/serve": (3872, 21),
    "fvflops/sources": (4286, 31),
    "fvflops/sweep": (1958, 11),
    "fvflops/trace": (3311, 19),
    "fvflops/views": (666, 5),
    "fvflops/zoo": (1511, 10),
    "tests": (69294, 399),
    "tools": (9160, 80),
}
MOST_PARAMETERS, MOST_LINES_OF_FUNCTION, MOST_LINES_OF_FILE = 8, 60, 450
# How many exceed these today.
LARGE = {"parameters": 1, "functions": 0, "files": 0}
# fvflops/text.py has helpers, fvflops/reports/formats/text.py writes the format text.
EQUAL_NAMES = {"text": 2}


def python_files(folder):
    return sorted((ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("folder", LIMITS)
def test_a_folder_has_no_more_lines_and_files_than_before(folder):
    files = python_files(folder)
    lines = sum(len(path.read_text().splitlines()) for path in files)
    most_lines, most_files = LIMITS[folder]
    assert lines <= most_lines and len(files) <= most_files, (
        f"{folder} has {lines} lines in {len(files)} files, and its limit is {most_lines} in {most_files}: remove as "
        "much elsewhere in it, or raise LIMITS with the reason in the commit"
    )


def test_no_more_large_functions_and_files_than_before():
    found = {kind: [] for kind in LARGE}
    for path in python_files("fvflops"):
        source = path.read_text()
        if len(source.splitlines()) > MOST_LINES_OF_FILE:
            found["files"].append(path)
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                if len(parameters) > MOST_PARAMETERS:
                    found["parameters"].append(f"{path}:{node.lineno} {node.name}")
                if (node.end_lineno or 0) - node.lineno + 1 > MOST_LINES_OF_FUNCTION:
                    found["functions"].append(f"{path}:{node.lineno} {node.name}")
    assert {kind: len(names) for kind, names in found.items()} == LARGE, found


def test_file_names_are_unique():
    names = Counter(path.stem for path in python_files("fvflops") if not path.stem.startswith("__"))
    assert {name: count for name, count in names.items() if count > 1} == EQUAL_NAMES
