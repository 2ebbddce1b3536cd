"""The example of every row of every shipped table: each is run, without numbers, and must cost what it says."""

from dataclasses import replace

import pytest
import torch

from fvflops import load_table
from fvflops.analysis.table_examples import NotRunnable, WrongExample, check_example, check_examples, own_rows
from fvflops.formulas import shipped_tables
from fvflops.formulas.language.example import Example, ExampleError
from fvflops.trace import TensorSpec
from tests.support.old_torch import may_lack
from tests.support.schemas.library_schemas import define_library_schemas
from tests.support.schemas.torchvision_schemas import define_torchvision_schemas

ROWS = [
    pytest.param(table, row, id=f"{table}-{row.name}")
    for table in shipped_tables()
    for row in own_rows(load_table(table))
]


@pytest.fixture(scope="module", autouse=True)
def _libraries():
    define_torchvision_schemas()
    define_library_schemas()


@pytest.mark.parametrize(("table", "row"), ROWS)
def test_an_example_costs_what_it_says(table, row):
    assert row.example, f"{row.file}:{row.line}: {row.name} has no example"
    try:
        check_example(row, load_table(table))
        assert Example.parse(row.example).total > 0, "an example that costs nothing shows nothing"
    except NotRunnable as problem:
        if not may_lack(row.name):
            raise
        pytest.skip(f"torch {torch.__version__}: {problem}")


@pytest.mark.parametrize("change", [{"example": "4 5, 5 6 = 121"}, {"macs": "2*m*k*n"}, {"macs": "0"}])
def test_the_checker_sees_a_wrong_row(change):
    table = load_table("fvcore")
    row = table.rows["aten::mm"]
    check_example(row, table)
    with pytest.raises(WrongExample, match=r"fvflops://fvcore.yaml:\d+: aten::mm: the example .* costs \d+"):
        check_example(replace(row, **change), table)


def test_the_checker_sees_an_example_that_does_not_run():
    table = load_table("fvcore")
    with pytest.raises(NotRunnable, match=r"fvflops://fvcore.yaml:\d+: .*runs on no overload"):
        check_example(replace(table.rows["aten::mm"], example="4 5, 6 6 = 120"), table)


class Defined(torch.autograd.Function):
    """A function whose backward has no row."""


def test_the_examples_of_a_users_table_are_checked(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        'multiply_add: 2\nops:\n  aten::mm: {shapes: "m k, k n", macs: m*k*n, example: "4 5, 5 6 = 240"}\n'
        '  aten::gelu: {flops: 8*numel(out), example: "2 3 = 47"}\n'
        '  aten::bmm: {macs: numel(self)//0, example: "1 2 3, 1 3 4 = 24"}\n'
        '  aten::mv: {macs: numel(self), example: "2 3 load, 3 = 6"}\n'
        '  prim::PythonOp.Swish: {flops: 4*numel(out), example: "2 3 -> 2 3 = 24"}\n'
        '  prim::PythonOp.Bare: {flops: 4*numel(out), example: "2 3 = 24"}\n'
        '  prim::PythonOp.DefinedBackward: {flops: 4*numel(out), example: "2 3 -> 2 3 = 24"}\n'
    )
    problems = {row.name: problem for row, problem in check_examples(load_table(str(path)))}
    assert problems["aten::mm"] is None and problems["prim::PythonOp.Swish"] is None
    assert str(problems["prim::PythonOp.DefinedBackward"]).startswith(
        f"{path}:9: no autograd.Function is called DefinedBackward, so this row is not used: the backward of Defined"
    )
    assert "prim::PythonOp.Bare lacks the shapes of its results" in str(problems["prim::PythonOp.Bare"])
    assert "division by zero" in str(problems["aten::bmm"]) and str(problems["aten::bmm"]).startswith(f"{path}:5: ")
    assert str(problems["aten::mv"]) == f"{path}:6: this torch has no dtype 'load'"
    assert str(problems["aten::gelu"]) == f"{path}:4: aten::gelu: the example '2 3 = 47' costs 48"


def test_an_op_that_no_module_has_registered_is_reported_with_what_to_do(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text('ops:\n  unheardof_lib::scan: {flops: numel(u), example: "2 3 = 6"}\n')
    ((_, problem),) = check_examples(load_table(str(path)))
    assert str(problem) == (
        f"{path}:2: no op unheardof_lib::scan is registered: import the module that registers it "
        "(fvflops ops --import MODULE)"
    )


def test_inherited_examples_are_not_checked(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        'extends: fvcore\nmultiply_add: 2\nops:\n  aten::gelu: {flops: 8*numel(out), example: "2 3 = 48"}\n'
    )
    assert [(row.name, problem) for row, problem in check_examples(load_table(str(path)))] == [("aten::gelu", None)]


def test_an_example_says_tensors_lists_words_and_results():
    example = Example.parse(
        "2 3 int64, _, (), [4, 5 6], a=1, b=-0.5, c='x, y->z', d=[1, true], e=<7 8>, f=none -> 1; 2 = 9"
    )
    spec = TensorSpec((2, 3), "int64", "meta")
    assert example.tensors[:3] == (spec, None, TensorSpec((), "float32", "meta"))
    assert [item.shape for item in example.tensors[3]] == [(4,), (5, 6)]
    assert example.named["e"].shape == (7, 8)
    rest = {name: value for name, value in example.named.items() if name != "e"}
    assert rest == {"a": 1, "b": -0.5, "c": "x, y->z", "d": (1, True), "f": None}
    assert [item.shape for item in example.outputs] == [(1,), (2,)]
    assert example.total == 9


@pytest.mark.parametrize(
    "text",
    [
        *("4 5, 5 6", "4 5 = x", "4 5 = -1", "4 x = 1", "[4 5 = 1", "'a = 1"),
        *("a=1, a=2 = 3", "a=? = 1", "1 -> 2 -> 3 = 1", "4 5 = 1²", "[" * 450 + "]" * 450 + " = 1"),
    ],
)
def test_a_bad_example_is_replayed(text):
    with pytest.raises(ExampleError, match="example"):
        Example.parse(text)
