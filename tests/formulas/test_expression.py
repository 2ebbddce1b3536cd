"""The pattern and the expression of a row: what they bind and compute, their errors, and that they run nothing."""

import ast
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fvflops.formulas import Call
from fvflops.formulas.language.expression import MAX_LENGTH, Expression, ExpressionError
from fvflops.formulas.language.pattern import Pattern, PatternError
from fvflops.trace import Symbol, TensorSpec
from tests.support.random_cases import random_cases

NAMES = {
    "x": TensorSpec((2, 3, 4)),
    "z": TensorSpec((5,), "complex64"),
    "i": TensorSpec((6,), "int64"),
    "scalar": TensorSpec(()),
    "sparse": TensorSpec((4, 4), layout="sparse_coo", nnz=3),
    "w": None,
    "n": 7,
    "p": 2.0,
    "training": True,
    "mode": "reduced",
    "dtype": Symbol("dtype", "float16"),
    "kernel_size": (3, 5),
    "tensors": (TensorSpec((2,)), None, TensorSpec((3, 4))),
    "dim": (0, -1),
    "size": (8, 9),
}

VALUES = {
    "n": 7,
    "-n + 10": 3,
    "n - -1": 8,
    "2*n + 3*4 - 1": 25,
    "n // 2": 3,
    "n % 4": 3,
    "14 / n": 2,
    "n**2": 49,
    "numel(x)": 24,
    "numel(scalar)": 1,
    "sum(numel(tensors))": 14,
    "nnz(sparse)": 3,
    "nnz(x)": 24,
    "numel(sparse)": 16,
    "size(x, 0) * size(x, -1)": 8,
    "prod(size(x, dim))": 8,
    "ndim(x)": 3,
    "prod(kernel_size)": 15,
    "kernel_size[0] + kernel_size[-1]": 8,
    "size[1]": 9,
    "len(tensors)": 3,
    "numel(tensors[2])": 12,
    "min(n, 3) + max(n, 3)": 10,
    "max(kernel_size)": 5,
    "log2(1)": 0,
    "log2(0)": 0,
    "log2(8)": 3,
    "log2(9)": 4,
    "5 if is_none(w) else 4": 5,
    "5 if is_none(x) else 4": 4,
    "1 if training and not is_none(x) else 0": 1,
    "1 if is_none(x) or p == 2 else 0": 1,
    "1 if 0 < n <= 7 else 0": 1,
    "1 if mode == 'reduced' else 2": 1,
    "1 if mode != 'reduced' else 2": 2,
    "1 if dtype == 'float16' else 2": 1,
    "1 if is_complex(z) else 0": 1,
    "1 if is_floating(x) and not is_floating(i) else 0": 1,
    "4 + training": 5,
    "1 if w == None else 0": 1,
    "1 if training == True else 0": 1,
    "n\n  + 1": 8,
    "10**8": 100_000_000,
}


@pytest.mark.parametrize("text", VALUES)
def test_an_expression_computes(text):
    assert Expression.parse(text).evaluate(NAMES) == VALUES[text]


# What is wrong → a part of the message, which always replays the expression.
MISTAKES = {
    "numl(x)": "unknown function numl .*did you mean numel",
    "frobnicate(x)": "unknown function frobnicate .*available are numel",
    "numel(xx)": "unknown name xx .did you mean x",
    "trainin": "unknown name trainin .did you mean training",
    "n // (7 - n)": "division by zero: 7 - n is 0",
    "n % 0": "division by zero",
    "n / 2": "7/2, which is not an integer",
    "3 - n": "the result is negative: -4",
    "n > 3": "the result is True, not an integer",
    "mode": "the result is 'reduced'",
    "p": "the result is 2.0",
    "p * 2": "p is 2.0, not an integer",
    "x": "the result is the tensor",
    "x + 1": r"x is a tensor, not a number .write numel\(x\)",
    "w + 1": r"w is None where a number is needed .check is_none\(w\)",
    "numel(w)": "w is None where a tensor is needed",
    "numel(n)": "n is 7, not a tensor",
    "sum(n)": "n is 7 where a list is needed",
    "sum(w)": "w is None where a list is needed",
    "prod(tensors)": r"tensors\[0\] is a tensor",
    "size(x, 3)": "x is 3-D: it has no size at 3",
    "numel(x, 1)": r"numel\(tensor\) does not fit numel\(x, 1\)",
    "size(x)": "does not fit",
    "kernel_size[2]": "kernel_size has 2 items",
    "n[0]": "n is 7 where a list is needed",
    "max(dim[0:0])": "is not allowed",
    "mode < 3": "have no order",
    "1 if x else 2": "neither true nor false",
    "10**9": "exponent 9 is not a constant from 0 to 8",
    "2**n": "exponent n is not a constant",
    "2**-1": "exponent -1",
    "(10**8)**8 * (10**8)**8 * (10**8)**8": "more than 512 bits",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_a_mistake_replays_the_expression(text):
    with pytest.raises(ExpressionError, match=MISTAKES[text]) as caught:
        Expression.parse(text).evaluate(NAMES)
    assert text in str(caught.value)


FORBIDDEN = [
    "__import__('os').system('true')",
    "x.shape",
    "().__class__.__bases__",
    "(lambda: 1)()",
    "[n for n in tensors]",
    "f'{n}'",
    "(n := 3)",
    "n = 3",
    "eval('1')",
    "max(*kernel_size)",
    "size(x, i=0)",
    "n in kernel_size",
    "n is None",
    "'text'",
    "1.5",
    "~n",
    "x[0:1]",
    "tensors[n]",
    "numel",
    "",
    "n # comment",
    "'\\x41' == mode",
    "n\u00b2",
    "await n",
]


@pytest.mark.parametrize("text", FORBIDDEN)
def test_what_is_not_in_the_whitelist_is_refused(text):
    with pytest.raises(ExpressionError):
        Expression.parse(text).evaluate(NAMES)


@pytest.mark.parametrize(
    "text",
    ["(" * 500 + ")" * 499, "-" * 900 + "1", "1+" * 400 + "1", "n" * (MAX_LENGTH + 1), "9" * 900, "not " * 200 + "n"],
)
def test_length_depth_and_size_are_bounded(text):
    with pytest.raises(ExpressionError):
        Expression.parse(text).evaluate(NAMES)


@pytest.mark.parametrize(
    "text", ["1if 1else 2", "n if 0in dim else 1", "1.if n else 2", "0xfor n", "f'{1if 1 else 2}'", "'''a'b'''1or'2'"]
)
def test_what_python_would_warn_of_is_refused_before(text, recwarn):
    with pytest.raises(ExpressionError):
        Expression.parse(text)
    assert not recwarn.list


def test_a_text_may_hold_what_a_number_may_not():
    assert Expression.parse("1 if mode == '2d' or mode != \"2d\" else 2").evaluate({"mode": "1d"}) == 1
    assert Expression.parse("size[1] + n1 + 1_000").evaluate({"size": (1, 2), "n1": 3}) == 1005


def test_names_are_the_free_ones():
    assert Expression.parse("numel(x) * size if training else max(size)").names == {"x", "size", "training"}


def test_a_branch_that_is_not_taken_is_not_computed():
    assert Expression.parse("numel(w) if not is_none(w) else 1").evaluate(NAMES) == 1
    assert Expression.parse("1 if is_none(w) or numel(w) else 2").evaluate(NAMES) == 1
    assert Expression.parse("1 if not is_none(w) and numel(w) else 2").evaluate(NAMES) == 2


@st.composite
def arithmetic(draw, depth=3):
    """Draw the text of an expression over the names a, b and c."""
    if depth == 0 or draw(st.booleans()):
        return draw(st.sampled_from(["a", "b", "c", "0", "1", "7"]))
    left, right = draw(arithmetic(depth=depth - 1)), draw(arithmetic(depth=depth - 1))
    form = draw(
        st.sampled_from(
            ["({} + {})", "({} - {})", "({} * {})", "({} // {})", "({} % {})", "min({}, {})", "max({}, {})"]
        )
    )
    return form.format(left, right)


@given(arithmetic(), st.integers(0, 50), st.integers(0, 50), st.integers(0, 50))
def test_arithmetic_is_that_of_python(text, a, b, c):
    try:
        expected = eval(
            compile(ast.parse(text, mode="eval"), "", "eval"), {"min": min, "max": max, "a": a, "b": b, "c": c}
        )
    except ZeroDivisionError:
        expected = -1
    if expected < 0:
        with pytest.raises(ExpressionError):
            Expression.parse(text).evaluate({"a": a, "b": b, "c": c})
    else:
        assert Expression.parse(text).evaluate({"a": a, "b": b, "c": c}) == expected


@random_cases(40)
@given(st.text(max_size=60))
def test_any_text_is_read_or_refused(text):
    try:
        value = Expression.parse(text).evaluate({})
    except ExpressionError as error:
        assert str(error).strip() and "\n" not in str(error)
    else:
        assert isinstance(value, int)


SCHEMA = "lib::op(Tensor a, Tensor? b, Tensor[] many, Tensor(x!) c, int n) -> Tensor"


def call(a=None, b=None, c=None):
    """Return a call with tensors of these shapes, None being no tensor."""
    arguments = {name: None if shape is None else TensorSpec(tuple(shape)) for name, shape in zip("abc", (a, b, c))}  # noqa: B905
    return Call("lib::op", {**arguments, "many": (), "n": 3}, (), SCHEMA)


BOUND = [
    ("m k, k n", ((2, 3), (3, 4), None), {"m": 2, "k": 3, "n": 4}),
    ("m k, k n", ((2, 3), (3, 4), (9, 9)), {"m": 2, "k": 3, "n": 4}),
    ("*b k, n k", ((2, 5, 3), (4, 3)), {"b": 10, "k": 3, "n": 4}),
    ("*b k, n k", ((3,), (4, 3)), {"b": 1, "k": 3, "n": 4}),
    ("*b m k, *b k n", ((2, 5, 3, 4), (10, 4, 6)), {"b": 10, "m": 3, "k": 4, "n": 6}),
    ("a *b c", ((2, 3, 4, 5),), {"a": 2, "b": 12, "c": 5}),
    ("_, m k", ((1,), (2, 3)), {"m": 2, "k": 3}),
    ("m, _, k", ((2,), None, (3,)), {"m": 2, "k": 3}),
    ("2 k", ((2, 3),), {"k": 3}),
    ("() , k", ((), (3,)), {"k": 3}),
    ("... k", ((4, 5, 3),), {"k": 3}),
    ("k ...", ((3,),), {"k": 3}),
    ("n n", ((4, 4),), {"n": 4}),
    ("rows cols", ((4, 5),), {"rows": 4, "cols": 5}),
    ({"c": "m k"}, (None, None, (2, 3)), {"m": 2, "k": 3}),
    ({"c": "m k", "a": "k"}, ((3,), None, (2, 3)), {"m": 2, "k": 3}),
]


@pytest.mark.parametrize(("text", "shapes", "bound"), BOUND, ids=[str(case[0]) for case in BOUND])
def test_a_pattern_binds(text, shapes, bound):
    assert Pattern.parse(text).match(call(*shapes)) == bound
    assert Pattern.parse(text).names == bound.keys()


MISFITS = [
    ("m k, k n", ((2, 3), (4, 5)), "k is 3, but 4 in b"),
    ("m k, k n", ((2, 3, 4), (4, 5)), "a is 3-D, not 'm k'"),
    ("*b m k", ((2,),), "a is 1-D"),
    ("*b k, *b", ((2, 3, 4), (5,)), "b is 6, but 5 in b"),
    ("2 k", ((3, 3),), "2 is 2, but 3 in a"),
    ("m, k", ((2,), None), "needs b, which is None"),
    ("() ", ((3,),), r"a is 1-D, not '\(\)'"),
    ("n n", ((4, 5),), "n is 4, but 5"),
    ("a, b, c, d", ((1,), (1,), (1,)), "names 4 tensors, and lib::op has 3"),
    ("_ k n", ((2, 3, 4),), "skips a tensor"),
    ({"mat": "m k"}, ((1,),), "names mat, which lib::op lacks"),
]


@pytest.mark.parametrize(("text", "shapes", "message"), MISFITS, ids=[str(case[0]) for case in MISFITS])
def test_a_misfit_replays_pattern_and_shapes(text, shapes, message):
    with pytest.raises(PatternError, match=message) as caught:
        Pattern.parse(text).match(call(*shapes))
    assert (text if isinstance(text, str) else "mat: m k") in str(caught.value)


def test_a_misfit_shows_every_shape():
    with pytest.raises(PatternError, match=r"does not match a \[2, 3\], b \[4, 5\], c None"):
        Pattern.parse("m k, k n").match(call((2, 3), (4, 5)))


@pytest.mark.parametrize(
    "text",
    ["", "m k,", "m k,, n", "m-k", "m *a *b", "*a ...", "m+1", "(m k)", "-1", "[m]", "m k; n", "9" * 19, "m " * 501],
)
def test_a_bad_pattern_is_replayed(text):
    with pytest.raises(PatternError, match="pattern"):
        Pattern.parse(text)


def test_a_number_stands_for_a_scalar_tensor():
    scaled = Call("lib::op", {"a": TensorSpec((2,)), "b": 0.5, "many": (), "c": None, "n": 3}, (), SCHEMA)
    assert Pattern.parse("k, ()").match(scaled) == {"k": 2}


@given(st.lists(st.integers(0, 5), max_size=5), st.integers(0, 5), st.integers(0, 5))
def test_a_star_binds_the_product_of_what_is_left(batch, k, n):
    assert Pattern.parse("*b k, n k").match(call([*batch, k], [n, k])) == {"b": math.prod(batch), "k": k, "n": n}
