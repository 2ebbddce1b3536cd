"""The gradient claim: a program computes the gradients that autograd does, and the tables count its backward pass."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from fvflops import FlopCountAnalysis
from fvflops.capture.run import record_call
from tests.support.models.whole_models import Function
from tests.support.oracle.claim import DEFAULT, EXACT, check_results
from tests.support.oracle.number import Tally

# A program takes a tally and the gradient of the result, and returns gradients of the requested tensors.
Program = Callable[[Tally, Any], Sequence[Any]]


class _Trained(nn.Module):
    """A function of tensors as a layer, so that what runs for it is told from the loss."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.layer = Function(function)

    def forward(self, *tensors):
        return self.layer(*tensors)


def check_gradients(
    program: Program,
    function: Callable[..., torch.Tensor],
    *tensors: torch.Tensor,
    wanted: Sequence[bool] | None = None,
    products: bool = True,
    tolerance: float = 1e-9,
) -> None:
    """Assert that a program's gradients are autograd's, and that the tables count what it did, by shapes and for real.

    `wanted` says which of the tensors have gradients: by default all of floating point. With `products=False` the
    multiply-adds of `default` are not looked at. What the forward run left, the program gets free of cost.
    """
    wanted = [tensor.is_floating_point() for tensor in tensors] if wanted is None else wanted
    leaves = [tensor.detach().requires_grad_(flag) for tensor, flag in zip(tensors, wanted, strict=True)]
    result = function(*leaves)
    slope = torch.randn(result.shape, generator=torch.Generator().manual_seed(0), dtype=result.dtype)
    expected = torch.autograd.grad(result, [leaf for leaf in leaves if leaf.requires_grad], slope)
    tally = Tally()
    mine = list(program(tally, tally.numbers(slope)))
    check_results(mine, expected, tolerance)
    for execution in ("shapes", "real"):
        trace = record_call(
            _Trained(function), tuple(leaves), {}, loss=torch.sum, execution=execution, stops_at=EXACT.stops_at
        )
        exact = _backward(FlopCountAnalysis.from_trace(trace, table=EXACT))
        done = tally.flops(dict(EXACT.constants))
        assert sum(entry.value for entry in exact) == done, f"{execution}: {exact}; the program did {dict(tally.done)}"
        if products:
            macs = sum(entry.macs for entry in _backward(FlopCountAnalysis.from_trace(trace, table=DEFAULT)))
            assert macs == tally.macs, f"{execution}: default counts {macs}, the program did {dict(tally.done)}"


def _backward(analysis: FlopCountAnalysis) -> list[Any]:
    """Return the entries of the layer's backward pass, after a look whether all ops are known."""
    entries = analysis.counts().entries
    assert not [entry.op for entry in entries if entry.status.value == "unsupported"]
    return [entry for entry in entries if entry.phase == "backward" and entry.scope == ("", "layer")]
