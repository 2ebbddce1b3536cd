"""Ops, by kind: each in a function of tensors."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from tests.support.cuda_cases.case import Case
from tests.support.cuda_cases.other_ops import others
from tests.support.first_answers.counts import count, count_function

Function = Callable[..., Any]
Shapes = tuple[tuple[int, ...], ...]
BATCH, ROWS, IMAGE = (2, 3, 4), (6, 4), (2, 4, 9, 7)
HEADS = (1, 2, 16, 8)


def whole(x):
    return (x * 4).long().clamp(0, 3)


FUNCTIONS = {
    "einsum of three": (lambda x, y, z: torch.einsum("ij,jk,kl->il", x, y, z), ((3, 4), (4, 5), (5, 6))),
    "chain of products": (lambda x, y, z: torch.linalg.multi_dot([x, y, z]), ((3, 4), (4, 5), (5, 6))),
    "softmax": (lambda x: x.softmax(-1) + F.log_softmax(x, 0) + F.gumbel_softmax(x), (BATCH,)),
    "nonzero": (lambda x: x.nonzero().float().sum(), (ROWS,)),
    "unique": (lambda x: whole(x).unique(return_counts=True), (ROWS,)),
    "random numbers": (
        lambda x: torch.rand_like(x) + torch.randn(4) + x.bernoulli() + x.multinomial(4) + torch.randperm(4),
        (ROWS,),
    ),
    # torch.compile ends the validation of arguments, which reads their values, in the whole process.
    "distributions": (lambda x: torch.distributions.Normal(x, x + 1, validate_args=False).rsample().log(), (ROWS,)),
    "views": (lambda x: x.as_strided((2, 2), (1, 1)) + x.unfold(0, 2, 2)[0, :2] + x.view(-1).diag()[:2, :2], (ROWS,)),
    "out": (lambda x: torch.mm(x, x.T, out=torch.empty(6, 6)), (ROWS,)),
    "sparse product": (lambda x: torch.sparse.mm(x.to_sparse(), x.T) + x.to_sparse_csr() @ x.T, (ROWS,)),
}


def quantise(x):
    fake = torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127)
    whole = torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).dequantize()
    return fake + whole + torch._int_mm(torch.ones(32, 8, dtype=torch.int8), torch.ones(8, 8, dtype=torch.int8))[0, 0]


def use_nested(x):
    nested = torch.nested.nested_tensor([x[:2], x[2:]], layout=torch.jagged)
    return (nested @ x.T).to_padded_tensor(0.0)


def use_strided_nested(x):
    nested = torch.nested.nested_tensor([x[:2], x[2:]])
    return torch.nested.to_padded_tensor(F.linear(nested, torch.ones(5, 4)), 0.0)


def use_custom_op(x):
    if not hasattr(torch.ops.first_answers, "double"):

        @torch.library.custom_op("first_answers::double", mutates_args=())
        def double(x: torch.Tensor) -> torch.Tensor:
            return x * 2

        double.register_fake(torch.empty_like)
    return torch.ops.first_answers.double(x) @ x.T


def use_masked(x):
    from torch.masked import masked_tensor

    return torch.masked.sum(x, mask=x > 0.5) + masked_tensor(x, x > 0.5).sum().get_data()


FUNCTIONS |= {
    "quantisation": (quantise, (ROWS,)),
    "jagged tensors": (use_nested, (ROWS,)),
    "nested tensors": (use_strided_nested, (ROWS,)),
    "custom op": (use_custom_op, (ROWS,)),
    "masked tensors": (use_masked, (ROWS,)),
}


def _count_low_precision():
    x = torch.rand(16, 16).to(torch.float8_e4m3fn)
    scale = torch.ones(())
    return count(lambda x: torch._scaled_mm(x, x.T, scale, scale, out_dtype=torch.bfloat16), x)


def _count_shared(make: Callable[[], Case]) -> Any:
    case = make()
    return count(case.model, *(value.detach() for value in case.args))


# Of the ops for which CUDA has kernels of its own; not those that need a device, and what is compiled.
_SHARED = {name: make for name, make in others().items() if not name.startswith(("autocast", "compiled", "pin_memory"))}
CASES = {
    **{name: partial(count_function, function, *shapes) for name, (function, shapes) in FUNCTIONS.items()},
    **{f"{name}, shared": partial(_count_shared, make) for name, make in _SHARED.items()},
    "scaled product": _count_low_precision,
    "attention on cuda": partial(
        count_function, F.scaled_dot_product_attention, HEADS, HEADS, HEADS, execution="shapes", device="cuda"
    ),
}
