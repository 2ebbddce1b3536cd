"""The einsum formulas, compared with the products that torch runs, with fvcore, and with numpy's printed text."""

import itertools
import random
import re
from types import SimpleNamespace

import numpy
import pytest
import torch
from fvcore.nn.jit_handles import einsum_flop_jit

from fvflops.capture.recorder.tensor_specs import describe_call
from fvflops.formulas import Call
from fvflops.formulas.registry import FORMULAS, find_formula
from fvflops.trace import TensorSpec
from tests.support.pricing_mode import Products


def random_einsum(seed):
    """Return an equation, shapes and perhaps a path: broadcasts, diagonals, ellipses, spaces, implicit outputs."""
    rng = random.Random(seed)
    count = rng.randint(1, 4)
    sizes = {letter: rng.choice([1, 2, 3, 4, 5, 0 if seed % 20 == 0 else 2]) for letter in "abcdeZ"}
    hidden = [rng.randint(1, 3), rng.randint(1, 3)]
    terms, shapes = [], []
    for _ in range(count):
        term = [rng.choice("abcdeZ") for _ in range(rng.randint(0, 4))]
        shape = [1 if rng.random() < 0.1 and term.count(letter) == 1 else sizes[letter] for letter in term]
        if rng.random() < 0.25:
            position, length = rng.randint(0, len(term)), rng.randint(0, 2)
            term.insert(position, "...")
            shape[position:position] = hidden[2 - length :]
        terms.append("".join(term))
        shapes.append(tuple(shape))
    equation = rng.choice([",", ", ", " , "]).join(terms)
    used = [letter for letter in sizes if any(letter in term for term in terms)]
    if rng.random() < 0.7:
        output = rng.sample(used, rng.randint(0, len(used)))
        if "..." in equation and rng.random() < 0.7:
            output.insert(rng.randint(0, len(output)), "...")
        equation += " -> " + "".join(output)
    path = None
    if rng.random() < 0.4 and count > 1:
        path = [index for left in range(count, 1, -1) for index in rng.sample(range(left), 2)]
    return equation, shapes, path


def einsum_cases(count):
    """Yield equations that torch accepts, with the signature of the call and the multiply-adds that ran."""
    found = 0
    for seed in itertools.count():
        if found == count:
            return
        equation, shapes, path = random_einsum(seed)
        tensors = [torch.empty(shape) for shape in shapes]
        operation = torch.ops.aten.einsum.default
        try:
            with torch.no_grad(), Products() as products:
                result = operation(equation, tensors, path=path)
        except RuntimeError:
            continue
        found += 1
        yield equation, shapes, describe_call(operation, (equation, tensors), {"path": path}, result), products.macs


def test_einsum_counts_the_products_of_its_path():
    worked = 0
    for equation, shapes, signature, macs in einsum_cases(400):
        assert find_formula("einsum")(Call.of(signature)).macs == macs, (equation, shapes)
        worked += macs > 0
    assert worked > 100


def jit_value(**answers):
    """Return a stand-in for a value of a traced graph, as fvcore's handle reads it."""
    value = SimpleNamespace(**{name: lambda answer=answer: answer for name, answer in answers.items()})
    value.type = value.node = lambda: value
    return value


def fvcore_einsum(equation, shapes):
    """Return fvcore's count of an einsum, which fvcore parses from the text that numpy prints."""
    tensors = [jit_value(isCompleteTensor=True, sizes=list(shape)) for shape in shapes]
    return einsum_flop_jit([jit_value(toIValue=equation), jit_value(inputs=tensors)], [])


def test_fvcore_einsum_is_the_number_that_numpy_prints():
    compared = 0
    for equation, shapes, signature, _ in einsum_cases(400):
        try:
            expected = fvcore_einsum(equation, shapes)
        except ValueError:  # numpy refuses a repeated output of broadcast sizes, which torch accepts
            continue
        assert find_formula("fvcore_einsum")(Call.of(signature)).macs == expected, (equation, shapes)
        compared += 1
    assert compared >= 300


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("bij,bik->bjk", [(7, 31, 37), (7, 31, 41)]),
        ("XYZ,XWZ->XWY", [(7, 31, 37), (7, 41, 37)]),
        ("ab,bc,cd->ad", [(300, 411), (411, 7), (7, 999)]),
        ("ab,cd,ef,gh,bc,de,fg->ah", [(2, 3), (4, 5), (6, 7), (8, 9), (3, 4), (5, 6), (7, 8)]),
        ("nqhd,nkhd->nhqk", [(2, 197, 12, 64), (2, 197, 12, 64)]),
        ("i,j,k->ijk", [(50,), (60,), (70,)]),
    ],
)
def test_fvcore_einsum_of_common_equations(equation, shapes):
    tensors = tuple(TensorSpec(shape) for shape in shapes)
    call = Call("aten::einsum", {"equation": equation, "tensors": tensors}, (TensorSpec(()),))
    assert find_formula("fvcore_einsum")(call).macs == fvcore_einsum(equation, shapes)


def test_fvcore_einsum_has_four_digits():
    spec = TensorSpec((1234, 5678))
    call = Call("aten::einsum", {"equation": "ab,ab->", "tensors": (spec, spec)}, (TensorSpec(()),))
    assert 1234 * 5678 == 7_006_652
    assert find_formula("fvcore_einsum")(call).macs == 7_005_000


@pytest.mark.parametrize("equation", ["ij", "ij,jk,kl", "ijk,jk", "i1,jk", "ij,jk->ij->k"])
def test_an_error_repeats_an_invalid_equation(equation):
    pair = (TensorSpec((2, 3)), TensorSpec((3, 4)))
    with pytest.raises(ValueError, match="equation"):
        FORMULAS["einsum"](Call("aten::einsum", {"equation": equation, "tensors": pair}, (TensorSpec(()),)))


def test_the_path_of_many_operands_is_found_quickly_or_refused():
    """Every product is within numpy's limit, so that all paths are tried, 10^9 for nine operands."""

    def cost(count):
        letters = "abcdefghijk"[:count]
        equation = ",".join(f"{letter}z" for letter in letters) + f"->{letters}"
        tensors = (TensorSpec((2, 3)),) * count
        call = Call("aten::einsum", {"equation": equation, "tensors": tensors}, (TensorSpec((2,) * count),))
        return find_formula("numpy_einsum")(call).flops

    letters = "abcdef"
    equation = ",".join(f"{letter}z" for letter in letters) + f"->{letters}"
    text = numpy.einsum_path(equation, *[numpy.empty((2, 3))] * 6, optimize="optimal")[1]
    assert cost(6) == float(re.search(r"Optimized FLOP count: *(\S+)", text)[1])
    assert cost(9) > cost(8) > cost(7)
    with pytest.raises(ValueError, match="einsum of 10 operands is not computed: at most 9"):
        cost(10)
