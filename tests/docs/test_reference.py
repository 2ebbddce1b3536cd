"""The reference: pages that are generated are up to date, and those that are written name all that there is."""

import argparse
import dataclasses
import doctest
import json
import re

import pytest
import torch

from fvflops import Trace, find_device, load_table, record_call
from fvflops.cli import COMMANDS, build_parser
from fvflops.comparison.budget_file import budget_keys, load_budgets
from fvflops.devices.devices import load_devices
from fvflops.formulas.language.functions import FUNCTIONS
from fvflops.formulas.loading import _KEYS
from fvflops.formulas.rows import MODULE_KEYS
from fvflops.sweep import ModelCount
from tests.support.checkout import ROOT
from tests.support.documentation.pages import PAGES
from tests.support.tools import load_tool

REFERENCE = ROOT / "docs" / "reference"


@pytest.mark.parametrize("name", ["command_line", "devices"])
def test_a_generated_page_is_up_to_date(name):
    made = load_tool(f"documentation.{name}").page()
    assert (REFERENCE / f"{name}.md").read_text() == made, "tools/docs reference writes it"


def test_writing_the_pages_writes_these(tmp_path, capsys):
    tool = load_tool("reference.py")
    (tmp_path / "page.md").write_text("before")
    tool.PAGES.clear()
    tool.PAGES["page.md"] = lambda: "after"
    assert tool.main(["--output", str(tmp_path)]) == 0
    assert (tmp_path / "page.md").read_text() == "after"
    assert capsys.readouterr().out == f"{tmp_path / 'page.md'}\n"


def test_every_option_of_every_command_is_on_the_page():
    text = PAGES["docs/reference/command_line.md"]
    sections = dict(re.findall(r"^## fvflops (\w+)\n(.*?)(?=^## )", text, re.DOTALL | re.MULTILINE))
    assert list(sections) == list(COMMANDS)
    subparsers = next(action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction))
    for name, parser in subparsers.choices.items():
        for option in parser._option_string_actions.keys() - {"-h", "--help"}:
            assert re.search(rf"[`>, ]{option}[`, <]", sections[name]), f"{name} {option}"


def test_every_device_is_on_the_page_and_its_example_is_one(tmp_path):
    text = PAGES["docs/reference/devices.md"]
    assert all(text.count(f"| {device.name} |") == 2 for device in load_devices())
    (example,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "mine.yaml").write_text(example)
    assert find_device("my accelerator", file=str(tmp_path / "mine.yaml")).peak("bf16") == 100 * 10**12


@pytest.mark.parametrize("name", ["command_line", "devices", "page_parts"])
def test_the_doctests_of_what_makes_the_pages(name):
    result = doctest.testmod(load_tool(f"documentation.{name}"))
    assert result.failed == 0
    assert result.attempted


def example_of(page, tmp_path):
    (example,) = re.findall(r"```yaml\n(.*?)```", PAGES[page], re.DOTALL)
    path = tmp_path / "example.yaml"
    path.write_text(example)
    return str(path)


def named(page):
    return set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", PAGES[page], re.MULTILINE))))


def test_the_page_of_files_names_every_key_of_traces_budgets_and_rows(tmp_path):
    page = "docs/reference/file_formats.md"
    trace = dataclasses.replace(record_call(torch.relu, (torch.ones(2),)), lines=("net.py:1",))
    assert json.loads(trace.to_json()).keys() <= named(page)
    assert Trace.from_json(trace.to_json()) == trace
    assert {field.name for field in dataclasses.fields(ModelCount)} <= named(page)
    assert set(load_budgets(example_of(page, tmp_path))) == {"resnet50"}
    assert all(f"`{key}`" in PAGES[page] for key in budget_keys())


def test_the_page_of_tables_names_every_key_and_function(tmp_path):
    text = PAGES["docs/reference/table_format.md"]
    for name in (*_KEYS, *MODULE_KEYS):
        assert f"| `{name}` |" in text, name
    for function in FUNCTIONS.values():
        assert f"| `{function.usage}` |" in text, function.usage
    registered = torch.library.Library("mylib", "FRAGMENT")
    registered.define("layout(Tensor x) -> Tensor")
    registered.define("recurrence(Tensor u) -> Tensor")
    registered.define("attention(Tensor q, Tensor k, Tensor v, Tensor offsets) -> Tensor")
    table = load_table(example_of("docs/reference/table_format.md", tmp_path))
    assert table.row("mylib::recurrence").example == "2 7 5 -> 2 7 5 = 630"
