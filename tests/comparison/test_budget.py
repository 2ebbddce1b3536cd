"""The budget: its file and the mistakes in it, the result, the update that keeps comments, and the pytest plugin."""

import configparser
import importlib
import os
import re
import subprocess
import sys
from collections import OrderedDict
from fractions import Fraction

import pytest
import torch

from fvflops import FlopCountAnalysis, predict_memory
from fvflops.cli import main
from fvflops.comparison.budget_file import Limit, load_budgets, make_limit, parse_budgets, update_text
from fvflops.formulas import TableError
from fvflops.reports.formats import FORMATS
from fvflops.units import parse_share, parse_size
from tests.support.checkout import ROOT
from tests.support.reports.report_formats import check_report

pytest_plugins = ["pytester"]

FACTORY = """
import torch
from torch import nn

def net(width):
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2)), torch.ones(3, 4)

def narrow():
    return net(8)

def wide():
    return net(16)

def scan():
    library = torch.library.Library("fvflops_check", "DEF")
    library.define("scan(Tensor x) -> Tensor")
    library.impl("scan", lambda x: x.clone(), "CompositeExplicitAutograd")
    class Net(nn.Module):
        def forward(self, x):
            return library and torch.ops.fvflops_check.scan(torch.ops.fvflops_check.scan(x))
    return Net(), torch.ones(2)
"""
# Of narrow(): 3 * 4 * 8 + 3 * 8 * 2 multiply-adds, 3 * 8 + 3 * 2 outputs, 4 * 8 + 8 + 8 * 2 + 2 parameters.
NARROW = {"flops": 144, "macs": 144, "activations": 30, "parameters": 58}
# Four bytes a number: 12 + 32 + 8 + 24 in the first layer, 24 + 24 in ReLU, 24 + 16 + 2 + 6 in the last.
BYTES = 304 + 192 + 192


def make_narrow():
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    return FlopCountAnalysis(model, torch.ones(3, 4))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "net.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    return tmp_path


def check(*arguments, model="net.py:narrow", name="net"):
    return main(["check", model, "--budget", "budget.yaml", "--name", name, *arguments])


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("25557032", 25557032),
        ("25_557_032", 25557032),
        ("25,557,032", 25557032),
        ("1.2G", 1_200_000_000),
        ("4.089184256G", 4_089_184_256),
        ("120MiB", 120 * 2**20),
        ("1.5 KiB", 1536),
        ("0", 0),
        ("3 T", 3 * 10**12),
    ],
)
def test_a_size_is_read_exactly(text, number):
    assert parse_size(text) == number


@pytest.mark.parametrize("text", ["", "1.5", "-3", "1e9", "G", "1.2X", "nan", "٣", "1" * 100, "1.0005K"])
def test_an_invalid_size_raises(text):
    with pytest.raises(ValueError, match="is no"):
        parse_size(text)


def test_a_share_is_read_exactly():
    assert [parse_share(text) for text in ("1%", "0.01", "2.5 %", "0")] == [
        Fraction(1, 100), Fraction(1, 100), Fraction(1, 40), 0,
    ]  # fmt: skip
    with pytest.raises(ValueError, match="is not a share such as 1%"):
        parse_share("-1%")


def test_limits_have_a_kind_and_the_nearest_tolerance():
    text = """
tolerance: 1%
models:
  a:
    flops: 1.2K
    macs: {exact: 600}
    memory: {max: 1KiB, tolerance: 5%}
  b:
    table: exact
    tolerance: 0.5
    unsupported: 0
    modules: {layer1: 1K}
"""
    budgets = parse_budgets(text, "budget.yaml")
    assert budgets["a"].limits == {
        "flops": Limit("flops", 1200, False, Fraction(1, 100)),
        "macs": Limit("macs", 600, True, Fraction(1, 100)),
        "memory": Limit("memory", 1024, False, Fraction(1, 20)),
    }
    assert budgets["b"].limits["unsupported"].tolerance == Fraction(1, 2)
    assert (budgets["b"].table, budgets["b"].modules) == ("exact", {"layer1": 1000})


def test_a_tolerance_is_a_share_of_the_limit():
    most = Limit("flops", 200, False, Fraction(1, 100))
    assert [most.allows(value) for value in (0, 202, 203)] == [True, True, False]
    exact = Limit("flops", 200, True, Fraction(1, 100))
    assert [exact.allows(value) for value in (197, 198, 202, 203)] == [False, True, True, False]


MISTAKES = {
    "unknown key of a file": ("modles: {}", 1, "unknown key 'modles': did you mean 'models'?"),
    "unknown metric": ("models:\n  a:\n    flosp: 1", 3, "unknown key 'flosp': did you mean 'flops'?"),
    "unknown key of a limit": ("models:\n  a:\n    flops: {maxi: 1}", 3, "unknown key 'maxi': did you mean 'max'?"),
    "no number": ("models:\n  a:\n    flops: many", 3, "flops: 'many' is not a number such as 25_557_032, 1.2G"),
    "a number that is not whole": ("models:\n  a:\n    macs: 0.5", 3, "macs: '0.5' is not an integer"),
    "no share": ("models:\n  a: {flops: 1}\ntolerance: lots", 3, "tolerance: 'lots' is not a share"),
    "a decimal comma": ("models:\n  a:\n    flops: 1,5M", 3, "flops: '1,5M' is not a number"),
    "percent without the sign": ("models:\n  a: {flops: 1}\ntolerance: 5", 3, "tolerance: '5' is not a share"),
    "max and exact": ("models:\n  a:\n\n    macs: {max: 1, exact: 1}", 4, "macs is either max or exact"),
    "no limit": ("models:\n  a:\n    table: exact", 2, "a has no limit: write one of flops, macs"),
    "a list": ("models: [a]", 1, "models is a list, not a mapping"),
    "a key twice": ("models:\n  a:\n    macs: 1\n    macs: 2", 4, "'macs' is defined twice, first on line 3"),
    "no YAML": ("models: ]", 1, "this is not YAML"),
    "an anchor": ("models: &a {}", 1, "anchors and aliases are not supported"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_a_budget_is_reported_with_its_line(name, folder, capsys):
    text, line, message = MISTAKES[name]
    (folder / "budget.yaml").write_text(text)
    with pytest.raises(TableError) as caught:
        load_budgets("budget.yaml")
    assert str(caught.value).startswith(f"budget.yaml:{line}: ")
    assert message in str(caught.value)


def test_limits_passed_by_a_program_are_checked():
    assert make_limit("flops", 1200) == Limit("flops", 1200)
    for metric, value, message in (
        ("flosp", 1, "did you mean 'flops'"),
        ("flops", 1.5, "pass an integer"),
        ("flops", True, "pass an integer"),
        ("flops", {"maxi": 1}, "pass {'max': 1200}"),
    ):
        with pytest.raises(ValueError, match="flo") as caught:
            make_limit(metric, value)
        assert message in str(caught.value)


def test_a_model_within_its_budget_passes(folder, capsys):
    (folder / "budget.yaml").write_text("models: {net: {flops: 144, parameters: {exact: 58}, unsupported: 0}}")
    assert check() == 0
    assert "net is within its budget (convention default)." in capsys.readouterr().out


@pytest.mark.parametrize("metric", [*NARROW, "memory"])
def test_each_metric_is_limited(metric, folder, capsys):
    value = NARROW.get(metric) or predict_memory(make_narrow()).peak
    for limit, code in ((value, 0), (value - 1, 1)):
        (folder / "budget.yaml").write_text(f"models: {{net: {{{metric}: {limit}}}}}")
        assert check() == code
    assert "OVER BUDGET: net costs more than allowed (convention default)." in capsys.readouterr().out


def test_a_model_over_its_budget_reports_by_how_much_and_where(folder, capsys):
    assert check("--update", "--depth", "1") == 0
    capsys.readouterr()
    assert check("--summary", "summary.md", model="net.py:wide") == 1
    output = capsys.readouterr().out
    rows = [line.split() for line in output.splitlines()]
    assert ["FLOPs", "max", "144", "288", "+144", "+100%", "OVER"] in rows
    modules = rows.index(["FLOPs", "of", "the", "modules", "that", "grew", "most"])
    grown = [["0", "96", "192", "+96", "+100%"], ["2", "48", "96", "+48", "+100%"], []]
    assert rows[modules + 3 : modules + 6] == grown
    operators = rows.index(["FLOPs", "of", "the", "operators", "that", "grew", "most"])
    assert rows[operators + 3 :] == [["linear", "144", "288", "+144", "+100%"]]
    summary = (folder / "summary.md").read_text()
    assert summary.startswith("### ❌ OVER BUDGET: net costs more")
    assert "| FLOPs | max | 144 | 288 | +144 | +100% | OVER |" in summary
    assert check("--summary", "summary.md") == 0
    assert (folder / "summary.md").read_text().startswith(summary + "### ✅ net is within")  # appended


def test_a_value_below_an_exact_limit_fails(folder, capsys):
    (folder / "budget.yaml").write_text("models: {net: {flops: {exact: 150}}}")
    assert check() == 1
    output = capsys.readouterr().out
    assert "OFF BUDGET: net differs from its exact budget" in output
    assert output.splitlines()[-1].split() == ["FLOPs", "exact", "150", "144", "-6", "-4%", "UNDER"]
    (folder / "budget.yaml").write_text("models: {net: {flops: {exact: 150, tolerance: 4%}}}")
    assert check() == 0


def test_unsupported_ops_exceed_a_budget_of_zero(folder, capsys):
    (folder / "budget.yaml").write_text("models: {net: {unsupported: 0}}")
    assert check(model="net.py:scan") == 1
    output = capsys.readouterr().out
    assert "Unsupported, so not counted: fvflops_check::scan (2 calls)." in output


def test_the_key_of_older_files_is_read_and_rewritten(folder, capsys):
    (folder / "budget.yaml").write_text("models:\n  net:\n    unknown: 5\n")
    assert load_budgets("budget.yaml")["net"].limits.keys() == {"unsupported"}
    assert check("--update") == 0
    assert (folder / "budget.yaml").read_text().startswith("models:\n  net:\n    unknown: 0\n")
    assert make_limit("unknown", 0).metric == "unsupported"
    with pytest.raises(TableError, match="unknown is an older name of unsupported, which net has too"):
        parse_budgets("models: {net: {unknown: 0, unsupported: 0}}", "budget.yaml")


def test_numbers_that_round_to_the_same_text_are_written_in_full(folder, capsys):
    (folder / "budget.yaml").write_text("models: {zoo:lenet5: {flops: 416_519}}")
    assert main(["check", "zoo:lenet5", "--budget", "budget.yaml"]) == 1
    assert "max    416,519  416,520          +1" in capsys.readouterr().out


def test_a_saved_trace_is_checked_without_memory(folder, capsys):
    (folder / "net.json").write_text(make_narrow().trace().to_json())
    assert check("--update", model="net.json") == 0
    limits = load_budgets("budget.yaml")["net"].limits
    assert {metric: limit.value for metric, limit in limits.items()} == {**NARROW, "bytes": BYTES, "unsupported": 0}
    (folder / "budget.yaml").write_text("models: {net: {memory: 1M}}")
    assert check(model="net.json") == 2
    assert "predicted from a model, not from a saved run" in capsys.readouterr().err


def test_the_table_is_that_of_the_budget(folder, capsys):
    (folder / "budget.yaml").write_text("table: exact\nmodels: {net: {flops: 342}}")
    assert check() == 0  # 2 flops a multiply-add, 30 for the bias, 24 for ReLU
    assert check("--table", "fvcore") == 2
    assert "argument --table: must be exact, as in the budget of net; got 'fvcore'" in capsys.readouterr().err


def test_invalid_arguments_are_reported_before_the_model_runs(folder, capsys, monkeypatch):
    monkeypatch.setattr("fvflops.cli.commands.check.open_analysis", lambda *_, **__: pytest.fail("the model ran first"))
    assert check() == 2
    assert "there is no budget file 'budget.yaml': --update creates it" in capsys.readouterr().err
    (folder / "budget.yaml").write_text("models: {nett: {flops: 1}}")
    assert check() == 2
    error = capsys.readouterr().err
    assert "budget.yaml has no model 'net': did you mean 'nett'? (--name or name= chooses one;" in error
    assert check("--summary", str(folder), name="nett") == 2
    assert "cannot be written" in capsys.readouterr().err
    assert check("--depth", "1") == 2
    assert "--depth applies to --update only" in capsys.readouterr().err
    (folder / "file").write_text("")
    assert main(["check", "net.py:narrow", "--budget", "file/budget.yaml", "--update"]) == 2
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("format", list(FORMATS))
def test_every_format_writes_the_verdict(format, folder, capsys):
    long = "a_projection_" + "of_a_long_name_" * 12
    for width in (8, 16):
        layers = OrderedDict([(long, torch.nn.Linear(4, width)), ("b", torch.nn.Linear(width, 2))])
        trace = FlopCountAnalysis(torch.nn.Sequential(layers), torch.ones(3, 4)).trace()
        (folder / f"{width}.json").write_text(trace.to_json())
    for arguments, code in (["--update", "--depth", "1"], 0), ([], 1):
        model = "8.json" if arguments else "16.json"
        assert check(*arguments, "--format", format, "--sort", "name", model=model, name=long) == code
        out = capsys.readouterr().out
        written = check_report(format, out, "budget_update" if arguments else "budget")
    if format == "csv":
        metrics = ["activations", "bytes", "flops", "macs", "parameters", "unsupported"]
        assert [row["metric"] for row in written] == metrics
        assert [(row["budget"], row["actual"]) for row in written][2:4] == [("144", "288")] * 2
    elif format == "json":
        grown = [(row["name"], row["before"], row["after"]) for row in written["modules"]]
        assert grown == [(long, 96, 192), ("b", 48, 96)]
    else:
        assert "OVER BUDGET" in written and "FLOPs of the modules that grew most" in written


WRITTEN = """# What our models may cost.
tolerance: 1%  # for all

models:
  net:  # the small one
    flops: 1.2K  # since May
    parameters: {exact: 57, tolerance: 0%}
    # of what runs in it
    modules:
      "0": 90
      removed: 7
  other: {flops: 1, macs: 2}
"""
REWRITTEN = """# What our models may cost.
tolerance: 1%  # for all

models:
  net:  # the small one
    flops: 144  # since May
    parameters: {exact: 58, tolerance: 0%}
    # of what runs in it
    modules:
      "0": 96
      "2": 48
    operators:
      linear: 144
  other: {flops: 1, macs: 2}
"""


def test_an_update_keeps_comments_and_lists_its_changes(folder, capsys):
    (folder / "budget.yaml").write_text(WRITTEN)
    os.chmod("budget.yaml", 0o640)
    assert check("--update") == 0
    title, _, *rows = capsys.readouterr().out.splitlines()
    assert title == "budget.yaml: net updated."
    assert [re.split(" {2,}", row) for row in rows] == [
        ["entry", "before", "after"],
        ["----------------", "------", "----------"],
        ["flops", "1.2K", "144"],
        ["parameters", "57", "58"],
        ["modules, removed", "7", "none"],
        ["modules, 0", "90", "96"],
        ["modules, 2", "none", "48"],
        ["operators", "1 recorded"],
    ]
    assert (folder / "budget.yaml").read_text() == REWRITTEN
    assert os.stat("budget.yaml").st_mode & 0o777 == 0o640
    assert sorted(os.listdir()) == ["budget.yaml", "net.py"] or "__pycache__" in os.listdir()
    assert check("--update") == 0
    assert capsys.readouterr().out == "budget.yaml: net is up to date.\n"
    assert (folder / "budget.yaml").read_text() == REWRITTEN


def test_an_update_writes_a_new_file_and_adds_a_model(folder, capsys):
    assert check("--update") == 0
    head = "budget.yaml: net added.\n\nentry        after\n-----------  -----\nflops        144\n"
    assert head in capsys.readouterr().out
    assert check("--update", "--table", "exact", model="net.py:wide", name="null: *x") == 0
    budgets = load_budgets("budget.yaml")
    assert list(budgets) == ["net", "null: *x"]
    assert {metric: budgets["net"].limits[metric].value for metric in NARROW} == NARROW
    assert budgets["null: *x"].table == "exact"
    assert check() == check(model="net.py:wide", name="null: *x") == 0


@pytest.mark.parametrize(
    "text",
    [
        "models: {net: {flops: 1, macs: 1}}",
        "models:\n  'net': {macs: '7',  flops: 1}\n",
        "models:\n    net:\n      macs: 1",
        "models: {net:\n {macs:\n 1}}",
    ],
    ids=["flow", "quoted", "wide", "several lines"],
)
def test_an_update_finds_each_metric(text):
    update = update_text(text, "budget.yaml", "net", {"flops": 1234, "macs": 12})
    limits = parse_budgets(update.text, "budget.yaml")["net"].limits
    assert {limit.value for limit in limits.values()} <= {1234, 12}
    assert limits["macs"].value == 12


@pytest.mark.parametrize(
    ("text", "models"),
    [
        ("", None),
        ("# ours\n", "# ours\nmodels:"),
        ("---\n", "---\nmodels:"),
        ("tolerance: 1%\n", "tolerance: 1%\nmodels:"),
        ("description: ours\n...\n", "description: ours\nmodels:"),
        ("models:\n", "models:"),
        ("models: {}  # none yet\ntolerance: 1%", "models:  # none yet"),
        ("models:\n\n  # none yet\ntolerance: 1%", "models:"),
    ],
)
def test_a_file_without_models_has_no_budget_and_an_update_adds_one(text, models, folder, capsys):
    (folder / "budget.yaml").write_text(text)
    assert check() == 2
    assert "budget.yaml has no model 'net': it has none" in capsys.readouterr().err
    assert check("--update") == check() == check("--update", name="other") == check(name="other") == 0
    assert list(load_budgets("budget.yaml")) == ["net", "other"]
    written = (folder / "budget.yaml").read_text()
    assert models is None or (f"{models}\n  net:\n    flops: 144\n" in written)
    assert all(line in written.splitlines() for line in text.splitlines() if "models" not in line)


def test_what_needs_lines_of_its_own_is_not_written_into_braces():
    with pytest.raises(TableError, match=r"budget.yaml:1: modules cannot be written here: write each metric of net on"):
        update_text("models: {net: {flops: 1}}", "budget.yaml", "net", {"flops": 5}, recorded={"modules": {"a": 1}})
    with pytest.raises(TableError, match="a model cannot be added here"):
        update_text("models: {net: {flops: 1}}", "budget.yaml", "other", {"flops": 5})
    with pytest.raises(TableError, match="a model cannot be added here"):
        update_text("{tolerance: 1%}", "budget.yaml", "other", {"flops": 5})


TESTS = """
import pytest
import torch
from torch import nn

def net(width=8):
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))

X = torch.ones(3, 4)

@pytest.mark.flops_budget(flops=144, parameters={"exact": 58}, unsupported=0)
def test_within(flops_budget):
    verdict = flops_budget(net(), X)
    assert verdict.results[0].value == 144

@pytest.mark.flops_budget(flops="0.144K", tolerance="1%")
def test_over(flops_budget):
    flops_budget(net(9), X)

@pytest.mark.flops_budget(flops=144)
def test_without_fixture():
    pass

@pytest.mark.flops_budget(flops=144)
def test_without_model(flops_budget):
    pass

@pytest.mark.flops_budget(flosp=144)
def test_mistake(flops_budget):
    flops_budget(net(), X)

def test_called(flops_budget):
    flops_budget(net(), X, macs=144)

def test_of_file(flops_budget):
    flops_budget(net(), X)
"""


@pytest.fixture
def project(pytester, monkeypatch):
    # The entry point may be installed or not: the tests name the plugin themselves.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(TESTS)
    pytester.makeini("[pytest]\naddopts = -p fvflops.integrations.pytest_plugin --strict-markers\n")
    return pytester


def test_the_plugin_fails_what_is_over_its_budget(project):
    (project.path / "flops_budget.yaml").write_text("models: {test_of_file: {flops: 100}}")
    result = project.runpytest_inprocess("-rA")
    result.assert_outcomes(passed=2, failed=4, errors=1)
    result.stdout.fnmatch_lines(
        [
            "OVER BUDGET: test_over costs more than allowed (convention default).",
            "FLOPs   max       144         1%     162         +18    +12.5%  OVER",
        ]
    )
    output = result.stdout.str()
    assert "marked flops_budget without using the fixture" in output
    assert "marked flops_budget without calling it" in output
    assert "unknown metric 'flosp': did you mean 'flops'?" in output
    assert "OVER BUDGET: test_of_file costs more" in output


def test_the_plugin_updates_the_file(project):
    file = project.path / "flops_budget.yaml"
    project.runpytest_inprocess("-k", "of_file").assert_outcomes(failed=1)  # there is no file
    project.runpytest_inprocess("-k", "of_file", "--flops-budget-update").assert_outcomes(passed=1)
    assert load_budgets(str(file))["test_of_file"].limits["flops"].value == 144
    file.write_text("# ours\nmodels:\n  test_of_file:\n    flops: 7  # so far\n")
    project.runpytest_inprocess("-k", "of_file").assert_outcomes(failed=1)
    project.runpytest_inprocess("-k", "of_file", "--flops-budget-update").assert_outcomes(passed=1)
    assert file.read_text() == "# ours\nmodels:\n  test_of_file:\n    flops: 144  # so far\n"
    # Limits in the test's marker are not in the file, so they are not updated.
    project.runpytest_inprocess("-k", "over", "--flops-budget-update").assert_outcomes(failed=1)


def test_the_plugin_imports_nothing_until_it_is_used(tmp_path):
    (tmp_path / "test_a.py").write_text("def test_a(flops_budget): pass")
    code = (
        "import sys, pytest; pytest.main(['--collect-only', '-q', '-p', 'fvflops.integrations.pytest_plugin', "
        "'-p', 'no:cacheprovider']); "
        "print([name for name in sys.modules if name.partition('.')[0] in ('torch', 'yaml')], "
        "'fvflops.integrations.pytest_plugin' in sys.modules)"
    )
    root = str(ROOT)
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": root}
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=tmp_path, check=True
    )
    assert "test_a.py::test_a" in completed.stdout
    assert completed.stdout.splitlines()[-1] == "[] True"


def test_the_entry_point_names_the_plugin():
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    name, _, module = settings["options.entry_points"]["pytest11"].strip().partition(" = ")
    assert name == "fvflops"
    assert callable(importlib.import_module(module).flops_budget)
