"""Completion scripts, each run by its shell with a stub in place of the program, and the names that they ask for."""

import re
import shutil
import subprocess
import sys

import pytest

from fvflops.cli import COMMANDS, build_parser, main
from fvflops.cli.commands import completion as names
from fvflops.cli.commands.completion import (
    METAVARS,
    SHELLS,
    find_metavar,
    takes_value,
    write_bash,
    write_fish,
    write_zsh,
)
from fvflops.cli.commands.list import LISTS
from fvflops.devices.devices import load_devices
from fvflops.formulas import shipped_tables
from fvflops.zoo import ZOO

# What the program answers, by the arguments with which the scripts ask.
STUB = {
    "model zoo:l": ["zoo:lenet5", "zoo:llama_tiny"],
    "model t": ["timm:", "torchvision:"],
    "model ti": ["timm:"],
    "table f": ["fvcore"],
    "device H1": ["H100 SXM", "H100 PCIe"],
    "list d": ["devices"],
}
# Line → what is offered; readline replaces what follows a colon.
LINES = {
    "fvflops co": ["count", "compare", "completion"],
    "fvflops --v": ["--version"],
    "fvflops count --ta": ["--table", "--task"],
    "fvflops count --convention f": ["fvcore"],
    "fvflops count --convention=f": ["fvcore"],
    "fvflops count --execution ": ["auto", "shapes", "real"],
    "fvflops count --execution s": ["shapes"],
    "fvflops count --format mo": ["model-explorer"],
    "fvflops count zoo:l": ["lenet5", "llama_tiny"],
    "fvflops count --train zoo:lenet5 zoo:l": ["lenet5", "llama_tiny"],
    "fvflops count t": ["timm:", "torchvision:"],
    "fvflops roofline zoo:lenet5 --device H1": ["H100\\ SXM", "H100\\ PCIe"],
    "fvflops list d": ["devices"],
    "fvflops completion z": ["zsh"],
    "fvflops count --no-such": [],
    "fvflops count zoo:lenet5 --batch ": [],
}


@pytest.fixture(scope="module")
def commands():
    return build_parser().commands()


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """Return a folder with a stub of the program, which a shell finds first."""
    folder = tmp_path_factory.mktemp("bin")
    cases = "".join(f'"{asked}") printf "%s\\n" {" ".join(map(repr, lines))} ;;\n' for asked, lines in STUB.items())
    (folder / "fvflops").write_text(f'#!/bin/sh\ncase "$3 $5" in\n{cases}esac\n')
    (folder / "fvflops").chmod(0o755)
    return folder


def run_shell(program, shell, code):
    found = shutil.which(shell)
    if found is None:
        pytest.skip(f"{shell} is not installed")
    quiet = {"bash": ["--norc"], "fish": ["--no-config"], "zsh": ["-f"]}[shell]
    environment = {"PATH": f"{program}:/usr/bin:/bin", "HOME": str(program)}
    result = subprocess.run([found, *quiet, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout


def test_bash_completes_commands_options_choices_and_names(commands, program):
    asks = "\n".join(
        f"COMP_LINE={line!r}; COMP_POINT=${{#COMP_LINE}}; _fvflops; IFS='|'; echo \"${{COMPREPLY[*]}}\"; unset IFS"
        for line in LINES
    )
    written = run_shell(program, "bash", f"{write_bash(commands, COMMANDS)}\ncompopt() {{ :; }}\n{asks}")
    offered = [line.split("|") if line else [] for line in written.split("\n")[:-1]]
    assert dict(zip(LINES, offered, strict=True)) == LINES


def test_fish_completes_commands_options_choices_and_names(commands, program):
    lines = ["fvflops co", "fvflops count --ta", "fvflops count --execution s", "fvflops count zoo:l"]
    asks = "".join(f"complete -C '{line}'; echo ==;" for line in lines)
    written = run_shell(program, "fish", f"{write_fish(commands, COMMANDS)}\n{asks}")
    offered = [{line.split("\t")[0] for line in part.split("\n") if line} for part in written.split("==\n")[:-1]]
    assert {"count", "compare", "completion"} <= offered[0]
    assert offered[1] == {"--table", "--task"} and "shapes" in offered[2]
    assert {"zoo:lenet5", "zoo:llama_tiny"} <= offered[3]


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_is_right_and_has_every_command_and_option(commands, program, shell, tmp_path):
    script = SHELLS[shell](commands, COMMANDS)
    (tmp_path / "script").write_text(script)
    run_shell(program, shell, f"{shell} -n {tmp_path / 'script'}")
    assert [*commands] == [*COMMANDS]
    for command in commands.values():
        for option in command.options():
            for name in option.option_strings:
                shown = f"-l {name[2:]} " if shell == "fish" and name.startswith("--") else name
                assert name == "-h" or shown in script


def test_zsh_loads_the_script(commands, program):
    script = write_zsh(commands, COMMANDS)
    assert run_shell(program, "zsh", f"compdef() {{ echo $1 $2; }}\n{script}") == "_fvflops fvflops\n"


def test_each_metavar_of_names_is_used(commands):
    used = {find_metavar(option) for command in commands.values() for option in filter(takes_value, command.options())}
    used |= {find_metavar(action) for command in commands.values() for action in command.positionals()}
    assert used >= set(METAVARS)
    assert {kind for kind in METAVARS.values() if kind not in ("file", "folder")} <= set(names.KINDS)


def test_names_are_listed_once_and_then_read_from_the_cache(tmp_path, monkeypatch):
    environment = {"XDG_CACHE_HOME": str(tmp_path)}
    expected = [f"zoo:{name}" for name in ZOO]
    assert names.list_names("model", "zoo:", environment) == expected
    (written,) = tmp_path.rglob("*.txt")
    assert written.read_text().split("\n")[:-1] == [*ZOO]
    monkeypatch.setattr(names, "import_module", None)  # not called again
    assert names.list_names("model", "zoo:l", environment) == [name for name in expected if name.startswith("zoo:l")]
    assert names.list_names("model", "none:x", environment) == []


def test_names_are_listed_where_the_cache_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    environment = {"XDG_CACHE_HOME": str(tmp_path / "file")}
    assert names.list_names("table", "", environment) == [*shipped_tables()]
    assert set(names.list_names("device", "H1", environment)) <= {device.name for device in load_devices()}


def test_completion_has_the_sources_of_list():
    listed = [kind for kind in LISTS if kind not in ("hf", "devices", "conventions", "formats")]
    assert sorted(names.DISTRIBUTIONS) == sorted(listed)
    assert sorted(names.list_names("list")) == sorted(LISTS)


def test_names_need_no_torch(tmp_path):
    code = (
        "import sys; from fvflops.cli import main; main(['completion', '--names', 'dtype', '--prefix', 'b']); "
        "assert 'torch' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "bf16\n"


def test_the_command_prints_scripts_and_says_what_it_needs(capsys):
    assert main(["completion", "bash"]) == 0
    assert re.search(r"^complete -o default -F _fvflops fvflops$", capsys.readouterr().out, re.MULTILINE)
    assert main(["completion"]) == 2
    assert capsys.readouterr().err == "fvflops: error: completion needs a shell: bash, zsh, fish\n"
