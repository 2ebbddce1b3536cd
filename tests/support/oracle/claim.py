"""The claim: a program computes what an op computes, and the tables count what the program does."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fvflops import FlopCountAnalysis, FormulaTable, load_table
from fvflops.formulas.rows import COMPLEX_MULTIPLY_ADD
from tests.support.oracle.number import Tally, values

# A program takes a tally and the arguments of an op, tensors as nested lists of numbers.
Program = Callable[..., Any]

DEFAULT = load_table("default")
EXACT = load_table("exact")
# The same table at other prices, so that no elementary function can pass for another, nor for plain arithmetic.
_COSTS = {name: cost for name, cost in EXACT.constants.items() if name != COMPLEX_MULTIPLY_ADD}
WEIGHTED = replace(EXACT, constants={**EXACT.constants, **{name: 1009 + 2 * i for i, name in enumerate(_COSTS)}})

# One complex multiply-add is four real ones: `default` counts the one, the programs the four.
_COMPLEX = 4


def drawn(seed: int, *shape: int, low: float = -2.0, high: float = 2.0) -> torch.Tensor:
    numbers = torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return low + (high - low) * numbers


@dataclass
class Source:
    """A source of random tensors: one seed, one sequence."""

    seed: int
    generator: torch.Generator = field(init=False, repr=False)

    def __post_init__(self):
        self.generator = torch.Generator().manual_seed(self.seed)

    def __call__(self, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, dtype=dtype)


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


def check_product(
    program: Program,
    function: Callable[..., Any],
    *tensors: torch.Tensor,
    expected: Callable[..., Any] | None = None,
    products: bool = True,
    tolerance: float = 1e-9,
) -> Tally:
    """Assert that a program's result is torch's, its multiply-adds `default`'s and its tally `exact`'s.

    The program takes a tally and the tensors as nested lists of numbers; `function` takes the tensors. `expected`
    computes the result where the op has no kernel on a CPU. With `products=False` the op is no product to `default`,
    whose multiply-adds are not looked at. Returns the tally.
    """
    tally = Tally()
    mine = program(tally, *[_numbers(tally, tensor) for tensor in tensors])
    check_results(mine, (expected or function)(*[tensor.clone() for tensor in tensors]), tolerance)
    check_counts(tally, function, *tensors, products=products)
    return tally


def compare_results(mine, expected):
    """Assert that a program's numbers, rounded to its dtype, equal torch's tensor, or its several tensors."""
    pairs = [(mine, expected)] if isinstance(expected, torch.Tensor) else zip(mine, expected, strict=True)
    for own, other in pairs:
        own = torch.tensor(values(own), dtype=other.dtype).reshape(other.shape)
        torch.testing.assert_close(own, other, rtol=1e-7, atol=1e-9)


def check_results(mine: Any, expected: Any, tolerance: float) -> None:
    """Assert that nested numbers are a tensor, or that each of several is; None stands for one that is not made."""
    single = isinstance(expected, torch.Tensor)
    for own, other in [(mine, expected)] if single else zip(mine, expected, strict=True):
        if own is None or other is None:
            assert own is other is None
            continue
        dtype = torch.complex128 if other.is_complex() else torch.float64
        own = torch.tensor(values(own), dtype=dtype).reshape(other.shape)
        torch.testing.assert_close(own, other.to(dtype), rtol=tolerance, atol=tolerance)


def check_tally(tally: Tally, function: Callable[..., Any], *tensors: torch.Tensor) -> None:
    """Assert that the table `exact`, at its own prices and at others, counts what was done; and knows every op."""
    analysis = FlopCountAnalysis(function, tensors, table=EXACT)
    _check_total(analysis, tally, EXACT, "exact")
    weighted = FlopCountAnalysis.from_trace(analysis.trace(), table=WEIGHTED)
    _check_total(weighted, tally, WEIGHTED, "exact at other prices")


def check_counts(
    tally: Tally,
    function: Callable[..., Any],
    *inputs: Any,
    products: bool = True,
    default: FormulaTable = DEFAULT,
    exact: FormulaTable = EXACT,
) -> None:
    """Assert that `default` counts the multiply-adds of a tally, and `exact` all of it and every op of the function."""
    if products:
        macs = sum(entry.macs for entry in FlopCountAnalysis(function, inputs, table=default).counts().entries)
        times = _COMPLEX if any(isinstance(tensor, torch.Tensor) and tensor.is_complex() for tensor in inputs) else 1
        assert macs * times == tally.macs, f"default counts {macs} multiply-adds, the program did {dict(tally.done)}"
    _check_total(FlopCountAnalysis(function, inputs, table=exact), tally, exact, "exact")


def _check_total(analysis: FlopCountAnalysis, tally: Tally, table: FormulaTable, name: str) -> None:
    total, by_operator = analysis.total(), dict(analysis.by_operator())
    assert not analysis.unsupported_ops(), f"{name} leaves out {dict(analysis.unsupported_ops())}"
    did = tally.flops(dict(table.constants))
    assert total == did, f"{name} counts {total}, {by_operator}; the program did {did}, {dict(tally.done)}"


def _numbers(tally: Tally, tensor: torch.Tensor) -> Any:
    return tally.numbers(tensor) if tensor.is_floating_point() or tensor.is_complex() else tensor.tolist()
