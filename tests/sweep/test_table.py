"""The table of many models: its columns, the units of a paper's columns, its notes, and hostile names."""

import pytest

from fvflops import ModelCount
from fvflops.reports.document import Items
from fvflops.reports.formats import FORMATS, write_document
from fvflops.sweep.joined import join, parse_csv
from fvflops.sweep.model_count import COSTS
from fvflops.sweep.table_of_models import check_columns, list_columns, model_report, model_table
from tests.support.reports.hostile_names import NAMES
from tests.support.reports.report_formats import WIDTH, check_report


def count(model, size=1, **values):
    numbers = {"parameters": 2, "flops": 30, "macs": 15, "activations": 4, "bytes": 5, "peak_memory": 6}
    return ModelCount(model, **{**{key: size * number for key, number in numbers.items()}, **values})


HUGE = count("hf:meta-llama/Llama-3.1-405B", 2 * 10**15 + 1)
EMPTY = count("zoo:empty", 0)
FAILED = ModelCount("zoo:failed", failure="timeout", error="it took more than 60 s")


def notes_of(document):
    return [item for part in document.parts if isinstance(part, Items) for item in part.items]


def test_every_column_of_a_row_is_in_the_table():
    row = count("net", unsupported="a::b ×1", execution="shapes", inputs="float32[1]", device="meta", built="smaller")
    ((*cells,),) = model_table([row]).rows
    assert dict(zip([column.key for column in list_columns()], cells, strict=True)) == {
        column.key: getattr(row, column.key) for column in list_columns()
    }


def test_joined_columns_follow_the_costs():
    joined = join(parse_csv("model,top1,flops,note\nnet,80,7,x\n", "a.csv"), ["net", "other"])
    keys = [column.key for column in list_columns(joined)]
    assert COSTS[:5] == ("parameters", "flops", "macs", "activations", "bytes")
    end = 1 + len(COSTS)
    assert keys[: end + 4] == ["model", *COSTS, "top1", "joined_flops", "note", "unsupported"]
    first, second = model_table([count("net"), count("other")], joined).rows
    assert (first[end : end + 3], second[end : end + 3]) == ((80, 7, "x"), (None, None, None))
    assert check_columns(["joined_flops", "top1"], joined) == ["joined_flops", "top1"]


@pytest.mark.parametrize("format", FORMATS)
def test_any_name_is_a_row_in_any_format(format):
    rows = [count(name, unsupported=f"{name}::op ×1") for name in NAMES]
    rows += [ModelCount(f"{name}!", error=f"ValueError: {name}") for name in NAMES]
    file = parse_csv("model,top1\nnet,1\n", "a_&%.csv")
    document = model_report(rows, join=join(file, [row.model for row in rows]), paper=format == "latex")
    content = check_report(format, write_document(document, format, width=WIDTH).rstrip("\n") + "\n", "models")
    if format == "json":
        assert [row["model"] for row in content["tables"]["models"]["rows"]] == [row.model for row in rows]
    elif format == "csv":
        assert len(content) == len(rows)


@pytest.mark.parametrize("format", FORMATS)
def test_huge_empty_and_failed_models(format):
    rows = [count("modèle_日本語.py:réseau", 10**6), HUGE, EMPTY, FAILED]
    text = write_document(model_report(rows), format, width=WIDTH).rstrip("\n") + "\n"
    content = check_report(format, text, "models")
    if format == "json":
        (_, huge, empty, failed) = content["tables"]["models"]["rows"]
        assert huge["flops"] == HUGE.flops == 60_000_000_000_000_030  # a float would round it
        assert (empty["parameters"], failed["parameters"], failed["failure"]) == (0, None, "timeout")
    elif format == "csv":
        assert [row["flops"] for row in content] == ["30000000", "60000000000000030", "0", ""]
    else:
        assert "zoo:failed: it took more than 60 s" in text.replace("\\_", "_") and "–" in text
    if format == "text":
        lines = text.splitlines()
        assert lines[0].split() == ["Model", "Parameters", "FLOPs", "Activations", "Bytes", "Peak", "memory"]
        assert lines[3].split()[1:] == ["4000000.0B", "60P", "8P", "10", "PB", "12", "PB"]
        assert lines[4].split() == ["zoo:empty", "0", "0", "0", "0", "B", "0", "B"] and "日本語" in lines[2]


def headings(*rows):
    table = model_report(rows, columns=["parameters", "flops", "bytes", "peak_memory"], paper=True).tables()[0]
    return [column.heading for column in table.columns[1:]], table.texts()


def test_the_unit_of_a_papers_column_fits_most_values():
    assert headings(count("a", 10**6), count("b", 10**6), count("c", 10**8), EMPTY)[0] == [
        *("Params (M)", "FLOPs (M)", "Bytes (MB)", "Memory (MB)")
    ]
    # Three of four are 10^9 or more; a small one has decimals.
    units, texts = headings(count("a", 10**3), *(count(name, 10**9) for name in "bcd"))
    assert units == ["Params (B)", "FLOPs (G)", "Bytes (GB)", "Memory (GB)"]
    assert texts[0] == ["a", "0.00000200", "0.0000300", "0.00000500", "0.00000600"]
    assert texts[1] == ["b", "2.00", "30.0", "5.00", "6.00"]
    # K is the smallest unit; a column without values has the unit that is usual in papers.
    assert headings(count("a"))[0] == ["Params (K)", "FLOPs (K)", "Bytes (KB)", "Memory (KB)"]
    assert headings(FAILED)[0] == ["Params (M)", "FLOPs (G)", "Bytes (GB)", "Memory (MB)"]


def test_notes_name_the_convention_the_inputs_and_the_execution():
    rows = [
        *(count(name, inputs="float32[1, 3, 224, 224]", execution="shapes") for name in ("a", "b")),
        count("c", inputs="int64[1, 8]", execution="real"),
        count("d", inputs="int64[1, 9]", built="2 layers"),
        *(count(f"e{number}", inputs=f"int64[1, {20 + number}]") for number in range(5)),
    ]
    notes = notes_of(model_report(rows, "exact", notes=["More."]))
    assert notes == [
        "Convention: exact (2 FLOPs per multiply-add).",
        "Inputs: float32[1, 3, 224, 224]; int64[1, 8] (c); int64[1, 9] (d); int64[1, 20] (e0); int64[1, 21] (e1); "
        "3 more, which CSV and JSON list.",
        "Counted in real execution: c.",
        "Counted another model instead: d (2 layers).",
        "More.",
    ]
