"""Options and help of every command, examples, exit codes, and formats at several widths and in several locales."""

import csv
import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from fvflops.cli import COMMANDS, build_parser, main
from fvflops.cli.encoding import to_ascii
from fvflops.cli.model_table import FORMATS
from fvflops.cli.outputs import _EXPORTS
from fvflops.reports.display_width import display_width
from tests.support.reports.report_formats import run

PARSER = build_parser()
OPTIONS = [(name, action) for name, parser in PARSER.commands().items() for action in parser.options()]
EXAMPLES = [
    line for name in COMMANDS for line in __import__(f"fvflops.cli.commands.{name}", fromlist=["EXAMPLES"]).EXAMPLES
]
# Parts of examples that are slow, need a repository or run a shell; tests of these commands run such lines.
NOT_RUN = ("timm", "HEAD~1", "llama3", "zoo:gpt2", " > ", "zoo:resnet50 --batch 64", "peak --", "size=224")
NET = "import torch\n\ndef build():\n    return torch.nn.Linear(4, 3), torch.ones(2, 4)\n"
OWN_OPS = """
import torch

@torch.library.custom_op("fvflops_lines::scan", mutates_args=())
def scan(x: torch.Tensor) -> torch.Tensor:
    return x.clone()

@scan.register_fake
def _(x):
    return torch.empty_like(x)
"""
OWN_TABLE = 'ops:\n  fvflops_lines::scan: {flops: 9*numel(out), example: "2 3 = 54"}\n'


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the files that the command lines name."""
    folder = tmp_path_factory.mktemp("lines")
    (folder / "net.py").write_text(NET)
    (folder / "my_ops.py").write_text(OWN_OPS)
    (folder / "mine.yaml").write_text(OWN_TABLE)
    (folder / "wrong.yaml").write_text(OWN_TABLE.replace("54", "55"))
    model = torch.nn.Conv2d(1, 6, 5)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        model(torch.ones(1, 1, 28, 28))
    profiler.export_chrome_trace(str(folder / "trace.json"))
    (folder / "tight.yaml").write_text("models:\n  zoo:lenet5: {flops: 1}\n")
    return folder


@pytest.fixture
def inside(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0}, raising=False)  # a sweep starts one worker
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.parametrize(("command", "action"), OPTIONS, ids=lambda item: getattr(item, "dest", item))
def test_an_option_says_what_it_does_and_takes(command, action):
    assert (action.help and action.help[0].islower()) or action.help[0] in "-'[" or action.help.split()[0][0].isupper()
    assert not action.help.endswith(".")
    takes_value = action.nargs != 0
    assert not takes_value or action.metavar or action.choices
    for name in action.option_strings:
        value = action.choices[0] if action.choices else "1"
        required = [
            text
            for other in PARSER.commands()[command].options()
            if other.required
            for text in (other.option_strings[0], "1")
        ]
        arguments = [command, *required, *(["x"] * len(PARSER.commands()[command].positionals()))]
        if action.dest in ("help", "shell", "save_trace", "image_size", "memory", "run_device"):
            continue
        if command != "completion":
            parsed = PARSER.parse_args([*arguments, name, *([str(value)] if takes_value else [])])
            assert getattr(parsed, action.dest) not in (None, [], action.default if not takes_value else None)


@pytest.mark.parametrize("width", [60, 80])
@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_and_has_examples(capsys, command, width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    code, out, err = run(capsys, command, "--help")
    assert (code, err) == (0, "") and out.startswith(f"usage: fvflops {command} ")
    before, _, after = out.partition("\nexamples:\n")
    examples, _, options = after.partition("\n\n")
    assert max(map(len, (*before.splitlines(), *options.splitlines()))) <= width and "--help" not in before
    assert 1 <= len(examples.splitlines()) <= 4 and max(map(len, examples.splitlines())) <= 80


@pytest.mark.parametrize("command", COMMANDS)
def test_help_lists_at_most_25_options_most_used_first_and_help_all_lists_every_one(capsys, command):
    parser = PARSER.commands()[command]
    names = [action.option_strings[-1] for action in parser.options()]

    def shown(text):
        return [name for name in names if re.search(rf"^  (-\S.*, )?{name}\b", text, re.MULTILINE)]

    short, whole = run(capsys, command, "--help")[1], run(capsys, command, "--help", "all")[1]
    assert len(shown(short)) <= 25 and shown(whole) == names
    assert (shown(short) == names) == (len(names) <= 25)
    assert shown(short) == names or f"{len(names) - len(shown(short))} more options" in short
    first = re.search(r"^most used:\n(.*?)\n\n", short, re.MULTILINE | re.DOTALL)
    assert (first is None) == (len(names) < 15)
    if first is not None:
        assert re.findall(r"^  (--[\w-]+)", first[1], re.MULTILINE) == list(parser.first)
        assert len(parser.first) == 5 and not set(parser.first) & set(parser.rare)


@pytest.mark.parametrize(
    "line",
    [
        # Ten seconds; tests of sweeps run others.
        pytest.param(line, marks=pytest.mark.long) if "mixtral_8x7b" in line or " sweep " in line else line
        for line in EXAMPLES
        if not any(part in line for part in NOT_RUN)
    ],
)
def test_an_example_of_the_help_runs(capsys, inside, line):
    if " --budget" in line and "--update" not in line:
        run(capsys, *shlex.split(line)[1:], "--update")
    code, out, err = run(capsys, *shlex.split(line)[1:])
    assert code == 0 and (out or "--output" in line), err


def test_most_examples_run():
    run_lines = [line for line in EXAMPLES if not any(part in line for part in NOT_RUN)]
    assert len(run_lines) > 0.55 * len(EXAMPLES)


# Command line → exit code, and how its standard output starts; those that exit with 2 are in mistakes.yaml.
CODES = {
    "": (0, "usage: fvflops COMMAND"),
    "--help": (0, "usage: fvflops COMMAND"),
    "--version": (0, "fvflops "),
    "count --help": (0, "usage: fvflops count"),
    "count zoo:lenet5": (0, "module"),
    "check zoo:lenet5 --budget tight.yaml": (1, "OVER BUDGET"),
    "count zoo:lenet5 zoo:none --columns flops": (1, "Model"),
    "ops --check --table mine.yaml --import my_ops": (0, "mine.yaml"),
    "ops --check --table wrong.yaml --import my_ops": (1, "wrong.yaml"),
}


@pytest.mark.parametrize("line", CODES)
def test_exit_codes_and_starts_of_the_output(capsys, inside, line):
    code, out, err = run(capsys, *shlex.split(line))
    expected, start = CODES[line]
    assert code == expected, err
    assert out.lower().startswith(start.lower())


# Command lines; each is run with every format that its command writes.
REPORTS = (
    "count net.py:build --by op",
    "compare zoo:lenet5 --conventions default,exact",
    "diff zoo:lenet5 zoo:lenet5 --arg-b classes=20",
    "plan zoo:llama_tiny --mesh dp=2",
    "list zoo",
    "ops linear",
    "memory zoo:lenet5 --no-savings",
    "roofline zoo:lenet5 --device H100",
    "profile zoo:lenet5 --repeat 1 --warmup 0",
    "scale zoo:lenet5 --vary batch=1..4",
)

# Command → the rest of a command line, to which a wrong option is added.
RIGHT = {
    **{line.split()[0]: line.split(maxsplit=1)[1] for line in REPORTS},
    "count": "zoo:lenet5",
    "check": "zoo:lenet5 --budget tight.yaml",
    "serve": "zoo:llama_tiny --device H100",
    "explain": "trace.json --device H100",
    "annotate": "trace.json --output out.json",
    "sweep": "zoo:lenet5 --output -",
    "peak": "",
    "completion": "bash",
}
WRITTEN = ("output", *_EXPORTS, "html", "summary", "annotated", "folder", "prefix")  # any value is a path, or a name


@pytest.mark.parametrize("command", COMMANDS)
def test_the_error_of_a_wrong_value_names_its_option(command, capsys, inside):
    options = [action for action in PARSER.commands()[command].options() if action.nargs != 0]
    unnamed = []
    for action in options:
        for name in action.option_strings if action.dest not in (*WRITTEN, "help") else ():
            wrong = {"loss": "wr~ng.x:y"}.get(action.dest, "wr~ng.x")
            try:
                code, out, err = run(capsys, command, *shlex.split(RIGHT[command]), name, wrong)
            except SystemExit as error:  # argparse's
                code, (out, err) = error.code, capsys.readouterr()
            names = (name, "--backward") if name == "--loss" else (name,)  # --loss implies --backward
            if (code, out, err.count("\n")) != (2, "", 1) or not any(f"{option}" in err for option in names):
                unnamed.append((name, code, err))
    assert not unnamed


def test_errors_of_the_second_model_name_its_options(capsys, inside):
    for options, part in (
        ("--arg-b classes", "--arg-b classes: write NAME=VALUE"),
        ("--input-b 1,a", "--input-b 1,a: "),
        ("--config-b {}", "omit --config-b"),
        ("--input 1,1,28,28 --input-b 1,3,28,28", "got float32[1, 3, 28, 28]; pass --input-b 1,1,28,28"),
        ("--input 1,3,28,28 --input-b 1,1,28,28", "got float32[1, 3, 28, 28]; pass --input 1,1,28,28"),
    ):
        assert part in run(capsys, "diff", "zoo:lenet5", "zoo:lenet5", *shlex.split(options))[2]


def find_formats(line):
    parser = PARSER.commands()[line.split()[0]]
    return next(action.choices for action in parser.options() if action.dest == "format")


def check_format(text, format):
    """Fail if a text is not valid in its format."""
    if format in ("json", "trace", "model-explorer"):
        json.loads(text)
    elif format == "csv":
        assert len({len(row) for row in csv.reader(io.StringIO(text))}) == 1
    elif format == "svg":
        assert ElementTree.fromstring(text).tag.endswith("svg")
    elif format == "html":
        assert text.startswith("<!doctype html>") and text.rstrip().endswith("</html>")
    else:
        assert text.strip()


@pytest.mark.parametrize(("line", "format"), [(line, name) for line in REPORTS for name in find_formats(line)])
def test_every_format_of_every_command_is_valid_and_ascii_where_asked(capsys, inside, line, format, monkeypatch):
    if format == "png" or (format not in FORMATS and "--by" in line):
        pytest.skip("a binary file, or a format of modules: see test_cli.py")
    monkeypatch.setenv("LC_ALL", "C")
    monkeypatch.delenv("PYTHONIOENCODING", raising=False)
    monkeypatch.delenv("PYTHONUTF8", raising=False)
    code, out, err = run(capsys, *shlex.split(line), "--format", format)
    assert code == 0, err
    assert out.isascii() and (format not in ("text", "csv") or "\\" not in out)
    check_format(out, format)


@pytest.mark.parametrize("width", [60])
@pytest.mark.parametrize("line", [*REPORTS, "count zoo:resnet50 --backward", "count zoo:lenet5 zoo:llama_tiny"])
def test_text_fits_the_terminal(capsys, inside, line, width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    code, out, err = run(capsys, *shlex.split(line))
    assert code == 0, err
    assert max(map(display_width, out.splitlines())) <= width


@pytest.mark.parametrize(
    ("settings", "ascii"),
    [
        ({"LC_ALL": "C"}, True),
        ({"LANG": "POSIX"}, True),
        ({"PYTHONIOENCODING": "ascii"}, True),
        ({"PYTHONIOENCODING": "latin-1"}, True),
        ({"LANG": "C.UTF-8"}, False),
        ({"LC_ALL": "C", "PYTHONUTF8": "1"}, False),
    ],
    ids=str,
)
def test_output_is_ascii_where_the_locale_needs_it(settings, ascii, folder):
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": os.getcwd(), **settings}
    code = "from fvflops.cli.encoding import ascii_streams\nwith ascii_streams(): print('a × 3 µs │ layers…_attn …')"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, check=True)
    expected = "a x 3 us | layers~_attn ...\n" if ascii else "a × 3 µs │ layers…_attn …\n"
    assert result.stdout.decode() == expected


def test_a_name_that_is_not_ascii_is_escaped():
    assert to_ascii("层.conv × 2") == "\\u5c42.conv x 2"


def test_an_interrupt_prints_one_line(inside, capsys):
    Path("slow.py").write_text(
        "import os, signal, time\n\n"
        "def build():\n    print('started')\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(60)\n"
    )
    assert run(capsys, "count", "slow.py:build", "--input", "1") == (130, "", "started\nfvflops: interrupted\n")


def test_a_training_step_is_counted(capsys):
    _, forward, _ = run(capsys, "count", "zoo:lenet5", "--format", "csv")
    code, step, _ = run(capsys, "count", "zoo:lenet5", "--train", "--backward", "--format", "csv")
    before, after = (next(csv.DictReader(io.StringIO(text))) for text in (forward, step))
    assert code == 0 and after["forward"] == before["flops"] == "416520"
    # Each product has two in the backward pass, but the first layer, whose input needs no gradient, has one.
    assert int(after["backward"]) == 2 * 416_520 - 117_600 and int(after["flops"]) == 416_520 + int(after["backward"])


def test_a_step_of_a_revised_model_is_compared(capsys):
    code, out, _ = run(capsys, "diff", "zoo:lenet5", "zoo:lenet5", "--arg-b", "classes=20", "--backward", "--train")
    assert code == 0 and "1.13M" in out


@pytest.mark.parametrize("command", ["count", "profile", "roofline"])
def test_commands_have_the_convention_of_count(capsys, command):
    options = {"roofline": ["--device", "H100"], "profile": ["--repeat", "1", "--warmup", "0"]}.get(command, [])
    code, out, _ = run(capsys, command, "zoo:lenet5", *options)
    assert code == 0 and "Convention: default (1 FLOP per multiply-add)" in " ".join(out.split())
    assert command == "count" or "2 per multiply-add, as peaks do: 833K FLOPs" in " ".join(out.split())


# The start of what is written to a file by its suffix, and by --format where it is given.
BY_SUFFIX = {
    ("count", "a.html"): "<!doctype html>",
    ("compare", "a.md"): "zoo:lenet5 on",
    ("count", "a.svg"): "<?xml",
    ("count", "a.txt"): "module  ",
    ("count", "a.html", "--format", "csv"): "module,",
    ("compare", "a.HTM"): "<!doctype html>",
    ("compare", "a.tex"): "\\usepackage",
    ("memory", "a.svg"): "<svg",
    ("memory", "a.json"): "{",
}


@pytest.mark.parametrize("case", BY_SUFFIX)
def test_the_suffix_of_a_file_sets_its_format(tmp_path, capsys, case):
    command, name, *more = case
    more += ["--no-savings"] * (command == "memory")
    assert main([command, "zoo:lenet5", "--output", str(tmp_path / name), *more]) == 0
    assert (tmp_path / name).read_text(encoding="utf-8").lstrip("# %").startswith(BY_SUFFIX[case])


@pytest.mark.parametrize(("command", "name"), [("compare", "a.svg"), ("count", "a.pdf"), ("plan", "a.parquet")])
def test_a_suffix_of_a_format_that_is_not_written_is_refused(capsys, command, name):
    assert main([command, "zoo:lenet5", "--output", name]) == 2
    assert f"error: --output {name}: {command} writes text, markdown" in capsys.readouterr().err
