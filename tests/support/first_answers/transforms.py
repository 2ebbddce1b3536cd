"""Transforms of functions: torch.func, torch.autograd, tracing, compilation and scripts."""

from functools import partial

import torch
from torch import nn

from tests.support.first_answers.counts import count, count_function, differentiate, train, without_trace

X, WEIGHT = (3, 4), (4, 4)


def square(x):
    return (x @ x.mT).sum()


def _linearised(x):
    output, jvp = torch.func.linearize(lambda x: x @ x.mT, x)
    return output + jvp(x)


def _functional(x):
    layer = nn.Linear(4, 5)
    return torch.func.functional_call(layer, {"weight": torch.ones(5, 4)}, (x,))


def _ensemble(x):
    layers = [nn.Linear(4, 5) for _ in range(3)]
    weights, buffers = torch.func.stack_module_state(layers)  # type: ignore[arg-type]

    def call(weights, buffers, x):
        return torch.func.functional_call(layers[0], (weights, buffers), (x,))

    return torch.vmap(call, in_dims=(0, 0, None))(weights, buffers, x)


def _dual(x):
    import torch.autograd.forward_ad as forward_ad

    with forward_ad.dual_level():
        return forward_ad.unpack_dual((lambda x: x @ x.mT)(forward_ad.make_dual(x, x * 2))).tangent


def _gradient(x):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(square(x), x, create_graph=True)


def _traced(x):
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(lambda x: x @ x.mT)(x)(x)


def _compile_by(backend, **options):
    def forward(x):
        return torch.compile(lambda x: x @ x.mT, backend=backend, **options)(x)

    return forward


def _fail(graph, inputs):
    raise AssertionError("a count compiles nothing")


def _imported_compiler(x):
    import torch._dynamo

    return torch.compile(lambda x: x @ x.mT, backend=_fail)(x)


def _named_compiler(x):
    from importlib import import_module

    return import_module("torch._dynamo").optimize(_fail)(lambda x: x @ x.mT)(x)


def _reset_compiler(x):
    torch._dynamo.reset()
    return torch.compile(lambda x: x @ x.mT, backend=_fail, fullgraph=True)(x)


def _queried_compiler(x):
    torch._dynamo.mark_dynamic(x, 0)
    torch._dynamo.graph_break()
    return x @ x.mT if torch.compiler.list_backends() else x


def _compiled_module(x):
    layer = nn.Linear(4, 5)
    layer.compile(backend=_fail)
    return layer(x)


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    if x.size(0) > 1:
        return torch.relu(x @ x.mT)
    return x


FUNCTIONS = {
    "vmap": (torch.vmap(lambda row: torch.ones(4, 4) @ row), X),
    "vmap, random": (torch.vmap(lambda row: row * torch.rand(4), randomness="different"), X),
    "vmap, chunked": (torch.vmap(lambda row: torch.ones(4, 4) @ row, chunk_size=2), X),
    "grad": (torch.func.grad(square), X),
    "vmap of grad": (torch.vmap(torch.func.grad(lambda row: row @ row)), X),
    "jvp": (lambda x: torch.func.jvp(lambda x: x @ x.mT, (x,), (x,)), X),
    "vjp": (lambda x: torch.func.vjp(lambda x: x @ x.mT, x)[1](torch.ones(3, 3)), X),
    "jacrev": (torch.func.jacrev(lambda x: (x @ x.mT).sum(0)), X),
    "jacfwd": (torch.func.jacfwd(lambda x: (x @ x.mT).sum(0)), X),
    "hessian": (torch.func.hessian(square), X),
    "linearize": (_linearised, X),
    "functionalize": (torch.func.functionalize(lambda x: x.clone().add_(1) @ x.mT), X),
    "functional call": (_functional, X),
    "ensemble": (_ensemble, X),
    "forward-mode AD": (_dual, X),
    "gradient in forward": (_gradient, X),
    "autograd jacobian": (lambda x: torch.autograd.functional.jacobian(lambda x: x @ x.mT, x), X),
    "make_fx": (_traced, X),
    "fx": (lambda x: torch.fx.symbolic_trace(lambda x: x @ x.mT)(x), X),
    "compiled in forward": (_compile_by("inductor"), X),
    "compiled eagerly": (_compile_by("eager", fullgraph=True), X),
    "compiled by a backend": (_compile_by(_fail), X),
    "compiled, dynamic": (_compile_by("aot_eager", dynamic=True), X),
    "compiler imported": (_imported_compiler, X),
    "compiler imported by name": (_named_compiler, X),
    "compiler reset": (_reset_compiler, X),
    "compiler disabled": (lambda x: torch.compiler.disable(lambda x: x @ x.mT)(x), X),
    "compiler queried": (_queried_compiler, X),
    "compiled module": (_compiled_module, X),
    "script": (scripted, X),
    "trace in forward": (lambda x: torch.jit.trace(nn.Linear(4, 5), torch.rand(3, 4))(x), X),
}


def _exported():
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5)).eval()
    return count(torch.export.export(model, (torch.rand(X),)).module(), torch.rand(X))


def _train_script():
    return train(torch.jit.script(nn.Sequential(nn.Linear(4, 5), nn.ReLU())), torch.rand(X))


def _script_in_forward():
    # torch compiles a class once, and what it leaves then keeps the weights until a garbage collection.
    return without_trace(count_function(lambda x: torch.jit.script(nn.Sequential(nn.Linear(4, 5), nn.ReLU()))(x), X))


def _fake():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return count(nn.Linear(4, 5), torch.rand(X))


def _optimised():
    from torch.fx.experimental.optimization import fuse

    return count(fuse(nn.Sequential(nn.Conv1d(4, 5, 3), nn.BatchNorm1d(5)).eval()), torch.rand(2, 4, 9))


CASES = {
    **{name: partial(count_function, function, shape) for name, (function, shape) in FUNCTIONS.items()},
    **{
        f"{name}, training": partial(differentiate, *FUNCTIONS[name])
        for name in (
            *("vmap", "compiled in forward", "compiler imported"),
            *("script", "functional call", "gradient in forward"),
        )
    },
    **{
        f"{name}, real": partial(count_function, *FUNCTIONS[name], execution="real")
        for name in ("vmap", "compiled in forward", "compiler imported", "linearize", "make_fx")
    },
    "compiled before": lambda: count(torch.compile(nn.Linear(4, 5), backend=_fail), torch.rand(X)),
    "exported": _exported,
    "script in forward": _script_in_forward,
    "script module": lambda: count(torch.jit.script(nn.Sequential(nn.Linear(4, 5), nn.ReLU())), torch.rand(X)),
    "script module, training": _train_script,
    "fake tensors": _fake,
    "fused graph": _optimised,
}
