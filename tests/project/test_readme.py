"""The README and the pages under docs: what they show is what runs, prints and draws, and links lead somewhere."""

import doctest
import re
import shlex
import sys
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pytest

from fvflops import load_table
from fvflops.cli import main
from tests.support.checkout import ROOT
from tests.support.old_torch import OLDER

pytest_plugins = ["pytester"]

README = (ROOT / "README.md").read_text()
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
}
MOST_BYTES = 60_000  # of a picture in the repository


class Case(NamedTuple):
    """A command, the files of its page that it names, and what it prints: nothing where the page does not show it."""

    command: str
    files: tuple[tuple[str, str], ...]
    shown: str


def console_blocks(text: str) -> list[tuple[str, str]]:
    """Return (command, output shown below it) for each `$ fvflops ...` of the console blocks."""
    commands = []
    for block in re.findall(r"```console\n(.*?)```", text, re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            commands.append((command, output))
    return commands


def shown_files(text: str) -> dict[str, str]:
    """Return name → content of the files that a text shows: blocks whose first line is a comment with the name."""
    return {
        name: f"# {name}\n{rest}"
        for name, rest in re.findall(r"^```\w+\n# (\w+\.\w+)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    }


def collect(pages: dict[str, str]) -> list[Case]:
    """Return the commands of all pages, each once; that two pages show it with different outputs is a ValueError."""
    cases: dict[object, Case] = {}
    for page, text in pages.items():
        for command, shown in console_blocks(text):
            files = tuple((name, content) for name, content in shown_files(text).items() if name in command)
            before = cases.get((command, files))
            if before and before.shown and shown not in ("", before.shown):
                raise ValueError(f"{page}: another page shows other output of {command}")
            cases[command, files] = before if before and before.shown else Case(command, files, shown)
    return list(cases.values())


def texts_of(picture: Path) -> list[str]:
    """Return the texts of an SVG; matplotlib draws them as paths and says in comments what they are."""
    parser = ElementTree.XMLParser(target=ElementTree.TreeBuilder(insert_comments=True))
    tree = ElementTree.parse(picture, parser)
    texts = [*tree.iter(ElementTree.Comment), *tree.iter("{http://www.w3.org/2000/svg}text")]
    return [element.text.strip() for element in texts]


def anchors(text: str) -> set[str]:
    """Return what a link to a heading of a page ends with: its words in small letters, with hyphens between them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("case", collect(PAGES), ids=lambda case: case.command)
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


def test_each_picture_is_made_by_a_command_and_shown():
    pictures = {str(path.relative_to(ROOT)) for path in (ROOT / "docs" / "pictures").iterdir()}
    commands = " ".join(case.command for case in collect(PAGES)).split()
    shown = {
        str((ROOT / page).parent.joinpath(link).relative_to(ROOT))
        for page, text in PAGES.items()
        for link in re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text)
    }
    assert pictures == shown == pictures & set(commands)
    for picture in pictures:
        assert (ROOT / picture).stat().st_size < MOST_BYTES
        assert len(texts_of(ROOT / picture)) > 5


def test_the_commands_are_found():
    assert len(collect({"README.md": README})) >= 5
    assert console_blocks("```console\n$ fvflops a\nb\n$ fvflops c\n```") == [("fvflops a", "b\n"), ("fvflops c", "")]
    page = "```console\n$ fvflops a\nb\n```"
    assert collect({"x": "```console\n$ fvflops a\n```", "y": page}) == [Case("fvflops a", (), "b\n")]
    with pytest.raises(ValueError, match="z: another page"):
        collect({"y": page, "z": page.replace("b", "c")})


def test_the_files_are_found():
    assert set(shown_files(PAGES["docs/changes.md"])) == {"net.py", "budget.yaml", "test_cost.py"}
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
    for name, content in shown_files(PAGES["docs/changes.md"]).items():
        (pytester.path / name).write_text(content)
    pytester.syspathinsert()
    monkeypatch.delitem(sys.modules, "net", raising=False)  # another test's file may have been called so
    pytester.runpytest_inprocess().assert_outcomes(passed=1)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings(page):
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", PAGES[page].replace("\n", " ")):
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.is_file(), link
        assert not anchor or anchor in anchors(target.read_text()), link


def test_each_page_is_linked_from_the_readme():
    linked = set(re.findall(r"\]\(([^)#]+)", README))
    assert linked >= PAGES.keys() - {"README.md"}
    assert anchors("# A page, to look at\n```\n# no heading\n```\n") == {"a-page-to-look-at"}


def test_the_table_loads_and_its_tools_exist(tmp_path):
    (table,) = re.findall(r"```yaml\n(?!# \w+\.yaml\n)(.*?)```", PAGES["docs/conventions.md"], re.DOTALL)
    (tmp_path / "mine.yaml").write_text(table)
    assert load_table(str(tmp_path / "mine.yaml")).row("aten::sigmoid").kind == "free"
    for tool in set(re.findall(r"`(tools/[\w.]*\w)", "".join(PAGES.values()))):
        assert (ROOT / tool).exists(), tool
