"""The pattern: its bindings, and errors where shapes do not fit."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fvflops.formulas import Call
from fvflops.formulas.language.pattern import Pattern, PatternError
from fvflops.trace import TensorSpec

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
