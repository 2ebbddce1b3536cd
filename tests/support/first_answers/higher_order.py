"""Higher-order ops, and functions that torch would compile."""

from functools import partial

import torch
from torch import nn

from tests.support.first_answers.counts import count_function, differentiate

X, HEADS = (3, 4), (1, 2, 128, 16)


def product(x: torch.Tensor) -> tuple[torch.Tensor]:
    return (x @ x.mT,)


def graph():
    return torch.fx.symbolic_trace(product)


def _flex(q, **options):
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention(q, q, q, **options)


def _flex_scores(q):
    return _flex(q, score_mod=lambda score, batch, head, query, key: score + query - key)


def _flex_mask(q):
    from torch.nn.attention.flex_attention import create_block_mask

    mask = create_block_mask(lambda b, h, query, key: query >= key, None, None, 128, 128, device="cpu", BLOCK_SIZE=32)
    return _flex(q, block_mask=mask)


def _flex_compiled(q):
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)(q, q, q)


def _while_loop(x):
    loop = torch._higher_order_ops.while_loop
    return loop(lambda turn, x: turn < 3, lambda turn, x: (turn + 1, x @ torch.ones(4, 4)), (torch.tensor(0), x))


def _map(x):
    from functorch.experimental.control_flow import map as map_over

    return map_over(lambda row: row @ torch.ones(4, 4), x)


def _matrix_scan(x):
    return torch.ops.higher_order.associative_scan(lambda a, b: a @ b, [x], ())


def _functionalised(x):
    class Model(nn.Module):
        def forward(self, x):
            return torch.cond(x.sum() > 0, lambda x: x @ x.mT, lambda x: x.mT.mT @ x.mT + 1, (x,))

    return torch.export.export(Model(), (torch.rand(X),)).module()(x)


FUNCTIONS = {
    "cond": (lambda x: torch.cond(x.sum() > 0, lambda x: x @ x.mT, lambda x: x @ x.mT @ x @ x.mT, (x,)), X),
    "while loop": (_while_loop, X),
    "scan": (lambda x: torch._higher_order_ops.scan(lambda carry, row: (carry + row, row * carry), x[0], x), X),
    "map": (_map, X),
    "associative scan": (lambda x: torch._higher_order_ops.associative_scan(lambda a, b: a * b, x, dim=0), X),
    "associative scan of matrices": (_matrix_scan, (5, 2, 2)),
    "flex attention": (_flex, HEADS),
    "flex attention, scores changed": (_flex_scores, HEADS),
    "flex attention, block mask": (_flex_mask, HEADS),
    "flex attention, compiled": (_flex_compiled, HEADS),
    "invoke subgraph": (lambda x: torch.ops.higher_order.invoke_subgraph(graph(), "name", x), X),
    "strict mode": (lambda x: torch.ops.higher_order.strict_mode(product, (x,)), X),
    "hints wrapper": (lambda x: torch.ops.higher_order.hints_wrapper(product, (x,), {}, {}), X),
    "constant graph": (lambda x: torch.ops.higher_order.run_const_graph(graph(), (x,)), X),
    "wrap": (lambda x: torch.ops.higher_order.wrap(product, x), X),
    "wrap with autocast": (
        lambda x: torch.ops.higher_order.wrap_with_autocast("cpu", None, False, None, product, x),
        X,
    ),
    "checkpointed subgraph": (
        lambda x: torch.ops.higher_order.tag_activation_checkpoint(graph(), x, use_reentrant=False),
        X,
    ),
    "out dtype": (lambda x: torch.ops.higher_order.out_dtype(torch.ops.aten.mm.default, torch.float32, x, x.T), X),
    "nested region": (lambda x: torch.compiler.nested_compile_region(lambda x: x @ x.mT)(x), X),
    "export in forward": (_functionalised, X),
}
TRAINED = ("cond", "scan", "map", "flex attention", "flex attention, block mask", "flex attention, compiled")
CASES = {
    **{name: partial(count_function, function, shape) for name, (function, shape) in FUNCTIONS.items()},
    **{f"{name}, training": partial(differentiate, *FUNCTIONS[name]) for name in TRAINED},
    "flex attention, real": partial(count_function, *FUNCTIONS["flex attention"], execution="real"),
    "flex attention, shapes": partial(count_function, *FUNCTIONS["flex attention"], execution="shapes"),
    "flex attention on cuda": partial(count_function, *FUNCTIONS["flex attention"], execution="shapes", device="cuda"),
}
