"""The JSON report: it comes back equal, and damaged text is refused with the reason."""

import json
from dataclasses import replace

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fvflops.reports import REPORTS
from fvflops.reports.count_json import OLD_WORDS, SCHEMA, SummaryError, parse
from fvflops.trace import ModuleInfo, ModuleTree, ParameterInfo, Summary, Symbol, TensorSpec

LINEAR = ModuleInfo("fc", "fc", "Linear", parameters=(ParameterInfo("fc.weight", TensorSpec((3, 2)), 0, True),))
NET = Summary(
    modules=ModuleTree({"": ModuleInfo("", "", "Net", children=(("fc", "fc"),)), "fc": LINEAR}),
    columns={"parameters": {"": 6, "fc": 6, "fc.weight": 6}, "flops": {"": 12, "fc": 12}},
    operators={"flops": {"linear": 12}},
    by_both={"flops": {"": {"linear": 12}, "fc": {"linear": 12}}},
    uncalled={"flops": frozenset()},
    ledger={
        "counted": {"aten::linear": 1},
        "zero_flop": {},
        "ignored": {"aten::sigmoid": 1},
        "unsupported": {"mylib::scan": 2},
    },
    unsupported_elements={"mylib::scan": 4096},
    about={"table": "default", "multiply_add": "1"},
)

COUNTS = st.dictionaries(st.text(max_size=5), st.integers(), max_size=3)
TABLE = st.dictionaries(st.text(max_size=5), COUNTS, max_size=3)


@st.composite
def make_summaries(draw):
    weight = ParameterInfo("a.w", TensorSpec((2, 3), "bfloat16", "cuda:0"), 0, draw(st.booleans()))
    attributes = {"size": 3, "eps": 1e-5, "nan": (1, float("inf")), "dtype": Symbol("dtype", "float32"), "none": None}
    places = {
        "": ModuleInfo("", "", draw(st.text()), children=(("a", "a"), ("b", "b"), ("gone", None))),
        "a": ModuleInfo("a", "a", "Linear", ("torch.nn.Linear",), "x\ny", False, (weight,), (weight,), attributes),
        "b": ModuleInfo("b", "a", "Linear"),
    }
    return Summary(
        modules=ModuleTree(places),
        columns=draw(TABLE),
        operators=draw(TABLE),
        by_both=draw(st.dictionaries(st.text(max_size=5), TABLE, max_size=2)),
        uncalled=draw(st.dictionaries(st.text(max_size=5), st.frozensets(st.text(max_size=5)), max_size=2)),
        ledger=draw(TABLE),
        unsupported_elements=draw(COUNTS),
        about=draw(st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3)),
    )


@given(summary=make_summaries())
def test_json_comes_back_equal_and_in_order(summary):
    again = parse(REPORTS["json"](summary))
    assert again == summary
    assert list(again.columns) == list(summary.columns)
    assert [list(column) for column in again.columns.values()] == [list(column) for column in summary.columns.values()]
    assert REPORTS["json"](again) == REPORTS["json"](summary)


def test_every_report_reads_the_same_after_json():
    again = parse(REPORTS["json"](NET))
    assert again == NET
    assert all(render(again) == render(NET) for render in REPORTS.values() if render.source == "summary")
    assert again != replace(NET, about={}), "the comparison sees a difference"


def test_the_words_of_schema_1_are_read():
    record = json.loads(REPORTS["json"](NET))
    old = {new: old for old, new in OLD_WORDS.items()}
    record = {old.get(key, key): value for key, value in record.items()} | {"schema": 1}
    record["ledger"] = {old.get(key, key): value for key, value in record["ledger"].items()}
    assert record["ledger"].keys() == {"counted", "free", "omitted", "unknown"} and "unknown_elements" in record
    assert parse(json.dumps(record)) == NET


def test_json_takes_the_numbers_of_numpy():
    counts = {"": numpy.int64(3), "a": numpy.float64(0.5)}
    assert parse(REPORTS["json"](Summary(NET.modules, {"flops": counts}))).columns == {"flops": {"": 3, "a": 0.5}}
    with pytest.raises(ValueError):
        REPORTS["json"](Summary(NET.modules, {"flops": {"": float("nan")}}))
    with pytest.raises(TypeError, match="JSON cannot represent"):
        REPORTS["json"](Summary(NET.modules, {"flops": {"": object()}}))


@given(data=st.data())
def test_damaged_json_is_refused_or_read_but_never_crashes(data):
    text = REPORTS["json"](NET)
    with pytest.raises(SummaryError):
        parse(text[: data.draw(st.integers(0, len(text) - 1))])
    start = data.draw(st.integers(0, len(text)))
    damaged = text[:start] + data.draw(st.text(max_size=3)) + text[start + data.draw(st.integers(0, 3)) :]
    try:
        read = parse(damaged)
    except SummaryError:
        return
    assert isinstance(read, Summary)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "fvflops.trace"}, 'has no "format": "fvflops.summary"'),
        ({"schema": SCHEMA + 1}, f"has schema {SCHEMA + 1}, but this version of fvflops reads up to {SCHEMA}"),
        ({"schema": True}, "has schema True"),
        ({"columns": []}, "columns is .* instead of an object"),
        ({"columns": {"flops": {"fc": "1"}}}, "columns, 'flops', 'fc' is '1' instead of a number"),
        ({"ledger": {"zero_flop": {"aten::t": True}}}, "ledger, 'zero_flop', 'aten::t' is True"),
        ({"uncalled": {"flops": [1]}}, "uncalled, 'flops' is .* instead of a list of strings"),
        ({"about": {"model": 3}}, "about is"),
        ({"modules": []}, "the root is missing"),
        ({"modules": [{"name": ""}]}, "its modules: KeyError: 'classes'"),
        ({"modules": 3}, "its modules: TypeError"),
        (None, "lacks 'about'"),
    ],
)
def test_damaged_json_is_refused_with_the_reason(change, message):
    record = json.loads(REPORTS["json"](NET))
    if change is None:
        del record["about"]
    else:
        record.update(change)
    with pytest.raises(SummaryError, match=message):
        parse(json.dumps(record))


@pytest.mark.parametrize(
    "text", ["", "[]", "null", '"fvflops.summary"', "[" * 10**5, "NaN", '{"format": "fvflops.summary"}']
)
def test_other_text_is_refused(text):
    with pytest.raises(SummaryError):
        parse(text)
