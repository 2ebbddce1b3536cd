"""The example of every row of every shipped table: each is run, without numbers, and must cost what it says."""

from dataclasses import replace

import pytest
import torch

from fvflops import paths
from fvflops.capture.signature import describe, describe_call
from fvflops.formulas import Call, Row, load_table
from fvflops.formulas.example import Example, ExampleError
from fvflops.formulas.row import price_call
from fvflops.trace import Signature, Status, TensorSpec
from fvflops.trace.signature import packet_of
from tests.torchvision_schemas import define_torchvision_schemas

TABLES = [uri.removeprefix(paths.SCHEME).removesuffix(".yaml") for uri in paths.shipped_files()]
ROWS = [
    pytest.param(table, row, id=f"{table}-{row.name}")
    for table in TABLES
    for row in load_table(table).rows.values()
    if row.kind == "counted"
]


# The torch that the tables are written for; an older one lacks some ops, or their kernels for the meta device.
WRITTEN_FOR = (2, 13)
OLDER = tuple(map(int, torch.__version__.split(".")[:2])) < WRITTEN_FOR


class NotHere(AssertionError):
    """An example that this torch cannot run."""


def build(given):
    """Return the argument that a part of an example stands for, tensors on the meta device."""
    if isinstance(given, TensorSpec):
        return torch.empty(given.shape, dtype=getattr(torch, given.dtype), device="meta")
    return [build(item) for item in given] if isinstance(given, tuple) else given


def bind(schema, example):
    """Return argument name -> value for one overload, or None where the example does not fit its arguments."""
    tensors = [a.name for a in schema.arguments if str(a.type) in ("Tensor", "Optional[Tensor]", "List[Tensor]")]
    names = {argument.name for argument in schema.arguments}
    free = [name for name in tensors if name not in example.named]
    if not example.named.keys() <= names or len(example.tensors) > len(free):
        return None
    values = dict(zip(free, map(build, example.tensors), strict=False))
    return values | {name: build(value) for name, value in example.named.items()}


def overloads_of(op):
    """Return the overloads that a row's name stands for, those that write to an `out` left out."""
    namespace, _, name = packet_of(op).partition("::")
    packet = getattr(getattr(torch.ops, namespace), name, None)
    if packet is None:
        raise NotHere(f"this torch has no {op}")
    found = [getattr(packet, overload) for overload in packet.overloads() if not overload.endswith("out")]
    return [overload for overload in found if op in (packet_of(overload.name()), overload.name())]


def call_of(op, text):
    """Return the signature of the call that an example says, made by running the op unless the results are given."""
    example = Example.parse(text)
    outputs = None if example.outputs is None else tuple(map(build, example.outputs))
    if op.startswith("higher_order::"):
        return Signature(op, (), tuple(map(describe, map(build, example.tensors))), tuple(map(describe, outputs)))
    problems = []
    for overload in overloads_of(op):
        values = bind(overload._schema, example)
        if values is None:
            problems.append(f"its arguments do not fit {overload._schema}")
            continue
        names = [argument.name for argument in overload._schema.arguments]
        if outputs is not None:
            return describe_call(overload, [values.get(name) for name in names], {}, outputs)
        try:
            return describe_call(overload, (), values, overload(**values))
        except (RuntimeError, NotImplementedError) as error:
            problems.append(f"{overload} raised {error}")
    raise NotHere(f"the example {text!r} of {op} runs on no overload: {problems}")


def check(row: Row, multiply_add: int) -> None:
    """Raise AssertionError where a row's example is missing or does not cost what it says."""
    assert row.example, f"{row.file}:{row.line}: {row.name} has no example"
    price = price_call(row, Call.of(call_of(row.name, row.example)))
    total = multiply_add * price.macs + price.flops
    expected = Example.parse(row.example).total
    assert total == expected, f"{row.file}:{row.line}: {row.example!r} of {row.name} costs {total}"
    assert price.status is Status.COUNTED
    assert total > 0, f"{row.file}:{row.line}: an example of {row.name} that costs nothing shows nothing"


@pytest.fixture(scope="module", autouse=True)
def _torchvision():
    define_torchvision_schemas()


@pytest.mark.parametrize(("table", "row"), ROWS)
def test_an_example_costs_what_it_says(table, row):
    try:
        check(row, load_table(table).multiply_add)
    except NotHere as problem:
        if not OLDER:
            raise
        pytest.skip(f"torch {torch.__version__}: {problem}")


@pytest.mark.parametrize("change", [{"example": "4 5, 5 6 = 121"}, {"example": ""}, {"macs": "2*m*k*n"}, {"macs": "0"}])
def test_the_checker_sees_a_wrong_row(change):
    row = load_table("fvcore").rows["aten::mm"]
    check(row, 1)
    with pytest.raises(AssertionError, match=r"fvflops://fvcore.yaml:\d+: "):
        check(replace(row, **change), 1)


def test_the_checker_sees_an_example_that_does_not_run():
    row = load_table("fvcore").rows["aten::mm"]
    with pytest.raises(AssertionError, match="runs on no overload"):
        check(replace(row, example="4 5, 6 6 = 120"), 1)


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
    ["4 5, 5 6", "4 5 = x", "4 5 = -1", "4 x = 1", "[4 5 = 1", "'a = 1", "a=1, a=2 = 3", "a=? = 1", "1 -> 2 -> 3 = 1"],
)
def test_a_bad_example_is_replayed(text):
    with pytest.raises(ExampleError, match="example"):
        Example.parse(text)
