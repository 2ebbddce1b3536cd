"""Result files in every format, and files that are refused."""

import json
import sqlite3

import pytest

from fvflops.sweep import ModelCount
from fvflops.sweep.result_files import ResultError, check_format, read_rows, write_rows
from fvflops.text import checksum

ROWS = [
    ModelCount("timm:b", 1, 2, 3, 0, None, 5, "aten::x ×2", "real", "float32[1]", "cpu", "float32", seconds=0.25),
    ModelCount("timm:a,\"b'", options='{"seq": 8}', failure="error", error="ValueError: a, b\u2028c | é"),
    ModelCount("zoo:big", flops=(1 << 63) - 1),
]
EXTENSIONS = (".parquet", ".csv", ".jsonl", ".sqlite")


@pytest.mark.parametrize("extension", EXTENSIONS)
def test_rows_are_read_as_they_were_written_sorted_by_model(extension, tmp_path):
    path = str(tmp_path / f"rows{extension}")
    assert read_rows(path) == {}
    write_rows(path, ROWS)
    assert list(read_rows(path).values()) == sorted(ROWS, key=lambda row: row.model)
    write_rows(path, ROWS[:1])
    assert list(read_rows(path)) == ["timm:b"]


def test_pandas_and_sqlite_read_the_types(tmp_path):
    pandas = pytest.importorskip("pandas")
    for extension in (".parquet", ".csv", ".sqlite"):
        write_rows(str(tmp_path / f"rows{extension}"), ROWS)
    frame = pandas.read_parquet(tmp_path / "rows.parquet")
    assert frame["flops"].tolist()[1] == 2
    assert frame["seconds"].dtype == "float64"
    assert pandas.read_csv(tmp_path / "rows.csv")["parameters"].sum() == 1
    with sqlite3.connect(tmp_path / "rows.sqlite") as database:
        assert database.execute("SELECT model, flops FROM models WHERE flops > 2").fetchall() == [
            ("zoo:big", (1 << 63) - 1)
        ]


@pytest.mark.parametrize("extension", EXTENSIONS)
def test_numbers_too_large_for_a_format_are_refused_and_the_file_stays(extension, tmp_path):
    path = str(tmp_path / f"rows{extension}")
    write_rows(path, ROWS)
    large = ModelCount("x", flops=1 << 63)
    if extension in (".csv", ".jsonl"):
        write_rows(path, [large])
        assert read_rows(path) == {"x": large}
        return
    with pytest.raises(ResultError, match=r"flops of x is 9,223,372,036,854,775,808, too large for"):
        write_rows(path, [large])
    assert len(read_rows(path)) == len(ROWS)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("rows.csv", "a,b\n1,2\n", "rows.csv is not from a sweep by this version of fvflops: it lacks activations"),
        ("rows.csv", "a,b\n", "it lacks activations"),
        ("rows.csv", "", "rows.csv is empty: restore it, or delete it"),
        ("rows.jsonl", "", "rows.jsonl is empty"),
        ("rows.csv", "model,flops", "rows.csv is truncated: its last line is incomplete"),
        ("rows.csv", "\ud8ff\n", "rows.csv is not UTF-8 text"),
        ("rows.csv", '"a"b\n', "rows.csv is not CSV"),
        ("rows.jsonl", "\ud8ff\n", "rows.jsonl is not UTF-8 text"),
        ("rows.jsonl", "[" * 100_000 + "\n", "rows.jsonl is not JSON Lines: it is nested too deeply"),
        ("rows.jsonl", '{"flops": Infinity}\n', "rows.jsonl is not JSON Lines: Infinity is not a JSON number"),
        ("rows.jsonl", "no\n", "rows.jsonl is not JSON Lines"),
        ("rows.jsonl", "[1]\n", "rows.jsonl is not JSON Lines of a sweep"),
        ("rows.parquet", "PAR", "rows.parquet is not a Parquet file"),
        ("rows.sqlite", "SQL", "rows.sqlite has no rows of a sweep"),
    ],
)
def test_other_files_are_refused(name, text, message, tmp_path):
    path = tmp_path / name
    path.write_text(text, errors="surrogatepass")
    with pytest.raises(ResultError, match=message):
        read_rows(str(path))


def test_rows_of_a_version_without_the_column_ignored_are_read(tmp_path):
    path = tmp_path / "rows.jsonl"
    write_rows(str(path), ROWS[:1])
    record = json.loads(path.read_text())
    del record["ignored"], record["checksum"]
    record["checksum"] = checksum(json.dumps(list(record.values()))) + "/1"
    path.write_text(json.dumps(record) + "\n")
    assert read_rows(str(path)) == {"timm:b": ROWS[0]}
    path.write_text(json.dumps(record | {"flops": 7}) + "\n")
    with pytest.raises(ResultError, match="the row of timm:b is damaged"):
        read_rows(str(path))


def test_a_row_with_more_cells_than_the_header_is_refused(tmp_path):
    path = tmp_path / "rows.csv"
    write_rows(str(path), ROWS[:1])
    path.write_text(path.read_text().rstrip("\n") + ",more\n")
    width = len(path.read_text().partition("\n")[0].split(","))
    with pytest.raises(ResultError, match=f"row 1 has {width + 1} cells, the header {width}"):
        read_rows(str(path))


def test_text_in_place_of_a_number_is_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    write_rows(str(path), ROWS[:1])
    path.write_text(json.dumps({**json.loads(path.read_text()), "flops": "many"}) + "\n")
    with pytest.raises(ResultError, match="flops is 'many', not a number"):
        read_rows(str(path))


def test_without_pyarrow_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    with pytest.raises(ValueError, match=r"pyarrow is not installed: pip install 'fvflops\[parquet\]'"):
        check_format("rows.parquet")
