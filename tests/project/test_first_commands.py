"""The first commands of README and of the page on installing, as a new user types them."""

import os
import re
import subprocess

import pytest

from tests.support.checkout import ROOT

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
