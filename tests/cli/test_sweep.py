"""`fvflops sweep`: rows in files and on standard output, progress, and errors."""

import io
import json
from dataclasses import replace

import pytest

from fvflops.cli import main
from fvflops.cli.commands.sweep import SweepProgress
from fvflops.cli.progress import Progress
from fvflops.sources import SourceOptions
from fvflops.sweep import CountSettings, ModelCount, count_model
from fvflops.sweep.result_files import write_rows


def test_models_are_counted_with_the_options_of_the_command(tmp_path, capsys):
    """Standard output gets lines of JSON; a file that has the rows is continued."""
    output = str(tmp_path / "rows.sqlite")
    arguments = ["--workers", "1", "--input", "2,1,28,28", "--table", "exact", "--train"]
    assert main(["sweep", "zoo:lenet5", "zoo:none", "--output", "-", *arguments, "--import", "json"]) == 1
    rows = {row["model"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    expected = count_model("zoo:lenet5", SourceOptions(("2,1,28,28",)), CountSettings("exact", train=True))
    row = ModelCount(**rows["zoo:lenet5"])
    assert replace(row, seconds=0) == replace(expected, seconds=0) and rows["zoo:none"]["failure"] == "error"
    assert (row.table, row.inputs) == ("exact", "float32[2, 1, 28, 28]")
    assert json.loads(row.options) == {"inputs": ["2,1,28,28"], "train": True}
    write_rows(output, [row])
    assert main(["sweep", "zoo:lenet5", "--output", output, *arguments]) == 0
    assert capsys.readouterr().out.startswith("1 model: 1 counted, 1 of them earlier; ")
    assert main(["sweep", "zoo:lenet5", "--output", output, *arguments[:4]]) == 2
    error = "rows.sqlite has zoo:lenet5 counted with the table exact, not default: add --again"
    assert error in capsys.readouterr().err


def test_failures_of_an_earlier_sweep_are_shown_again(tmp_path, capsys):
    output = str(tmp_path / "rows.csv")
    rows = [ModelCount(f"zoo:{number}", table="default", failure="timeout", error="slow") for number in range(12)]
    write_rows(output, rows)
    assert main(["sweep", *(row.model for row in rows), "--output", output]) == 1
    shown = capsys.readouterr()
    assert shown.out.startswith("12 models: 0 counted, 12 failed (12 timeout), 12 of them earlier; ")
    assert shown.err.splitlines()[0] == "  zoo:0: timeout: slow"
    assert shown.err.splitlines()[-1] == f"  2 more: see the column error of {output}"


def test_the_rows_of_a_file_are_plotted_and_not_counted_again(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib", reason="matplotlib, of the extra `plot`, is not installed")
    monkeypatch.chdir(tmp_path)
    rows = [ModelCount(f"zoo:{name}", size, 10 * size, table="default") for size, name in enumerate("abc", start=1)]
    write_rows("rows.csv", [*rows, ModelCount("zoo:d", table="default", failure="timeout", error="slow")])
    (tmp_path / "top1.csv").write_text("model,top1\na,70\nb,60\nc,80\n")
    sweep = ["sweep", *(f"zoo:{name}" for name in "abcd"), "--output", "rows.csv", "--plot", "p.svg"]
    assert main(sweep) == 1  # one failed
    assert capsys.readouterr().out.splitlines()[1] == "Pareto front of parameters and flops: zoo:a."
    assert main([*sweep[:-2], "--join", "top1.csv"]) == 2
    assert "--join top1.csv has columns for a plot: add --plot" in capsys.readouterr().err
    assert main([*sweep, "--join", "top1.csv"]) == 1
    assert capsys.readouterr().out.splitlines()[1] == "Pareto front of flops and top1: zoo:a, zoo:c."
    assert ">top1</text>" in (tmp_path / "p.svg").read_text()
    assert main([*sweep, "--y", "memory"]) == 1
    assert "p.svg is not written: no model has both parameters and peak_memory" in capsys.readouterr().err
    assert main(["count", "rows.csv", "--plot", "p.svg"]) == 2
    assert (
        "rows.csv has the results of a sweep and is not a MODEL: to plot them, run the sweep again with"
        in capsys.readouterr().err
    )


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_shows_the_rate_the_failures_and_what_is_running(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    terminal, seconds = Terminal(), [0.0]
    progress = SweepProgress(4, terminal, clock=lambda: seconds[0])
    seconds[0] = 4.0
    progress.show_running(["timm:a", "timm:b"])
    progress.add(ModelCount("timm:a"))
    progress.add(ModelCount("timm:b", failure="timeout"))
    lines = terminal.getvalue().replace("\x1b[K", "").split("\r")
    assert lines[1] == "[------------------------------] model 0 of 4: timm:a, timm:b"
    assert lines[2] == "[#######-----------------------] model 1 of 4, about 12 s left, 0.2/s: timm:a, timm:b"
    assert lines[3] == "[###############---------------] model 2 of 4, about 4 s left, 0.5/s, 1 failed: timm:a, timm:b"


def test_progress_is_cut_at_the_width_of_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    terminal, seconds = Terminal(), [0.0]
    bar = Progress(terminal, clock=lambda: seconds[0])
    seconds[0] = 9.0
    bar.show(1, 2, note=": a very long name of a model")
    assert len(terminal.getvalue().replace("\x1b[K", "").lstrip("\r")) == 39
