"""The catalogue: a page and a Parquet file from the results of sweeps."""

from fvflops.sweep import ModelCount
from fvflops.sweep.result_files import read_rows, write_rows
from tests.support.tools import load_tool

ROWS = [
    ModelCount("timm:b", 25_600_000, 4, 4_090_000_000, 11_100_000, 9, 115_000_000, inputs="float32[1, 3]", seconds=3),
    ModelCount("timm:a", 1, 2, 3, 4, 5, 6, built="num_hidden_layers=2", versions="torch 2"),
    ModelCount("timm:none", failure="timeout", error="stopped after 3 s"),
]


def test_models_are_listed_by_library_and_failures_are_left_out(tmp_path, capsys):
    tool = load_tool("catalogue.py")
    write_rows(str(tmp_path / "timm.csv"), ROWS)
    write_rows(str(tmp_path / "zoo.jsonl"), [ModelCount("zoo:c", 7)])
    page = tmp_path / "models.md"
    assert tool.main([str(tmp_path / "timm.csv"), str(tmp_path / "zoo.jsonl"), "--output", str(page)]) == 0
    text = page.read_text()
    assert text.index("## timm") < text.index("| timm:a |") < text.index("| timm:b |") < text.index("## zoo")
    assert "| timm:b | 25.6M | 4.09G | 11.1M | 115 MB | float32\\[1, 3\\] |" in text
    assert "counted smaller: timm:a (num_hidden_layers=2)" in text
    assert "timm:none" not in text
    assert "left out timm:none: timeout: stopped after 3 s" in capsys.readouterr().err
    assert read_rows(str(tmp_path / "models.parquet")).keys() == {"timm:a", "timm:b", "zoo:c"}


def test_other_files_are_refused(tmp_path, capsys):
    tool = load_tool("catalogue.py")
    assert tool.main([str(tmp_path / "missing.csv")]) == 2
    (tmp_path / "other.csv").write_text("a\n")
    assert tool.main([str(tmp_path / "other.csv")]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert "missing.csv: there is no such file: make it with tools/sweep.py" in errors[0]
    assert "other.csv is not from a sweep by this version of fvflops" in errors[1]
