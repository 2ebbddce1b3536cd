"""Forwards that use autograd: counted as `record` sees them, though a forward is otherwise run below autograd.

There many of these raise nothing: they see tensors that require no gradient, and return zeros.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad, functional
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from fvflops import FlopCountAnalysis, record
from fvflops.capture.run import ExecutionError, record_call

Forward = Callable[[nn.Module, torch.Tensor], Any]

ROWS = 4
FORWARD = ROWS * 3 * 8 + ROWS * 8 * 2  # the two layers, and as much again for the gradients of their inputs
WEIGHTS = FORWARD


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))


class Using(nn.Module):
    def __init__(self, use):
        super().__init__()
        self.net = net()
        self._use = use

    def forward(self, x):
        return self._use(self.net, x)


def squares(net):
    return lambda x: net(x).pow(2).sum()


def leaf(x):
    return x.detach().requires_grad_()


def gradient(y, x):
    """Return the gradient where there is one: below autograd it is silently none."""
    return torch.autograd.grad(y.sum(), x)[0] if y.requires_grad else y


def enabled(net, x):
    with torch.enable_grad():
        x = leaf(x)
        return gradient(net(x), x)


def switched(net, x):
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    try:
        x = leaf(x)
        return gradient(net(x), x)
    finally:
        torch.set_grad_enabled(before)


def decorated(net, x):
    return torch.enable_grad()(lambda x: gradient(net(x), x))(leaf(x))


def flagged(net, x):
    x = x.detach()
    x.requires_grad = True
    return gradient(net(x), x)


def requested(net, x):
    x = leaf(x)
    return gradient(net(x), x)


def swallowed(net, x):
    x = leaf(x)
    y = net(x).sum()
    try:
        return torch.autograd.grad(y, x)[0]
    except RuntimeError:
        return y


def caught(net, x):
    y = net(x.detach()).sum()
    try:
        y.backward()
    except Exception:
        return None
    return y


def penalty(net, x):
    x = leaf(x)
    y = net(x)
    return (torch.autograd.grad(y.sum(), x, create_graph=True)[0].norm(dim=1) - 1).pow(2).mean()


def inner_loop(net, x):
    parameters = dict(net.named_parameters())
    with torch.enable_grad():
        for _ in range(2):
            loss = functional_call(net, parameters, (x,)).pow(2).mean()
            found = torch.autograd.grad(loss, list(parameters.values()), create_graph=True, allow_unused=True)
            parameters = {key: value - 0.1 * g for (key, value), g in zip(parameters.items(), found, strict=True)}
        return functional_call(net, parameters, (x,))


def trained_in_test(net, x):
    mine = copy.deepcopy(net)
    optimizer = torch.optim.SGD(mine.parameters(), 0.1)
    with torch.enable_grad():
        loss = mine(x).pow(2).mean()
        if loss.requires_grad:
            loss.backward()
            optimizer.step()
    return mine(x)


def newton(net, x):
    root = torch.zeros(3)
    matrix = functional.jacobian(lambda z: z + 0.1 * net(z.expand_as(x)).sum(), root)
    return torch.linalg.solve(matrix, root + 1)  # singular, if the derivative were zero


def dual(net, x):
    with forward_ad.dual_level():
        y, tangent = forward_ad.unpack_dual(net(forward_ad.make_dual(x, torch.ones_like(x))))
    return y if tangent is None else tangent


def checkpointed(net, x):
    with torch.enable_grad():
        x = leaf(x)
        return gradient(checkpoint(net, x, use_reentrant=False), x)


class Solved(torch.autograd.Function):
    """Steps along a field, whose backward calls autograd itself, as a neural ODE's adjoint does."""

    @staticmethod
    def forward(ctx, field, x):
        ctx.field = field
        ctx.save_for_backward(x)
        return x + field(x).sum()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = leaf(x)
            return None, gradient + torch.autograd.grad(ctx.field(x).sum(), x)[0]


def adjoint(net, x):
    with torch.enable_grad():
        x = leaf(x)
        return gradient(Solved.apply(net, x), x)


def energy(net, x):
    x.requires_grad_(True)
    distances = (x[:, None] - x[None]).pow(2).sum(-1, keepdim=True).expand(-1, -1, 3)
    total = net(distances).sum()
    return total, -gradient(total, x)


# With the multiply-adds, by hand, where one sees them at once.
USES = {
    "jacobian": (functional.jacobian, FORWARD + 2 * ROWS * FORWARD),
    "jacobian, its graph too": (lambda net, x: functional.jacobian(net, x, create_graph=True), None),
    "jacobian, vectorised": (lambda net, x: functional.jacobian(net, x, vectorize=True), FORWARD + 2 * ROWS * FORWARD),
    "jacobian, forward mode": (
        lambda net, x: functional.jacobian(net, x, vectorize=True, strategy="forward-mode"),
        None,
    ),
    "jacobian under no_grad": (
        torch.no_grad()(lambda net, x: functional.jacobian(net, x)),
        FORWARD + 2 * ROWS * FORWARD,
    ),
    "hessian": (lambda net, x: functional.hessian(squares(net), x), None),
    "vjp": (lambda net, x: functional.vjp(net, x, torch.ones(ROWS, 2)), 2 * FORWARD),
    "jvp": (lambda net, x: functional.jvp(net, x, torch.ones(ROWS, 3)), None),
    "hvp": (lambda net, x: functional.hvp(squares(net), x, torch.ones(ROWS, 3)), None),
    "vhp": (lambda net, x: functional.vhp(squares(net), x, torch.ones(ROWS, 3)), None),
    "enable_grad": (enabled, 2 * FORWARD),
    "set_grad_enabled": (switched, 2 * FORWARD),
    "enable_grad as a decorator": (decorated, 2 * FORWARD),
    "requires_grad set": (flagged, 2 * FORWARD),
    "requires_grad_ called": (requested, 2 * FORWARD),
    "an error swallowed": (swallowed, 2 * FORWARD),
    "an error caught": (caught, FORWARD + WEIGHTS + ROWS * 8 * 2),
    "gradient penalty": (penalty, 2 * FORWARD),
    "inner loop": (inner_loop, None),
    "training in the test": (trained_in_test, None),
    "Newton's method": (newton, None),
    "dual numbers": (dual, None),
    "checkpoint": (checkpointed, None),
    "adjoint": (adjoint, 3 * FORWARD),
    "energy and forces": (energy, 2 * ROWS * FORWARD),
    "func.grad": (lambda net, x: torch.func.grad(squares(net))(x), 2 * FORWARD),
    "func.vjp": (lambda net, x: torch.func.vjp(net, x)[1](torch.ones(ROWS, 2)), 2 * FORWARD),
    "func.jvp": (lambda net, x: torch.func.jvp(net, (x,), (torch.ones_like(x),)), None),
    "func.jacrev": (lambda net, x: torch.func.jacrev(net)(x), FORWARD + 2 * ROWS * FORWARD),
    "func.jacfwd": (lambda net, x: torch.func.jacfwd(net)(x), None),
    "func.hessian": (lambda net, x: torch.func.hessian(squares(net))(x), None),
    "func.vmap of func.grad": (lambda net, x: torch.func.vmap(torch.func.grad(squares(net)))(x), 2 * FORWARD),
    "func.functionalize": (lambda net, x: torch.func.functionalize(net)(x), FORWARD),
    "func.linearize": (lambda net, x: torch.func.linearize(net, x)[1](torch.ones_like(x)), None),
    "make_fx": (lambda net, x: make_fx(net)(x)(x), 2 * FORWARD),
    "make_fx of func.grad": (lambda net, x: make_fx(torch.func.grad(squares(net)))(x)(x), 4 * FORWARD),
    "make_fx before dispatch": (lambda net, x: make_fx(net, pre_dispatch=True)(x)(x), 2 * FORWARD),
    # What a fake tensor stands for is torch's reasoning, no work.
    "make_fx on fakes": (lambda net, x: make_fx(net, tracing_mode="fake", _allow_non_fake_inputs=True)(x)(x), FORWARD),
    "make_fx with open sizes": (
        lambda net, x: make_fx(net, tracing_mode="symbolic", _allow_non_fake_inputs=True)(x)(x),
        FORWARD,
    ),
}


def macs(use, execution):
    analysis = FlopCountAnalysis(Using(use), torch.rand(ROWS, 3), execution=execution)
    return analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False).macs()


@pytest.mark.parametrize("name", USES)
def test_a_forward_that_uses_autograd_costs_what_its_recording_does(name):
    use, expected = USES[name]
    model = Using(use)
    with record(model) as run:
        model(torch.rand(ROWS, 3))
    real = run.macs()
    assert expected is None or real == expected
    assert {execution: macs(use, execution) for execution in ("auto", "shapes", "real")} == dict.fromkeys(
        ("auto", "shapes", "real"), real
    )


HARMLESS = {
    "enable_grad": torch.enable_grad()(lambda net, x: net(x)),
    "requires_grad_": lambda net, x: net(leaf(x)),
    "func.grad": lambda net, x: torch.func.grad(squares(net))(x),
    "is_grad_enabled": lambda net, x: net(x) * (2 if torch.is_grad_enabled() else 1),
    "checkpoint": lambda net, x: checkpoint(net, x, use_reentrant=False),
}


@pytest.mark.parametrize("execution", ["shapes", "real"])
@pytest.mark.parametrize("name", HARMLESS)
def test_a_forward_that_needs_no_backward_pass_keeps_its_vocabulary(name, execution):
    trace = record_call(Using(HARMLESS[name]), (torch.rand(ROWS, 3),), execution=execution)
    assert trace.about["vocabulary"] == "composite"


def test_a_hook_on_a_tensor_needs_autograd_without_a_backward_pass():
    def forward(net, x):
        with torch.enable_grad():
            y = net(x)
            y.register_hook(lambda gradient: gradient)
        return y

    assert record_call(Using(forward), (torch.rand(ROWS, 3),)).about["vocabulary"] == "core"


def test_an_input_that_can_be_read_once_is_told():
    model = Using(lambda net, items: functional.jacobian(net, next(items)))
    with pytest.raises(ExecutionError, match=r"uses autograd \(torch.enable_grad\(\)\).*pass a list"):
        FlopCountAnalysis(model, (iter([torch.rand(ROWS, 3)]),)).total()


@pytest.mark.parametrize("execution", ["shapes", "real"])
def test_nothing_of_the_detection_stays(execution):
    before = (torch._C._set_grad_enabled, vars(torch.Tensor).keys() & {"requires_grad", "requires_grad_"})
    model = Using(energy)
    x = torch.rand(ROWS, 3)
    FlopCountAnalysis(model, x, execution=execution).total()
    assert (torch._C._set_grad_enabled, vars(torch.Tensor).keys() & {"requires_grad", "requires_grad_"}) == before
    assert torch.is_grad_enabled() and not x.requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())
