"""The claim: a program computes what an op computes, and the tables count what the program does."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st

from fvflops import FlopCountAnalysis, load_table, record_call
from fvflops.formulas.rows import COMPLEX_MULTIPLY_ADD
from fvflops.trace import Signature
from tests.support.models.parts import Applied
from tests.support.oracle.number import Tally, each, values

DEFAULT = load_table("default")
EXACT = load_table("exact")
# The same table at other prices, so that no elementary function can pass for another, nor for plain arithmetic.
_PRICES = EXACT.constants.keys() - {COMPLEX_MULTIPLY_ADD, "attention_skips_masked"}
WEIGHTED = replace(
    EXACT, constants={**EXACT.constants, **{name: 1009 + 2 * i for i, name in enumerate(sorted(_PRICES))}}
)

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


sources = st.builds(Source, st.integers(0, 9999))


def check_claim(program, function, *tensors, expected=None, compare=True, products=False, tolerance=1e-07):
    """Assert that a program's result is torch's, and its tally what the table `exact` counts; return the tally.

    The program takes a tally and the tensors; floating-point and complex ones are arrays of counting numbers.
    `expected` computes the result where the op has no kernel on a CPU; with `compare=False` results are not compared,
    as where torch draws random numbers. With `products`, `default` counts the multiply-adds.
    """
    tally = Tally()
    counted = [tensor.is_floating_point() or tensor.is_complex() for tensor in tensors]
    arrays = [tally.numbers(t) if counts else t.numpy() for t, counts in zip(tensors, counted, strict=True)]
    mine = program(tally, *arrays)
    if compare:
        check_results(mine, (expected or function)(*[tensor.clone() for tensor in tensors]), tolerance)
    check_counts(tally, function, *tensors, products=products)
    return tally


check_product = partial(check_claim, products=True)


def check_each(step: Callable[..., Any], function: Callable[..., Any], *tensors: torch.Tensor, **options: Any) -> None:
    """Check the claim of a program that does a step with each element."""
    check_claim(lambda _, *operands: each(step, *operands), function, *tensors, **options)


def check_all(claims: dict[Callable[..., Any], Callable[..., Any]], *tensors: torch.Tensor) -> None:
    """Check the claim of each function and step."""
    for function, step in claims.items():
        check_each(step, function, *tensors)


def check_results(mine: Any, expected: Any, tolerance: float = 1e-7) -> None:
    """Assert that numbers, rounded to its dtype, are a tensor, or that each of several is; None is one not made."""
    single = isinstance(expected, torch.Tensor)
    for own, other in [(mine, expected)] if single else zip(mine, expected, strict=True):
        if own is None or other is None:
            assert own is other is None
            continue
        own = torch.tensor(values(own), dtype=other.dtype).reshape(other.shape)
        torch.testing.assert_close(own, other.detach(), rtol=tolerance, atol=tolerance / 100)


def check_counts(tally, function, *inputs, products=True, default=DEFAULT, exact=(EXACT, WEIGHTED)):
    """Assert that `exact`, also at other prices, counts a tally and every op, and `default` its multiply-adds."""
    if products:
        macs = sum(entry.macs for entry in FlopCountAnalysis(function, inputs, table=default).counts().entries)
        times = _COMPLEX if any(isinstance(tensor, torch.Tensor) and tensor.is_complex() for tensor in inputs) else 1
        assert macs * times == tally.macs, f"default counts {macs} multiply-adds, the program did {dict(tally.done)}"
    trace = FlopCountAnalysis(function, inputs, table=exact[0]).trace()
    for table in exact:
        analysis = FlopCountAnalysis.from_trace(trace, table=table)
        name = "exact at other prices" if table is WEIGHTED else "exact"
        assert not analysis.unsupported_ops(), f"{name} leaves out {dict(analysis.unsupported_ops())}"
        total, did = analysis.total(), tally.flops(dict(table.constants))
        counted = f"{name} counts {total}, {dict(analysis.by_operator())}"
        assert total == did, f"{counted}; the program did {did}, {dict(tally.done)}"


def check_price(signature: Signature, tally: Tally, *, products: bool = True) -> None:
    """Assert that the tables count a call of an op, which may have no kernel here, as what was done."""
    price = EXACT.price(signature)
    assert 2 * price.macs + price.flops == tally.flops(dict(EXACT.constants)), f"{signature}: {dict(tally.done)}"
    assert not products or DEFAULT.price(signature).macs == tally.macs


def check_gradients(program, function, *tensors, wanted=None, products=True):
    """Assert that a program's gradients are autograd's, and that the tables count what it did, by shapes and for real.

    It takes a tally and the gradient of the result; what the forward run left, it gets free of cost. `wanted` says
    which of the tensors have gradients: by default all of floating point. With `products`, `default` counts the
    multiply-adds.
    """
    wanted = [tensor.is_floating_point() for tensor in tensors] if wanted is None else wanted
    leaves = [tensor.detach().requires_grad_(flag) for tensor, flag in zip(tensors, wanted, strict=True)]
    result = function(*leaves)
    slope = torch.randn(result.shape, generator=torch.Generator().manual_seed(0), dtype=result.dtype)
    gradients = torch.autograd.grad(result, [leaf for leaf in leaves if leaf.requires_grad], slope)
    tally = Tally()
    check_results(program(tally, tally.numbers(slope)), gradients)
    # A layer, so that its ops are distinguished from the ops of the loss.
    layer = Applied(lambda _, *tensors: function(*tensors))
    model = Applied(lambda self, *tensors: self.layer(*tensors), layer=layer)
    for execution in ("shapes", "real"):
        trace = record_call(model, tuple(leaves), loss=torch.sum, execution=execution, stops_at=EXACT.stops_at)
        exact, default = (_backward(FlopCountAnalysis.from_trace(trace, table=table)) for table in (EXACT, DEFAULT))
        done = tally.flops(dict(EXACT.constants))
        assert sum(entry.value for entry in exact) == done, f"{execution}: {exact}; the program did {dict(tally.done)}"
        macs = sum(entry.macs for entry in default)
        assert not products or macs == tally.macs, f"{execution}: default counts {macs}, not {dict(tally.done)}"


def _backward(analysis: FlopCountAnalysis) -> list[Any]:
    """Return the entries of the layer's backward pass, after a look whether all ops are known."""
    entries = analysis.counts().entries
    assert not [entry.op for entry in entries if entry.status.value == "unsupported"]
    return [entry for entry in entries if entry.phase == "backward" and entry.scope == ("", "layer")]
