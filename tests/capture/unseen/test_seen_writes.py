"""Writes by an op's kernel are the op's, declared or not; other writes to the same memory are reported."""

import pytest
import torch
from torch import nn

from fvflops import FlopCountAnalysis

aten = torch.ops.aten


ADAM = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-3, "amsgrad": True}
SGD = {"weight_decay": 0.0, "momentum": 0.9, "lr": 0.1, "dampening": 0.0, "nesterov": False, "is_first_step": False}
ADAGRAD = {"lr": 0.1, "lr_decay": 0.0, "weight_decay": 0.0, "eps": 1e-3}


def fused(update, *lists, **settings):
    update(*([tensor] for tensor in lists), **settings, maximize=False, grad_scale=None, found_inf=None)


def into_outputs(x, mean, variance, *_):
    out = torch.zeros(4, 3), torch.zeros(3), torch.zeros(3)
    return torch.native_batch_norm(x, None, None, mean, variance, True, 0.1, 1e-5, out=out)


# Functions that write to some of five tensors: one of shape (4, 3), two of its columns' shape, and two of its own.
WRITES = {
    "batch_norm": lambda x, m, v, *_: torch.batch_norm(x, None, None, m, v, True, 0.1, 1e-5, False),
    "native_batch_norm": lambda x, m, v, *_: torch.native_batch_norm(x, None, None, m, v, True, 0.1, 1e-5),
    "native_batch_norm.out": into_outputs,
    "native_batch_norm_legit": lambda x, m, v, *_: aten._native_batch_norm_legit(x, None, None, m, v, True, 0.1, 1e-5),
    "batch_norm_update_stats": lambda x, m, v, *_: torch.batch_norm_update_stats(x, m, v, 0.1),
    "instance_norm": lambda x, m, v, *_: torch.instance_norm(
        x[..., None].expand(4, 3, 2), None, None, m, v, True, 0.1, 1e-5, False
    ),
    "adam": lambda x, m, v, y, z: fused(aten._fused_adam_, x, y, z, z.clone(), z.clone(), torch.ones(()), **ADAM),
    "sgd": lambda x, m, v, y, z: fused(aten._fused_sgd_, x, y, z, **SGD),
    "adagrad": lambda x, m, v, y, z: fused(aten._fused_adagrad_, x, y, z, torch.ones(()), **ADAGRAD),
    "foreach": lambda x, m, v, y, z: aten._foreach_add_([m, x, z], [v, y, y]),
    "out": lambda x, m, v, y, z: torch.mul(x, 2, out=z),
    "two outs": lambda x, m, v, y, z: torch.frexp(x, out=(y, torch.zeros(4, 3, dtype=torch.int32))),
    "index_put_": lambda x, m, v, y, z: z.index_put_((torch.tensor([1]),), m),
    "set_": lambda x, m, v, y, z: z.set_(y).add_(1),
    "resize_": lambda x, m, v, y, z: z.resize_(8, 3).fill_(1),
    "view": lambda x, m, v, y, z: z[1:].t().mul_(m[:, None]),
}
TENSORS = (torch.linspace(-1, 1, 12).reshape(4, 3), torch.full((3,), 2.0), torch.full((3,), 3.0))


def tensors():
    x, mean, variance = (tensor.clone() for tensor in TENSORS)
    return x, mean, variance, x + 1, x + 2


class Buffers(nn.Module):
    def __init__(self, compute):
        super().__init__()
        for index, tensor in enumerate(tensors()):
            self.register_buffer(f"tensor_{index}", tensor)
        self.compute = compute

    def forward(self, x):
        self.compute(*self.buffers())
        return sum(buffer.sum() for buffer in self.buffers()) + x  # reads what was written


def unseen(analysis):
    analysis.unsupported_ops_warnings(False)
    return [op for op in analysis.unsupported_ops() if op.startswith("unseen::")]


@pytest.mark.parametrize("execution", ["shapes", "real"])
@pytest.mark.parametrize("kind", WRITES)
def test_writes_of_an_op_are_seen_and_undone(kind, execution):
    given = tensors()
    assert not all(map(torch.equal, given, written(kind, given)))

    given = tensors()
    assert unseen(FlopCountAnalysis(WRITES[kind], given, execution=execution)) == []
    assert all(map(torch.equal, given, tensors()))

    model = Buffers(WRITES[kind])
    assert unseen(FlopCountAnalysis(model, torch.ones(1), execution=execution)) == []
    assert all(map(torch.equal, model.buffers(), tensors()))


def written(kind, given):
    """Return copies of tensors to which the function of a kind has written."""
    copies = [tensor.clone() for tensor in given]
    WRITES[kind](*copies)
    return [copy if copy.shape == tensor.shape else torch.empty(0) for copy, tensor in zip(copies, given, strict=True)]


@pytest.mark.parametrize("execution", ["shapes", "real"])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_write_of_numpy_is_reported_before_and_after_a_write_of_an_op(is_first, execution):
    x, mean, *_ = tensors()
    array = x.numpy()  # before the run, so that no export is noticed

    def compute(x, mean):
        if is_first:
            array[:] = 3
        x.mul_(mean)
        if not is_first:
            array[:] = 3
        return x + mean

    (op,) = unseen(FlopCountAnalysis(compute, (x, mean), execution=execution))
    assert op in ("unseen::compute", "unseen::ndarray")
