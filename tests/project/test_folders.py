"""Folders of tests: they mirror the package, share code by tests/support alone, and keep tools/ and tests/ apart.

tools/ may import tests.support, and nothing else of tests/: some tools measure the models that tests count, compare the
networks that tests draw, or need the schemas without which torchvision cannot be imported. No file of tests/ imports a
module of tools/: tests start a tool as a program, or load it by `tests.support.tools.load_tool`.
"""

import re
from pathlib import Path

import pytest

from tests.support.checkout import ROOT, TOOLS, imported_names
from tests.support.long_files import LONG_FILES

TESTS = ROOT / "tests"
SUPPORT = TESTS / "support"
LOADER = SUPPORT / "tools.py"
# Folders of tests that are of no one part of the package.
WHOLE_PRODUCT = {"docs", "models", "oracle", "peers", "project", "tools"}
# A reader takes in no more files of one folder; `__init__` is not counted.
LARGEST_FOLDERS = {"tests": 20, "fvflops": 17}
LOADS_FILES = ("SourceFileLoader", "spec_from_file_location", "spec_from_loader", "run_path")

FILES = sorted(TESTS.rglob("*.py"))
TEST_FILES = [path for path in FILES if path.name.startswith("test_")]
PROGRAMS = sorted(TOOLS.rglob("*.py"))
TOOL_NAMES = {"tools", *(path.stem for path in TOOLS.iterdir() if path.is_dir() or path in PROGRAMS)}


def named_test_modules(source):
    """Return the test modules that a file imports, or names in code for another process."""
    names = imported_names(source) | set(re.findall(r"\btests(?:\.\w+)+", source))
    return {found[0] for name in names if (found := re.match(r"tests(?:\.\w+)*?\.test_\w+", name))}


def wrong_imports(path, source):
    """Return the names that a file of tests/ or tools/ imports across the border between them, or relatively."""
    names = imported_names(source)
    relative = {name for name in names if name.startswith(".")}
    if path.is_relative_to(TESTS):
        return relative | {name for name in names if name.partition(".")[0] in TOOL_NAMES}
    return relative | {name for name in names if name.partition(".")[0] == "tests" and name.split(".")[1] != "support"}


def module_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def test_no_file_imports_a_test_module():
    named = {path: named_test_modules(path.read_text()) - {module_of(path)} for path in [*FILES, *PROGRAMS]}
    named.pop(Path(__file__).resolve())  # its strings below are examples
    assert not {path: names for path, names in named.items() if names}


def test_tools_import_support_alone_and_tests_import_no_tool():
    wrong = {path: wrong_imports(path, path.read_text()) for path in [*FILES, *PROGRAMS]}
    assert not {path: names for path, names in wrong.items() if names}


def test_one_file_loads_tools_and_support_needs_none():
    loading = {path for path in FILES if any(name in path.read_text() for name in LOADS_FILES)}
    assert loading == {LOADER, Path(__file__).resolve()}
    assert not [path for path in SUPPORT.rglob("*.py") if path != LOADER and "load_tool" in path.read_text()]


@pytest.mark.parametrize(
    ("path", "source", "wrong"),
    [
        ("tests/zoo/test_zoo.py", "from sweeping.timm import build", {"sweeping.timm.build"}),
        ("tests/zoo/test_zoo.py", "def f():\n    import tools.golden", {"tools.golden"}),
        ("tests/zoo/test_zoo.py", "from . import other", {"..other"}),
        ("tests/zoo/test_zoo.py", "from tests.support.tools import load_tool", set()),
        ("tools/sweep.py", "from tests.models.test_fuzz import tell", {"tests.models.test_fuzz.tell"}),
        ("tools/sweep.py", "from tests import conftest", {"tests.conftest"}),
        ("tools/sweep.py", "from tests.support.fuzz.network import Plan", set()),
    ],
)
def test_an_import_across_the_border_is_seen(path, source, wrong):
    assert wrong_imports(ROOT / path, source) == wrong


def test_an_import_of_a_test_module_is_seen():
    assert named_test_modules("from tests.zoo import test_zoo") == {"tests.zoo.test_zoo"}
    assert named_test_modules("import tests.test_units as units") == {"tests.test_units"}
    assert named_test_modules("program = 'from tests.zoo.test_zoo import build'") == {"tests.zoo.test_zoo"}
    assert named_test_modules("from tests.support.models.layers import LAYERS") == set()


def test_folders_are_those_of_the_package():
    for path in TEST_FILES:
        folder = path.parent.relative_to(TESTS)
        if folder == Path():
            assert (ROOT / "fvflops" / path.name.removeprefix("test_")).exists(), f"{path.name} tests no root module"
        else:
            assert folder.parts[0] in WHOLE_PRODUCT or (ROOT / "fvflops" / folder).is_dir(), f"{folder} mirrors nothing"


def test_what_is_no_test_is_in_support():
    outside = {path.name for path in FILES if path not in TEST_FILES and not path.is_relative_to(SUPPORT)}
    assert outside == {"__init__.py", "conftest.py"}
    assert not [path for path in TEST_FILES if path.is_relative_to(SUPPORT)]


@pytest.mark.parametrize("top", LARGEST_FOLDERS)
def test_no_folder_holds_more_files_than_a_reader_takes_in(top):
    folders = {path.parent for path in (ROOT / top).rglob("*.py")}
    sizes = {folder: len([*folder.glob("*.py")]) - 1 for folder in folders}
    assert not {folder: size for folder, size in sizes.items() if size > LARGEST_FOLDERS[top]}
    assert all((folder / "__init__.py").exists() for folder in folders)


def test_the_files_that_run_first_exist():
    assert all((TESTS / file).is_file() for file in LONG_FILES)
