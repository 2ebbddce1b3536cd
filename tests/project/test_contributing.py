"""CONTRIBUTING.md: each recipe's diff applies, and then its command works; no pronoun stands before "of"."""

import csv
import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.support.checkout import ROOT

RECIPE = re.compile(r"^### (.+?)\n(?:(?!^###).)*?```diff\n(.*?)```\n\n```bash\n(.*?)\n```", re.MULTILINE | re.DOTALL)
RECIPES = RECIPE.findall((ROOT / "CONTRIBUTING.md").read_text())
# Also across lines of a comment or a string.
WITHOUT_NOUN = re.compile(r'\b(?:those|that)[\s#"]+of\b', re.IGNORECASE)
# Recipe → text in the output of its command.
EXPECTED = {
    "A formula": "macs: 3*b*t*d\n",
    "An op whose cost depends on values": "1 of 1 examples hold",
    "A convention": "hardware",
    "A metric": ",parameters,flops,activations,output_elements,called\n,LeNet5,61706,416520,6518,15002,yes\n",
    "A format": "convention\ttotal\tmultiply_add\tmacs\tflops\ndefault\t417K\t1\t",
    "A model of the zoo": "pp=2",
    "A source of models": "3.07K",
    "A device": "Card 9",
    "The times of a device": "measured by nobody",
    "An axis of parallelism": "trial=2",
    "A command and its report": "class      modules\n---------  -------\nLinear          49\n",
    "A feature": "{'': 40}\n",
}

MODELS = "zoo:lenet5 zoo:llama_tiny"
COUNT = f"fvflops count {MODELS} --columns output_elements --format csv --sort output_elements"
WRITE = "import fvflops.sweep.result_files as files; files.write_rows('rows.csv', fvflops.count_many('{}'.split()))"
# A sweep continues rows that were counted in this process.
SWEEPS = [f'python -c "{WRITE.format(MODELS)}"', f"fvflops sweep {MODELS} --output rows.csv --workers 1"]
# Prints command → its output; all run in one process, since importing torch takes seconds.
PROGRAM = """
import contextlib, io, json, shlex, sys
from fvflops.cli import main
outputs = {}
for command in json.load(sys.stdin):
    program, *arguments = shlex.split(command)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        if program == "fvflops":
            assert main(arguments) == 0, command
        else:
            exec(arguments[1])  # of python -c
    outputs[command] = output.getvalue()
print(json.dumps(outputs))
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the sources with all recipes applied."""
    folder = tmp_path_factory.mktemp("copy")
    for name in ("fvflops", "configs"):
        shutil.copytree(ROOT / name, folder / name)  # with the bytecode, to avoid compiling again
    for _, diff, _ in RECIPES:
        subprocess.run(["git", "apply", "--unsafe-paths", "-"], input=diff, text=True, check=True, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def outputs(copy):
    commands = json.dumps([*(command for _, _, command in RECIPES), COUNT, *SWEEPS])
    environment = {**os.environ, "PYTHONPATH": str(copy), "COLUMNS": "80"}
    start = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(start, input=commands, capture_output=True, text=True, cwd=copy, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_there_is_a_recipe_for_each_kind_of_change():
    assert [title for title, _, _ in RECIPES] == list(EXPECTED)


def test_names_and_files_in_the_text_exist():
    text = re.sub(r"```.*?```", "", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.DOTALL)
    paths = re.findall(r"`((?:configs|fvflops|tests|tools)/[\w./]+)`", text)
    assert [path for path in paths if not (ROOT / path).exists()] == []
    named = re.findall(r"`([\w.]+)`\s+(?:of|in)\s+`([\w/]+\.py)`", text)
    assert len(named) > 5
    lacking = [pair for pair in named if not re.search(rf"\b{pair[0].split('.')[-1]}\b", (ROOT / pair[1]).read_text())]
    assert lacking == []


def test_a_recipe_changes_at_most_one_existing_file():
    for title, diff, _ in RECIPES:
        files = re.findall(r"^--- (.*)\n\+\+\+ (.*)\n", diff, re.MULTILINE)
        changed = [new for old, new in files if old != "/dev/null"]
        assert len(changed) <= 1, title
        assert len(files) <= (3 if title == "A feature" else 2), title


@pytest.mark.parametrize(("title", "command"), [(title, command) for title, _, command in RECIPES])
def test_the_command_of_a_recipe_works(outputs, title, command):
    assert EXPECTED[title] in outputs[command]


def test_a_new_metric_is_a_column_of_several_models_and_of_a_sweep(outputs, copy):
    assert outputs[COUNT].split("\n")[:3] == ["model,output_elements", "zoo:llama_tiny,77744", "zoo:lenet5,15002"]
    assert "2 of them earlier" in outputs[SWEEPS[1]]
    rows = csv.DictReader((copy / "rows.csv").read_text().splitlines())
    assert [row["output_elements"] for row in rows] == ["15002", "77744"]


def test_no_pronoun_stands_before_of():
    assert all(WITHOUT_NOUN.search(f"Those{gap}of") for gap in (" ", "\n    # ", ' "\n    "'))
    files = [path for folder in ("configs", "docs", "fvflops", "tests", "tools") for path in (ROOT / folder).rglob("*")]
    files = [path for path in (*files, *ROOT.glob("[CR]*.md")) if path.suffix in (".js", ".md", ".py", ".yaml")]
    texts = {path: path.read_text(encoding="utf-8") for path in files if path.name.lower() != "changelog.md"}
    found = {path: WITHOUT_NOUN.findall(text) for path, text in texts.items()}
    assert {path: words for path, words in found.items() if words} == {}
