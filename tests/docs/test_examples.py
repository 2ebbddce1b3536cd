"""Commands, Python blocks and files that the README and the pages under docs show: they run, print and draw that."""

import doctest
import importlib
import re
import shlex
import sys

import pytest

from fvflops import load_table
from fvflops.cli import main
from tests.support.checkout import ROOT
from tests.support.documentation.pages import (
    PAGES,
    Case,
    collect,
    console_blocks,
    shown_files,
    shown_pictures,
    texts_of,
)
from tests.support.old_torch import OLDER

pytest_plugins = ["pytester"]

MOST_BYTES = 60_000  # of a picture in the repository
# Real execution of a large model, without shown output; the page on training loops has another profile by operator.
LONG = "fvflops profile zoo:resnet50 --by operator --top 4"


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.command, marks=[pytest.mark.long] * (case.command == LONG)) for case in collect(PAGES)],
)
def test_a_command_prints_and_draws_what_is_shown(case, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs" / "pictures").mkdir(parents=True)
    for name, content in case.files:
        (tmp_path / name).write_text(content)
    program, *argv = shlex.split(case.command)
    assert program == "fvflops"
    assert main(argv) == int(case.shown.startswith("OVER BUDGET"))
    printed = capsys.readouterr()
    assert printed.err == ""
    written = [tmp_path / option for option in argv if (tmp_path / option).is_file() and option not in dict(case.files)]
    assert printed.out or written
    if case.shown and OLDER:  # an older torch dispatches a model in other ops, of the same cost
        assert printed.out.partition("\n\n")[0] == case.shown.partition("\n\n")[0]
    elif case.shown:
        assert printed.out == case.shown
    for picture in (tmp_path / "docs" / "pictures").iterdir():  # other releases of matplotlib draw other paths
        assert sorted(texts_of(picture)) == sorted(texts_of(ROOT / picture.relative_to(tmp_path)))


README_TASKS = re.findall(r"\| `(fvflops [^`]+)`", PAGES["README.md"])


@pytest.mark.parametrize(
    "command", [task if "H100" in task else pytest.param(task, marks=pytest.mark.long) for task in README_TASKS]
)
def test_a_command_of_the_readmes_tasks_runs_as_it_is(command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(README_TASKS) >= 10
    assert main(shlex.split(command)[1:]) == 0
    printed = capsys.readouterr()
    assert printed.out or list(tmp_path.iterdir())
    if " plan " in command and "--device" in command:
        assert "\nFits: " in printed.out


def test_each_picture_is_made_by_a_command_and_shown():
    pictures = {str(path.relative_to(ROOT)) for path in (ROOT / "docs" / "pictures").iterdir()}
    commands = " ".join(case.command for case in collect(PAGES)).split()
    shown = shown_pictures(PAGES)
    assert pictures == shown == pictures & set(commands)
    for picture in pictures:
        assert (ROOT / picture).stat().st_size < MOST_BYTES
        assert len(texts_of(ROOT / picture)) > 5


def test_the_commands_are_found():
    assert len(collect({"README.md": PAGES["README.md"]})) >= 5
    assert console_blocks("```console\n$ fvflops a\nb\n$ fvflops c\n```") == [("fvflops a", "b\n"), ("fvflops c", "")]
    page = "```console\n$ fvflops a\nb\n```"
    assert collect({"x": "```console\n$ fvflops a\n```", "y": page}) == [Case("fvflops a", (), "b\n")]
    with pytest.raises(ValueError, match="z: another page"):
        collect({"y": page, "z": page.replace("b", "c")})


@pytest.mark.parametrize("page", PAGES)
def test_commands_can_be_pasted(page):
    commands = [command for command, _ in console_blocks(PAGES[page])]
    commands += re.findall(r"^```(?:sh|bash)\n(.*?)^```", PAGES[page], re.DOTALL | re.MULTILINE)
    assert not re.findall(r"\b(?:ORG|NAME|MODEL|FILE|FOLDER|REVISION)\b|\.\.\.|<\w+>", "\n".join(commands))


def test_the_files_are_found():
    assert set(shown_files(PAGES["docs/guides/continuous_integration.md"])) == {"net.py", "budget.yaml", "test_cost.py"}
    assert shown_files("```python\n# a.py\nx = 1\n```\n```yaml\nb: 1\n```\n") == {"a.py": "# a.py\nx = 1\n"}


@pytest.mark.parametrize("page", [page for page, text in PAGES.items() if "```python" in text])
def test_the_python_blocks_run(page):
    blocks = re.findall(r"^```python\n(.*?)^```", PAGES[page], re.DOTALL | re.MULTILINE)
    assert all(
        block.startswith((">>> ", "# ")) for block in blocks
    )  # a doctest, or a file that a command or pytest runs
    result = doctest.testfile(str(ROOT / page), module_relative=False)
    assert result.failed == 0
    assert result.attempted >= sum(block.startswith(">>> ") for block in blocks)


def test_a_test_file_that_is_shown_passes(pytester, monkeypatch):
    # The entry point may be installed or not: the tests name the plugin themselves.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makeini("[pytest]\naddopts = -p fvflops.integrations.pytest_plugin --strict-markers\n")
    for name, content in shown_files(PAGES["docs/guides/continuous_integration.md"]).items():
        (pytester.path / name).write_text(content)
    pytester.syspathinsert()
    monkeypatch.delitem(sys.modules, "net", raising=False)  # another test's file may have been called so
    pytester.runpytest_inprocess().assert_outcomes(passed=1)


def test_a_training_script_that_is_shown_prints_such_lines(tmp_path, monkeypatch, capsys):
    """Times differ from run to run: the words between numbers are compared. What runs is smaller than shown."""
    page = PAGES["docs/guides/train.md"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "train", raising=False)
    files = shown_files(page)
    (tmp_path / "peaks.yaml").write_text(files["mine.yaml"])
    (tmp_path / "whole.py").write_text(files["train.py"])
    (tmp_path / "train.py").write_text(files["train.py"].replace("128, 4, 128, 8\n", "128, 1, 16, 8\n"))
    (shown,) = re.findall(r"`python train.py` prints.*?^```text\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert main(["memory", "whole.py:build", "--loss", "whole.py:loss", "--no-savings"]) == 0
    peak = re.search("peak memory (.*)", capsys.readouterr().out)[1]
    assert shown.splitlines()[-1] == f"peak memory of a device: {peak} predicted"
    importlib.import_module("train").main()
    printed = capsys.readouterr()
    number = re.compile(r"<?[\d.,]+(?: ms| s|%)?")
    assert (number.sub("", printed.out), printed.err) == (number.sub("", shown), "")
    commands = re.findall(r"`(fvflops \w+ train.py:build[^`]*)`", page)
    assert len(commands) == 7
    choices = ("tp=1", "pp=1", "dp=1,8", "micro-batch=8", "checkpoint=none", "optimizer-sharding=none")
    few = ["--jobs", "1", *(part for name in choices for part in ("--choices", name))]
    for command in commands:
        assert main([*shlex.split(command)[1:], *(few if "--search" in command else ())]) == 0
        printed = capsys.readouterr()
        assert printed.out and not printed.err, command
    sys.modules.pop("train")


def test_the_table_loads_and_its_tools_exist(tmp_path):
    (table,) = re.findall(r"```yaml\n(?!# \w+\.yaml\n)(.*?)```", PAGES["docs/reference/conventions.md"], re.DOTALL)
    (tmp_path / "mine.yaml").write_text(table)
    assert load_table(str(tmp_path / "mine.yaml")).row("aten::sigmoid").kind == "zero_flop"
    for tool in set(re.findall(r"`(tools/[\w.]*\w)", "".join(PAGES.values()))):
        assert (ROOT / tool).exists(), tool
