"""The product claim: a program computes what an op computes, and the tables count its multiply-adds and all it does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from fvflops import FlopCountAnalysis, FormulaTable
from fvflops.formulas import load_table
from tests.oracle.number import Tally, values

EXACT = load_table("exact")
DEFAULT = load_table("default")

# One complex multiply-add is four real ones: `default` counts the one, the programs the four.
_COMPLEX = 4


@dataclass
class Source:
    """A source of random tensors: one seed, one sequence."""

    seed: int
    generator: torch.Generator = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)

    def __call__(self, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, dtype=dtype)


def check_product(
    program: Callable[..., Any],
    function: Callable[..., Any],
    *tensors: torch.Tensor,
    expected: Callable[..., Any] | None = None,
    products: bool = True,
    tolerance: float = 1e-9,
) -> Tally:
    """Assert that a program's result is torch's, its multiply-adds those of `default` and its tally that of `exact`.

    The program takes a tally and the tensors as nested lists of numbers; `function` takes the tensors. `expected`
    computes the result where the op has no kernel on a CPU. With `products=False` the op is no product to `default`,
    whose multiply-adds are not looked at. Returns the tally.
    """
    tally = Tally()
    mine = program(tally, *[_as_numbers(tally, tensor) for tensor in tensors])
    check_results(mine, (expected or function)(*[tensor.clone() for tensor in tensors]), tolerance)
    check_counts(tally, function, *tensors, products=products)
    return tally


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
    analysis = FlopCountAnalysis(function, inputs, table=exact)
    total, by_operator = analysis.total(), dict(analysis.by_operator())
    assert not analysis.unsupported_ops(), f"exact leaves out {dict(analysis.unsupported_ops())}"
    did = tally.flops(dict(exact.constants))
    assert total == did, f"exact counts {total}, {by_operator}; the program did {did}, {dict(tally.done)}"


def _as_numbers(tally: Tally, tensor: torch.Tensor) -> Any:
    return tally.numbers(tensor) if tensor.is_floating_point() or tensor.is_complex() else tensor.tolist()
