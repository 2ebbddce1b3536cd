"""Folders of tests, GitHub's workflows, and the first commands of README and of the page on installing."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

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


WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def steps_of(workflow):
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_calls_the_tools_and_has_no_commands_of_its_own(path):
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"} and workflow["name"]
    assert True in workflow, "`on`, which YAML reads as a bool"
    for step in steps_of(workflow):
        assert ("run" in step) != ("uses" in step), step
        if "uses" in step:
            assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", step["uses"]), "a tag can be moved: name a commit"
            if step["uses"].startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False
        else:
            program = step["run"].split()[0]
            assert re.fullmatch(r"(tools|\.ci)/\w+", program) and "\n" not in step["run"]
            assert os.access(ROOT / program, os.X_OK), program
    assert all("timeout-minutes" in job for job in workflow["jobs"].values())
    needed = {name for job in workflow["jobs"].values() for name in job.get("needs", "").split()}
    assert needed <= set(workflow["jobs"])


def test_the_workflows_are_tests_docs_and_a_release_by_trusted_publishing():
    assert [path.stem for path in WORKFLOWS] == ["docs", "release", "tests"]
    release = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    publish = release["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"} and publish["needs"] == "build"
    assert not any("password" in step.get("with", {}) for step in publish["steps"])


def test_the_suite_runs_on_each_supported_python():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())
    versions = re.findall(r"Python :: (3\.\d+)", (ROOT / "setup.cfg").read_text())
    assert workflow["jobs"]["suite"]["strategy"]["matrix"]["python"] == versions


CLONE = "git clone https://github.com/fvflops/fvflops && cd fvflops"


def first_block(page):
    """The commands of a page's first block of code, without their comments."""
    fenced = re.search(
        r"^```\w*\n(.*?)^```|(?:^    .+\n)+", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    lines = (fenced[1] or fenced[0]).splitlines()
    return [" ".join(line.split("#")[0].split()) for line in lines]


@pytest.mark.parametrize("page", ["README.md", "docs/start/install.md"])
def test_a_page_begins_with_the_commands_that_work_in_a_bare_clone(page):
    assert first_block(page) == [CLONE, "tools/quickstart", "tools/test"]


@pytest.mark.long
def test_the_first_commands_run_in_a_clone_without_an_environment(tmp_path):
    """Half an hour: the second is the whole suite."""
    clone = tmp_path / "fvflops"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    ours = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "PYTHON", "VIRTUAL_ENV"))
    }
    quickstart, test = first_block("README.md")[1:]
    first = subprocess.run([quickstart], cwd=clone, env=ours, capture_output=True, text=True)
    assert first.returncode == 0, first.stderr[-3000:]
    assert re.search(r"^model +25\.6M +4\.\d+G ", first.stdout, re.MULTILINE), first.stdout
    second = subprocess.run([test], cwd=clone, env=ours, capture_output=True, text=True)
    assert second.returncode == 0, second.stdout[-3000:]
    assert re.search(r"\b\d{5} passed", second.stdout)
