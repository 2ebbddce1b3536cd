"""The expression: its values and errors, and that it runs nothing."""

import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fvflops.formulas.language.expression import MAX_LENGTH, Expression, ExpressionError
from fvflops.trace import Symbol, TensorSpec

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


@given(st.text(max_size=60))
def test_any_text_is_read_or_refused(text):
    try:
        value = Expression.parse(text).evaluate({})
    except ExpressionError as error:
        assert str(error).strip() and "\n" not in str(error)
    else:
        assert isinstance(value, int)
