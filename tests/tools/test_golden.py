"""The golden outputs: two writes are the same byte for byte, and the comparison sees each kind of change."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fvflops.cli import COMMANDS
from tests.support.checkout import TOOLS
from tests.support.tools import load_tool

PROGRAM = TOOLS / "golden.py"
JOBS = ("cli/help", "counts/zoo/lenet5/train")
HELP = Path("cli/help/count_--help.txt")
NUMBERS = Path("counts/zoo/lenet5/train/default.txt")


def run(*arguments):
    found = subprocess.run([sys.executable, str(PROGRAM), *map(str, arguments)], capture_output=True, text=True)
    return found.returncode, found.stdout + found.stderr


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return two folders, written one after the other: with other numbers of processes, and of jobs."""
    folders = tuple(tmp_path_factory.mktemp(name) for name in ("old", "new"))
    only = [word for name in JOBS for word in ("--only", name)]
    for folder, processes in zip(folders, (1, 2), strict=True):
        code, text = run("write", folder, *only, "--jobs", processes)
        assert code == 0, text
    return folders


@pytest.fixture
def copied(written, tmp_path):
    """Return the first folder and a copy of it, to be changed."""
    return written[0], Path(shutil.copytree(written[0], tmp_path / "copy"))


def change(path, old, new):
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


def test_two_writes_are_equal(written):
    code, text = run("compare", *written)
    files = [path for path in written[0].rglob("*") if path.is_file()]
    assert len(files) == len(COMMANDS) + 6  # a help text for each command
    assert (code, text) == (
        0,
        f"{len(files):,} files in both: 0 differ in numbers, 0 in words only; "
        "0 only in the old folder, 0 only in the new one\n",
    )
    assert str(written[0]) not in "".join(path.read_text(encoding="utf-8") for path in files)


def test_a_changed_number_is_an_error(copied):
    change(copied[1] / NUMBERS, "416520", "416521")
    code, text = run("compare", *copied)
    assert code == 1
    assert f"NUMBERS DIFFER: {NUMBERS}\n" in text and "1 differ in numbers, 0 in words only" in text


def test_a_number_more_is_an_error(copied):
    change(copied[1] / HELP, "usage: fvflops", "usage: fvflops 7")
    code, text = run("compare", *copied, "--lines", "2")
    assert code == 1 and "lines more: --lines 0 shows all" in text


def test_changed_words_are_told_apart(copied):
    for name in ("count", "diff"):
        change(copied[1] / f"cli/help/{name}_--help.txt", "usage: fvflops", "Usage: fvflops")
    code, text = run("compare", *copied)
    assert code == 0
    assert "WORDS ONLY, in 2 files; 2 changes:" in text and "0 differ in numbers, 2 in words only" in text


def test_a_missing_and_a_new_file_are_errors(copied):
    (copied[1] / HELP).rename(copied[1] / "cli/help/conut_--help.txt")
    code, text = run("compare", *copied)
    assert code == 1
    assert f"only in {copied[0]}: {HELP}\n" in text and f"only in {copied[1]}: cli/help/conut_--help.txt\n" in text


def test_what_cannot_be_written_is_said(written, tmp_path, capsys):
    tool = load_tool("golden.py")
    assert tool.write(written[0], ["cli/help"], 1) == 2
    assert "is not empty: name another folder" in capsys.readouterr().err
    assert tool.write(tmp_path / "none", ["cli/hlep"], 1) == 2
    assert "matches no job" in capsys.readouterr().err
