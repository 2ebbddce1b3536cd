"""`fvflops count` of several models: rows, columns, formats, the plot, and errors."""

import csv
import io
import re
import subprocess
import sys
from shutil import which

import pytest

from fvflops.cli import main
from fvflops.reports import count_json as json_report
from fvflops.reports.formats import FORMATS
from tests.support.checkout import ROOT
from tests.support.documentation.pages import texts_of
from tests.support.reports.report_formats import check_report, run

MODELS = (ROOT / "tests" / "support" / "models" / "factories.py").read_text()
ZOO = ("zoo:lenet5", "zoo:llama_tiny")


@pytest.fixture
def models(tmp_path):
    path = tmp_path / "my_models.py"
    path.write_text(MODELS)
    return str(path)


def rows_of(capsys, *argv, code=0):
    found, out, err = run(capsys, "count", *argv, "--format", "csv")
    assert found == code, err
    return {row["model"]: row for row in csv.DictReader(io.StringIO(out))}


def test_rows_are_the_counts_of_the_models_alone(capsys, models):
    names = (*ZOO, f"{models}:with_inputs", f"{models}:routed", f"{models}:empty")
    rows = rows_of(capsys, *names)
    assert list(rows) == list(names)
    for name, row in rows.items():
        code, out, _ = run(capsys, "count", name, "--format", "json")
        alone = json_report.parse(out)
        assert code == 0 and row["error"] == ""
        for column in ("parameters", "flops", "activations"):
            assert int(row[column]) == alone.columns[column].get("", 0), (name, column)
        code, out, _ = run(capsys, "count", name, "--by", "call", "--depth", "0", "--format", "csv")
        (call,) = [row for row in csv.DictReader(io.StringIO(out)) if row["module"] == ""]
        assert code == 0 and (row["bytes"], row["macs"]) == (call["bytes"], call["macs"])
    # A model whose control flow needs values has them, and the table says so.
    _, out, err = run(capsys, "count", *names[:2], f"{models}:routed", "--format", "markdown")
    assert err == "" and f"Counted in real execution: {models}:routed." in out
    assert rows[f"{models}:routed"]["execution"] == "real" and rows["zoo:lenet5"]["device"] == "meta"


def test_options_hold_for_each_model(capsys):
    options = ("--table", "exact", "--input", "2,3,96,96", "--train")
    rows = rows_of(capsys, "zoo:resnet50", "zoo:vit_b_16", "zoo:resnet50", *options, code=1)
    assert list(rows) == ["zoo:resnet50", "zoo:vit_b_16"]  # each once
    _, out, _ = run(capsys, "count", "zoo:resnet50", *options, "--format", "json")
    assert int(rows["zoo:resnet50"]["flops"]) == json_report.parse(out).columns["flops"][""]
    assert rows["zoo:vit_b_16"]["flops"] == "" and rows["zoo:vit_b_16"]["error"]
    assert rows["zoo:resnet50"]["table"] == "exact"


def test_patterns_name_models(capsys, tmp_path):
    assert list(rows_of(capsys, "zoo:l*y", "zoo:lenet5", "zoo:*5", "--columns", "flops")) == [
        "zoo:llama_tiny",
        "zoo:lenet5",
    ]
    assert list(rows_of(capsys, "zoo:lenet*")) == ["zoo:lenet5"]
    (tmp_path / "names.txt").write_text("zoo:lenet5\n# a comment\nzoo:l*y\n")
    assert list(rows_of(capsys, f"@{tmp_path / 'names.txt'}")) == ["zoo:lenet5", "zoo:llama_tiny"]
    code, out, err = run(capsys, "count", "zoo:nothing*", "zoo:lenet5")
    assert (code, out) == (2, "") and err.count("\n") == 1 and "zoo:nothing*" in err


@pytest.mark.parametrize("format", [*FORMATS, "paper"])
def test_each_format_names_the_rows_as_the_user_did(capsys, models, tmp_path, format):
    path = tmp_path / "accuracy.csv"
    path.write_text("model,top-1 (%),note\nlenet5,30.25,a_b & c%\nLLAMA-tiny,7.5,\nmy_models.py:unknown,,x\n")
    names = ("zoo:lenet5", "zoo:llama_tiny", f"{models}:unknown", f"{models}:broken")
    code, out, err = run(capsys, "count", *names, "--join", str(path), "--format", format)
    assert code == 1 and err.startswith("fvflops: warning: no row of ")
    assert "fvflops: error: 1 of 4 models not counted: " in err and "in the factory second line" in err
    assert err.count("\n") == 2
    content = check_report("markdown" if format == "paper" else format, out, "models")
    if format == "csv":
        assert [row["model"] for row in content] == list(names)
        assert [row["top-1 (%)"] for row in content] == ["30.25", "7.5", "", ""]
        assert content[2]["unsupported"] == "fvflops_factories::scan ×1" and content[3]["failure"] == "error"
        assert "seconds" not in content[0]
    elif format == "json":
        rows = content["tables"]["models"]["rows"]
        assert [row["model"] for row in rows] == list(names) and rows[0]["flops"] == 416520
        assert rows[3]["flops"] is None and "second line" in rows[3]["error"]
    elif format == "text":
        assert "zoo:llama_tiny" in out and "fvflops_factories::scan ×1" in out and "in the factory second line" in out
    else:
        lines = {"latex": r"zoo:llama\_tiny & ", "html": "<td class=text>zoo:llama_tiny</td>"}
        assert lines.get(format, "| zoo:llama_tiny | ") in out.replace('"', "")
        assert "not counted" in out.lower() and "::scan ×1" in out
        assert ("Params (" in out) == (format in ("latex", "paper"))


def test_columns_are_those_asked_for(capsys):
    code, out, _ = run(capsys, "count", *ZOO, "--columns", "memory, flops,error", "--format", "csv")
    lines = out.splitlines()
    assert code == 0 and lines[0] == "model,peak_memory,flops,error" and lines[1] == "zoo:lenet5,287592,416520,"
    _, out, _ = run(capsys, "count", "zoo:lenet5", "--columns", "inputs,device,seconds")
    assert out.splitlines()[0].split() == ["Model", "Inputs", "Device", "Time"]
    # Peak memory takes a second recording: it is not there unless asked for.
    assert rows_of(capsys, "zoo:lenet5", "--columns", "flops,peak_memory")["zoo:lenet5"]["peak_memory"] == "287592"


@pytest.mark.parametrize("convention", ["fvcore", "thop", "torch"])
def test_products_that_a_convention_ignores_are_noted_by_model(capsys, convention):
    argv = ["count", "zoo:lenet5", "zoo:llama_tiny", "zoo:mixtral_tiny", f"--convention={convention}"]
    code, out, _ = run(capsys, *argv)
    _, found, notes = out.partition("Matrix products that this convention ignores:\n")
    text = " ".join(notes.partition("\n\n")[0].split())
    assert code == 0 and found and "zoo:lenet5" not in text
    for row in rows_of(capsys, *argv[1:]).values():
        assert (row["ignored"] in text) is True
        assert bool(row["ignored"]) is (row["model"] != "zoo:lenet5")
    assert "zoo:llama_tiny: aten::" in text and "scaled_dot_product" in text
    assert "ignores" not in run(capsys, *argv[:-1])[1]


def test_rows_are_sorted_and_cut(capsys, models):
    linear = f"{models}:with_inputs"

    def names(*options):
        return list(rows_of(capsys, linear, *ZOO, "zoo:none", *options, code=1))

    assert names() == [linear, *ZOO, "zoo:none"]
    assert names("--sort", "flops") == ["zoo:llama_tiny", "zoo:lenet5", linear, "zoo:none"]
    assert names("--sort", "memory", "--columns", "macs", "--top", "1") == ["zoo:llama_tiny"]
    assert names("--top", "2") == ["zoo:llama_tiny", "zoo:lenet5"]
    assert names("--sort", "name") == [linear, "zoo:lenet5", "zoo:llama_tiny", "zoo:none"]
    code, out, err = run(capsys, "count", *ZOO, "zoo:none", "--top", "1")
    assert code == 1 and "2 more models." in out and "zoo:none: " in out and "zoo:none" in err


def test_one_model_alone_is_as_before(capsys):
    _, alone, _ = run(capsys, "count", "zoo:lenet5")
    assert alone.startswith("module ") and "features" in alone
    _, table, _ = run(capsys, "count", "zoo:lenet5", "--columns", "parameters,flops")
    assert table.splitlines()[:3] == [
        "Model       Parameters  FLOPs",
        "----------  ----------  -----",
        "zoo:lenet5       61.7K   417K",
    ]


def test_models_that_fail_leave_the_others(capsys, models):
    names = [f"{models}:{name}" for name in ("broken", "with_inputs", "exiting", "missing")]
    code, out, err = run(capsys, "count", *names)
    assert code == 1 and err.startswith("fvflops: error: 3 of 4 models not counted: ") and err.endswith(" ...\n")
    assert err.count("\n") == 1 and "ZeroDivisionError" in err
    for name in names:
        assert f"{name[-10:]}" in out.replace("\n    ", "")
    assert re.search(r"with_inputs +15 +24 ", out)
    code, out, err = run(capsys, "count", *names[2:])
    assert code == 1 and "SystemExit" in out and "–" in out


def test_a_wrong_configuration_is_one_error(capsys):
    code, out, err = run(capsys, "count", "transformers:BertModel", "transformers:GPT2Model", "--config", "none.json")
    assert (code, out, err) == (2, "", "fvflops: error: --config none.json: No such file or directory\n")


def test_a_saved_trace_is_a_row_like_its_model(capsys, tmp_path):
    path = str(tmp_path / "lenet5.json.gz")
    assert run(capsys, "count", "zoo:lenet5", "--save-trace", path)[0] == 0
    for table in ("default", "exact"):
        rows = rows_of(capsys, path, "zoo:lenet5", "--table", table)
        of_model = rows["zoo:lenet5"]
        lacking = {"model": path, "peak_memory": "", "device": "", "dtype": ""}
        assert rows[path] == {**of_model, **lacking} and of_model["flops"]
    damaged = tmp_path / "damaged.json"
    damaged.write_text("{}")
    rows = rows_of(capsys, str(damaged), path, "--train", code=1)
    assert rows[str(damaged)]["error"].startswith(f"{damaged} is a saved Trace and contains its inputs: omit --train")
    assert f"{damaged}: not a trace" in rows_of(capsys, str(damaged), path, code=1)[str(damaged)]["error"]


def test_strict_holds_for_each_model(capsys, models):
    names = (f"{models}:unknown", f"{models}:with_inputs")
    assert run(capsys, "count", *names)[0] == 0
    rows = rows_of(capsys, *names, "--strict", code=1)
    assert rows[names[0]]["error"] == "table 'default' has no formula for fvflops_factories::scan ×1 (--strict)"
    assert (rows[names[0]]["flops"], rows[names[0]]["parameters"]) == ("", "15")
    assert rows[names[1]]["flops"] == "24" and rows[names[1]]["error"] == ""


def test_a_plot_of_joined_accuracies(capsys, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="matplotlib, of the extra `plot`, is not installed")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(MODELS)
    (tmp_path / "a.csv").write_text("name,top1,ms\nnet.py:with_inputs,10,3\nlenet5,30,9\nllama-tiny,20,2\nvit,1,1\n")
    names = ("net.py:with_inputs", *ZOO)
    code, out, err = run(capsys, "count", *names, "--join", "a.csv", "--plot", "p.svg")
    assert (code, err) == (0, "")
    assert "Pareto front of flops and top1: net.py:with_inputs, zoo:lenet5.\n" in out
    assert "1 row of a.csv has no model: vit.\n" in out
    picture = (tmp_path / "p.svg").read_text()
    assert ">top1</text>" in picture and ">FLOPs (1 per multiply-add)</text>" in picture
    lower = ("--join", "a.csv", "--lower", "ms")
    code, out, _ = run(capsys, "count", *names, *lower, "--plot", "p.png", "--y", "ms")
    assert code == 0 and "Pareto front of flops and ms: net.py:with_inputs, zoo:llama_tiny.\n" in out
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    _, out, _ = run(capsys, "count", *names, *lower, "--plot", "p.svg", "--x", "ms", "--y", "top1")
    assert "Pareto front of ms and top1: zoo:llama_tiny, zoo:lenet5.\n" in out
    _, out, _ = run(capsys, "count", *names, "--plot", "p.svg", "--y", "memory", "--columns", "flops")
    assert "Pareto front of parameters and peak_memory: net.py:with_inputs.\n" in out
    assert ">Peak memory</text>" in (tmp_path / "p.svg").read_text()


def test_models_that_all_fail_have_no_plot(capsys, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="matplotlib, of the extra `plot`, is not installed")
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, "count", "zoo:a", "zoo:b", "--plot", "p.svg")
    assert code == 1 and "zoo:a: " in out and "No plot: no model has both parameters and flops." in out
    assert "fvflops: error: p.svg is not written: no model has both parameters and flops\n" in err
    assert "2 of 2 models not counted" in err and not list(tmp_path.iterdir())


def test_a_joined_column_may_have_the_name_of_another(capsys, tmp_path):
    (tmp_path / "results.csv").write_text("model,flops,error\nlenet5,7,x\n")
    row = rows_of(capsys, "zoo:lenet5", "--join", str(tmp_path / "results.csv"))["zoo:lenet5"]
    assert (row["flops"], row["joined_flops"], row["joined_error"], row["error"]) == ("416520", "7", "x", "")


@pytest.mark.skipif(which("pdflatex") is None, reason="no LaTeX is installed")
def test_latex_compiles(capsys, tmp_path):
    """Eight models of timm with accuracies, and names and cells that TeX would obey."""
    pytest.importorskip("timm", reason="timm is not installed")
    names = ("resnet18", "resnet26", "mobilenetv3_small_100", "efficientnet_b0", "deit_tiny_patch16_224")
    names = [f"timm:{name}" for name in (*names, "convnext_atto", "regnetx_002", "vit_tiny_patch16_224")]
    (tmp_path / "a&b_%#.py").write_text(MODELS)
    (tmp_path / "a.csv").write_text("model,top-1 (%),note_{}\nresnet18,71.5,$ & ^_~\\\nresnet26,75.3,\n")
    hostile = str(tmp_path / "a&b_%#.py")
    code, out, _ = run(
        capsys,
        *("count", *names, f"{hostile}:with_inputs", f"{hostile}:broken"),
        *("--join", str(tmp_path / "a.csv"), "--format", "latex"),
    )
    assert code == 1 and r"timm:efficientnet\_b0 & 5.29 & " in out
    document = rf"\documentclass{{article}}\usepackage{{booktabs}}\begin{{document}}{chr(10)}{out}\end{{document}}"
    (tmp_path / "table.tex").write_text(document)
    done = subprocess.run(["pdflatex", "-halt-on-error", "table.tex"], cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout.decode(errors="replace")[-800:]


def test_progress_is_shown_on_a_terminal(capsys, monkeypatch):
    shown = []
    monkeypatch.setattr("fvflops.cli.progress._MIN_SECONDS", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys.stderr, "write", shown.append)
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["count", "zoo:lenet5", "zoo:llama_tiny", "--columns", "flops"]) == 0
    assert "] model 0 of 2: zoo:lenet5" in shown[0] and re.search(r"model 1 of 2, about \d+ s left: zoo:l", shown[1])
    assert shown[2] == "\r\x1b[K"
    assert "Model" in capsys.readouterr().out


NEAR = "from torch.nn import Linear\n" + "".join(
    f"def m{width}():\n    return Linear(1000, {width})\n" for width in (1000, 1001, 1003)
)


def test_rows_have_the_labels_of_name_and_digits_that_tell_them_apart(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "near.py").write_text(NEAR)
    names = "near.py:m1000 near.py:m1001 --input 1,1000 --columns flops --name first=near.py:m1000"

    def rows(*options):
        code, out, err = run(capsys, "count", *names.split(), *options)
        assert (code, err) == (0, "")
        return [line.split() for line in out.splitlines()[2:4]]

    assert rows() == [["first", "1M"], ["near.py:m1001", "1.001M"]]
    assert rows("--digits", "2") == [["first", "1M"], ["near.py:m1001", "1M"]]


def test_ticks_of_near_models_differ(capsys, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="matplotlib, of the extra `plot`, is not installed")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "near.py").write_text(NEAR)
    models = [f"near.py:m{width}" for width in (1000, 1001, 1003)]
    code, _, err = run(
        capsys, "count", *models, "--input", "1,1000", "--plot", "p.svg", "--name", f"widest={models[2]}"
    )
    texts = texts_of(tmp_path / "p.svg")
    assert (code, err) == (0, "") and "widest" in texts
    ticks = [text for text in texts if re.fullmatch(r"[\d.]+M", text)]
    assert len(ticks) >= 6 and max(map(ticks.count, ticks)) == 2  # once on each axis
