"""The claim: a program computes what an op computes, and a table counts what the program does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from hypothesis import settings

from fvflops import FlopCountAnalysis, load_table
from fvflops.formulas.row import COMPLEX_MULTIPLY_ADD
from tests.oracle.number import Tally, values

# A program takes a tally and the arguments of an op, tensors as nested lists of numbers.
Program = Callable[..., Any]

EXACT = load_table("exact")
# The same table at other prices, so that no elementary function can pass for another, nor for plain arithmetic.
_COSTS = {name: cost for name, cost in EXACT.constants.items() if name != COMPLEX_MULTIPLY_ADD}
WEIGHTED = replace(EXACT, constants={**EXACT.constants, **{name: 1009 + 2 * i for i, name in enumerate(_COSTS)}})

random_cases = settings(max_examples=20, derandomize=True, deadline=None, database=None)


def drawn(seed: int, *shape: int, low: float = -2.0, high: float = 2.0) -> torch.Tensor:
    """Return a tensor of random numbers between two bounds."""
    numbers = torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return low + (high - low) * numbers


def check_claim(program: Program, function: Callable[..., Any], *tensors: torch.Tensor, compare: bool = True) -> None:
    """Assert that a program's result is torch's, and its tally what the table `exact` counts for the function.

    The program gets the tensors that hold floating-point or complex numbers as counting numbers, others as plain lists.
    With `compare=False`, where torch draws random numbers or nothing is computed, results are not compared.
    """
    tally = Tally()
    mine = program(tally, *[_numbers(tally, tensor) for tensor in tensors])
    if compare:
        compare_results(mine, function(*[tensor.clone() for tensor in tensors]))
    check_tally(tally, function, *tensors)


def compare_results(mine: Any, expected: Any) -> None:
    """Assert that a program's numbers are those of torch's tensor, or of its several tensors."""
    pairs = [(mine, expected)] if isinstance(expected, torch.Tensor) else zip(mine, expected, strict=True)
    for own, other in pairs:
        own = torch.tensor(values(own), dtype=other.dtype).reshape(other.shape)
        torch.testing.assert_close(own, other, rtol=1e-7, atol=1e-9)


def check_tally(tally: Tally, function: Callable[..., Any], *tensors: torch.Tensor) -> None:
    """Assert that the table `exact`, at its own prices and at others, counts what was done; and knows every op."""
    analysis = FlopCountAnalysis(function, tensors, table=EXACT)
    weighted = FlopCountAnalysis.from_trace(analysis.trace(), table=WEIGHTED)
    assert not analysis.unsupported_ops(), f"the table leaves out {dict(analysis.unsupported_ops())}"
    done = f"{dict(tally.done)}, the table counts {dict(analysis.by_operator())}"
    assert analysis.total() == tally.flops(dict(EXACT.constants)), f"the program did {done}"
    assert weighted.total() == tally.flops(dict(WEIGHTED.constants)), f"at other prices; the program did {done}"


def _numbers(tally: Tally, tensor: torch.Tensor) -> Any:
    return tally.numbers(tensor) if tensor.is_floating_point() or tensor.is_complex() else tensor.tolist()
