"""Rows and handles whose cost depends on the values of a list: offsets, lengths, group sizes."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from fvflops import FlopCountAnalysis, Trace, record_call
from fvflops.analysis.table_examples import WrongExample, check_examples
from fvflops.formulas import TableError, load_table
from tests.support.models.parts import Applied
from tests.support.table_folder import TableFolder

LIBRARY = torch.library.Library("value_rows", "DEF")
LIBRARY.define("attend(Tensor x, Tensor offsets, Tensor? lengths=None) -> Tensor")
for key in ("Meta", "CPU"):
    LIBRARY.impl("attend", lambda x, offsets, lengths=None: torch.empty_like(x), key)

ROW = """
extends: default
ops:
  value_rows::attend:
    values: [offsets, lengths]
    macs: "dot(differences(offsets), differences(offsets))*size(x, 1)"
    flops: "0 if is_none(lengths) else max(lengths) + sum(lengths) + lengths[-1] + len(lengths)"
    example: "10 3, 3 int64: 0 4 10, 2 int32: 5 2 -> 10 3 = 172"
  prim::PythonOp.Segments:
    values: [input_1]
    macs: "max(differences(input_1)) if is_known(input_1) else 1000"
    example: "10 3, 3 int64: 0 4 10 -> 10 3 = 6"
"""


class Attend(nn.Module):
    def forward(self, *tensors):
        return torch.ops.value_rows.attend(*tensors)


class Segments(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, offsets):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2, None


def call_segments(self, x, offsets):
    return Segments.apply(x, offsets)


@pytest.fixture
def table(tmp_path):
    return TableFolder(tmp_path)(ROW)


OFFSETS = ([0, 4, 10], [0, 0, 1, 10], [0, 10])


@pytest.mark.parametrize("execution", ["shapes", "real"])
def test_values_of_a_list(table, execution):
    """Calls with equal shapes have costs of their own, also from the caches."""
    for offsets in OFFSETS * 2:
        inputs = torch.ones(10, 3), torch.tensor(offsets), torch.tensor([5, 2], dtype=torch.int32)
        macs = sum(3 * (after - before) ** 2 for before, after in pairwise(offsets))
        assert FlopCountAnalysis(Attend(), inputs, table=table, execution=execution).total() == macs + 16
        assert FlopCountAnalysis(Attend(), inputs[:2], table=table, execution=execution).total() == macs


@pytest.mark.parametrize("execution", ["shapes", "real"])
@pytest.mark.parametrize("loss", [None, torch.sum])
def test_values_of_a_function(table, execution, loss):
    for offsets in OFFSETS:
        inputs = torch.ones(10, 3, requires_grad=True), torch.tensor(offsets)
        trace = record_call(Applied(call_segments), inputs, stops_at=table.stops_at, execution=execution, loss=loss)
        counts = FlopCountAnalysis.from_trace(trace, table=table).by_operator()
        assert counts["PythonOp.Segments"] == max(after - before for before, after in pairwise(offsets))


def test_unknown_values_are_unsupported(table):
    inputs = torch.ones(10, 3, device="meta"), torch.zeros(3, dtype=torch.int64, device="meta")
    analysis = FlopCountAnalysis(Attend(), inputs, table=table)
    assert (analysis.total(), dict(analysis.unsupported_ops())) == (0, {"value_rows::attend": 1})
    assert FlopCountAnalysis(Applied(call_segments), inputs, table=table).total() == 1000


def test_a_trace_keeps_values(table):
    inputs = torch.ones(10, 3), torch.tensor([0, 4, 10])
    trace = Trace.from_json(record_call(Attend(), inputs, stops_at=table.stops_at).to_json())
    assert FlopCountAnalysis.from_trace(trace, table=table).total() == 156
    # One recorded without the table has none: that is said, and never taken for zero.
    other = FlopCountAnalysis.from_trace(record_call(Attend(), inputs), table=table)
    assert other.unsupported_ops() == {"value_rows::attend": 1}


def test_a_handle_gets_the_values_of_lists():
    """Also if it is set after the run, and of its own op alone."""
    inputs = torch.ones(10, 3), torch.tensor([0, 4, 10])
    analysis = FlopCountAnalysis(Attend(), inputs)
    assert analysis.total() == 0
    assert analysis.set_op_handle("value_rows::attend", lambda call: max(call.tensor("offsets").values)).total() == 10
    other = FlopCountAnalysis(Attend(), inputs).set_op_handle("aten::mm", lambda call: 1)
    assert next(iter(other.trace().signatures)).inputs[1].values is None


def test_the_examples_hold(table):
    assert [problem for _, problem in check_examples(table)] == [None, None]


MISTAKES = {
    "values: [offset]": "values of value_rows::attend: no tensor offset: did you mean offsets",
    "values: offsets": r"values of value_rows::attend is the string 'offsets', not a list",
    'values: [offsets], example: "10 3, 3 int64: 0 4 -> 10 3 = 1"': "write one value for each element of a vector",
}


@pytest.mark.parametrize(
    ("values", "example", "message"),
    [
        ("", "3 int64: 0 4 10", r"values of offsets, which a recording does not keep: .* as values: \[offsets\]"),
        ("values: [lengths], ", "3 int64: 0 4 10", "values of offsets, which a recording does not keep"),
        ("values: [offsets], ", "3 float32: 0 4 10", "make them integers"),
        ("values: [offsets], ", "3 int64", "lacks values after a colon"),
    ],
)
def test_an_example_has_the_values_that_a_recording_keeps(tmp_path, values, example, message):
    row = f'{{{values}macs: "numel(x)*max(offsets)", example: "10 3, {example} -> 10 3 = 300"}}'
    ((_, problem),) = check_examples(TableFolder(tmp_path)(f"ops:\n  value_rows::attend: {row}"))
    with pytest.raises(WrongExample, match=message):
        raise problem


@pytest.mark.parametrize("text", MISTAKES)
def test_a_mistake_is_named(tmp_path, text):
    with pytest.raises(TableError, match=MISTAKES[text]):
        TableFolder(tmp_path)("ops:\n  value_rows::attend: {macs: '1', " + text + "}")


def test_modules_have_no_values(tmp_path):
    with pytest.raises(TableError, match="unknown key 'values'"):
        TableFolder(tmp_path)("modules:\n  torch.nn.LSTM: {macs: '1', values: [input]}")


def test_the_values_that_shipped_formulas_read_are_kept():
    assert "cu_seqlens_q" in load_table("default").stops_at.values_of("flash_attn::_flash_attn_varlen_forward")
