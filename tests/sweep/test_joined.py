"""Files that are joined to models by name: what matches, what does not, and what a cell is."""

import sys

import pytest

from fvflops.cli import main
from fvflops.sweep.joined import join, parse_csv, read_joined


def match(rows, models):
    """Return model → the row that it was given, by its number, and the notes."""
    text = "name,value\n" + "".join(f'"{name}",{number}\n' for number, name in enumerate(rows))
    joined = join(parse_csv(text, "a.csv"), models)
    return {model: joined.cells_of(model)[0] for model in models}, joined


@pytest.mark.parametrize(
    "row, model",
    [
        ("timm:resnet50", "timm:resnet50"),
        ("resnet50", "timm:resnet50"),
        ("ResNet50", "timm:resnet50"),
        ("timm/resnet50", "timm:resnet50"),
        ("vit-b-16", "zoo:vit_b_16"),
        ("resnet50.a1_in1k", "timm:resnet50"),
        ("resnet50", "timm:resnet50.a1_in1k"),
        ("Llama-3.1-8B", "hf:meta-llama/Llama-3.1-8B"),
        ("meta-llama/Llama-3.1-8B", "hf:meta-llama/Llama-3.1-8B"),
        ("bert", "hf:models/bert/"),
        ("net.py:build", "models/net.py:build"),
        ("resnet50", "exports/resnet50.pt2"),
        ("hf:meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
    ],
)
def test_a_name_is_the_end_of_the_other(row, model):
    assert match([row], [model])[0] == {model: 0}


@pytest.mark.parametrize(
    "row, model",
    [
        ("resnet5", "timm:resnet50"),
        ("resnet50", "timm:resnet50d"),
        ("50", "timm:resnet50"),
        ("zoo:resnet50", "timm:resnet50"),
        ("other/Llama-3.1-8B", "hf:meta-llama/Llama-3.1-8B"),
        ("Llama-3", "hf:meta-llama/Llama-3.1-8B"),
        ("resnet50.a1_in1k", "timm:resnet50.a2_in1k"),
        ("timm", "timm:resnet50"),
        ("", "timm:resnet50"),
    ],
)
def test_other_names_do_not_match(row, model):
    found, joined = match([row, "x"], [model])
    assert found == {model: None} and joined.missing == (model,)
    assert f"a.csv has no row for {model}." in joined.notes


def test_the_nearest_row_is_taken():
    found, joined = match(["resnet50", "timm:resnet50", "zoo:resnet50"], ["timm:resnet50", "torchvision:resnet50"])
    assert found == {"timm:resnet50": 1, "torchvision:resnet50": 0}
    assert joined.notes == ("1 row of a.csv has no model: zoo:resnet50.",)
    found, _ = match(["resnet50.a2_in1k", "resnet50.a1_in1k"], ["timm:resnet50.a1_in1k"])
    assert found == {"timm:resnet50.a1_in1k": 1}


def test_what_is_ambiguous_has_no_row():
    found, joined = match(["resnet50.a2_in1k", "resnet50.a1_in1k"], ["timm:resnet50"])
    assert found == {"timm:resnet50": None}
    assert joined.notes == ("a.csv has several rows for timm:resnet50: resnet50.a2_in1k, resnet50.a1_in1k.",)
    found, joined = match(["gpt2", "gpt2"], ["zoo:gpt2"])
    assert found == {"zoo:gpt2": None} and joined.notes == ("a.csv has several rows for zoo:gpt2: gpt2, gpt2.",)
    # One accuracy does not fit two models.
    found, joined = match(["resnet50"], ["timm:resnet50", "torchvision:resnet50"])
    assert set(found.values()) == {None} and joined.missing == tuple(found)
    assert joined.notes == (
        "a.csv: the row resnet50 fits timm:resnet50, torchvision:resnet50: write their full names.",
    )
    assert match(["resnet50"], ["resnet50", "timm:resnet50"])[0] == {"resnet50": 0, "timm:resnet50": None}


def test_long_lists_of_names_are_cut():
    _, joined = match([f"m{number}" for number in range(1200)], ["zoo:x"])
    assert joined.notes[1] == "1,200 rows of a.csv have no model: m0, m1, m2, m3, m4 and 1,195 more."


def test_cells_are_numbers_text_or_nothing():
    rows = ("2015,76.13,23%,a,one,12345678901,1e-3", ",80.4,,-,two,5,NaN", ",-,7.25%,,three,n/a,2")
    text = "\n".join(["year, top1 ,err,note,MODEL,big,e", *rows])
    file = parse_csv("\ufeff" + text, "a.csv")
    assert [(column.key, column.is_text) for column in file.columns] == [
        ("year", False),
        ("top1", False),
        ("err", False),
        ("note", True),
        ("big", False),
        ("e", False),
    ]
    assert file.rows == (
        ("one", (2015, 76.13, 23, "a", 12345678901, 0.001)),
        ("two", (None, 80.4, None, None, 5, None)),
        ("three", (None, None, 7.25, None, None, 2)),
    )
    # One number format a column: the most decimals of any cell.
    assert [file.columns[1].show(value) for value in (76.13, 80.4)] == ["76.13", "80.40"]
    assert file.columns[4].show(12345678901) == "12.3G"


def test_lines_above_the_header_may_say_where_numbers_are_from():
    assert parse_csv("# a.csv\n# from a paper\nmodel,top1\nnet,1\n", "a.csv").rows == (("net", (1,)),)


@pytest.mark.parametrize(
    "content, message",
    [
        ("", "has 0 columns and 0 rows"),
        ("model,top1\n", "has 2 columns and 0 rows"),
        ("model\nresnet50\n", "has 1 column and 1 row"),
        ("model;top1\nresnet50;80.4\n", "has 1 column and 1 row"),
        ("model,top1\nresnet50,80.4,1\n", "row 1 has 3 cells, the header 2: 'resnet50,80.4,1'"),
        ("model,a,a\nx,1,2\n", "the header has two columns 'a'"),
        ("model,,a\nx,1,2\n", "the header has an empty cell"),
        (b"model,top1\nresnet50,\xff\n", "is not UTF-8 text"),
        ("model,top1\nx,1e400\n", "'1e400' is too large a number"),
    ],
)
def test_a_file_that_is_no_table_is_an_error(tmp_path, content, message):
    path = tmp_path / "a.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=r"a\.csv|1e400") as raised:
        read_joined(str(path))
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_other_files_are_refused(tmp_path, monkeypatch, capsys):
    with pytest.raises(ValueError, match=r"accuracy.xlsx: a table to join must be a .csv, .tsv or .parquet file"):
        read_joined("accuracy.xlsx")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ValueError, match=r"pyarrow is not installed: pip install 'fvflops\[parquet\]'"):
        (tmp_path / "accuracy.parquet").touch()
        read_joined(str(tmp_path / "accuracy.parquet"))
    assert main(["count", "zoo:lenet5", "--join", str(tmp_path / "none.csv")]) == 2
    assert "none.csv" in capsys.readouterr().err


def test_tabs_and_parquet(tmp_path):
    (tmp_path / "a.tsv").write_text("model\ttop1\nnet\t80.4\n")
    rows = read_joined(str(tmp_path / "a.tsv")).rows
    assert rows == (("net", (80.4,)),)
    arrow = pytest.importorskip("pyarrow", reason="pyarrow, of the extra `parquet`, is not installed")
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow, of the extra `parquet`, is not installed")
    parquet.write_table(arrow.table({"model": ["net", "two"], "top1": [80.4, None]}), tmp_path / "a.parquet")
    assert read_joined(str(tmp_path / "a.parquet")).rows == (("net", (80.4,)), ("two", (None,)))
    (tmp_path / "b.parquet").write_text("no")
    with pytest.raises(ValueError, match=r"b.parquet is not a Parquet file, or damaged: [^\n]*$"):
        read_joined(str(tmp_path / "b.parquet"))
