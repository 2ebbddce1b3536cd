"""fvcore's jit_handles, run beside `fvflops.integrations.fvcore`: in fvflops and in fvcore both give one number."""

import doctest
import inspect
import logging

import pytest
import torch
from fvcore import nn as fvcore
from fvcore.nn import jit_handles as theirs
from torch import nn
from torch.nn import functional as F

import fvflops
from fvflops.integrations import fvcore as ours

# What fvcore's file imports for itself.
IMPORTED = {"Any", "Callable", "Counter", "List", "Number", "Optional", "OrderedDict", "Union", "np", "prod", "typing"}


class Net(nn.Module):
    """A model that calls every op which fvcore has a handle for."""

    def __init__(self, training, affine):
        super().__init__()
        self.conv, self.up = nn.Conv2d(4, 8, 3, groups=2, stride=2), nn.ConvTranspose2d(8, 4, 3, stride=2)
        self.batch, self.layer = nn.BatchNorm2d(4, affine=affine), nn.LayerNorm(9, elementwise_affine=affine)
        self.linear = nn.Linear(9, 5)
        self.train(training)

    def forward(self, x):
        x = F.gelu(self.layer(self.batch(self.up(self.conv(x)))))
        y = self.linear(x)
        product = torch.matmul(y.transpose(-1, -2), x)
        square = torch.addmm(y[0, 0, :, 0], y[0, 0], x[0, 0, :5])
        pairs = torch.bmm(y[0], x[0].transpose(1, 2)[:, :5])
        triple = torch.einsum("abc,bd,ce->ade", x[0], x[0, 0], x[0, 1])
        return (
            torch.einsum("nchw,ncgw->nhg", x, x + 1).sum() + product.sum() + square.sum() + pairs.sum() + triple.sum()
        )


HANDLES = {
    "aten::_convolution": lambda handles: handles.conv_flop_jit,
    "aten::batch_norm": lambda handles: handles.batchnorm_flop_jit,
    "aten::layer_norm": lambda handles: handles.norm_flop_counter(2),
    "aten::linear": lambda handles: handles.linear_flop_jit,
    "aten::matmul": lambda handles: handles.matmul_flop_jit,
    "aten::addmm": lambda handles: handles.addmm_flop_jit,
    "aten::bmm": lambda handles: handles.bmm_flop_jit,
    "aten::einsum": lambda handles: handles.einsum_flop_jit,
    "aten::gelu": lambda handles: handles.elementwise_flop_counter(3, 2),
    "aten::add": lambda handles: handles.generic_activation_jit(),
    "aten::sum": lambda handles: handles.generic_activation_jit("sums"),
}


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def test_every_public_name_of_fvcore_is_here_with_its_parameters():
    names = {name for name in vars(theirs) if not name.startswith("_")} - IMPORTED
    assert names <= vars(ours).keys()
    for name in names - {"Handle"}:
        wanted, found = (inspect.signature(getattr(library, name)).parameters for library in (theirs, ours))
        assert {key: value.default for key, value in wanted.items()} == {k: v.default for k, v in found.items()}


@pytest.mark.parametrize(("training", "affine"), [(False, True), (False, False), (True, True), (True, False)])
def test_each_handle_gives_fvcores_number_in_fvflops_and_in_fvcore(training, affine):
    model, inputs = Net(training, affine), (torch.ones(2, 4, 9, 9),)
    results = [
        library.FlopCountAnalysis(model, inputs)
        .set_op_handle(**{op: make(handles) for op, make in HANDLES.items()})
        .by_module_and_operator()
        for library in (fvflops, fvcore)
        for handles in (ours, theirs)
    ]
    assert all(result == results[-1] for result in results)
    assert results[-1][""].keys() == {
        "conv", "batch_norm", "layer_norm", "linear", "matmul", "addmm", "bmm", "einsum", "gelu", "add", "sums",
    }  # fmt: skip


def test_a_handle_of_ones_own_gets_the_shapes_and_none_for_what_is_no_tensor():
    def count(handles):
        def gelu(inputs, outputs):
            assert handles.get_shape(inputs[1]) is None
            return torch.Size(handles.get_shape(inputs[0])).numel() * 7

        return gelu

    for handles in (ours, theirs):
        analysis = fvflops.FlopCountAnalysis(nn.GELU(), torch.ones(2, 3)).set_op_handle("aten::gelu", count(handles))
        assert analysis.total() == 42


@pytest.mark.parametrize("transposed", [False, True])
def test_a_convolutions_shapes_give_fvcores_number(transposed):
    shapes = [2, 4, 9, 7], [8, 4, 3, 2], [2, 8, 7, 6]
    assert ours.conv_flop_count(*shapes, transposed) == theirs.conv_flop_count(*shapes, transposed)


def test_the_examples_of_the_docstrings_run():
    assert doctest.testmod(ours).failed == 0


def test_a_handle_for_tensors_says_what_it_got_instead():
    analysis = fvflops.FlopCountAnalysis(nn.GELU(), torch.ones(2)).set_op_handle(
        "aten::gelu", lambda inputs, outputs: ours.linear_flop_jit(inputs[1:], outputs)
    )
    with pytest.raises(ValueError, match=r"aten::gelu raised TypeError: this handle needs a tensor, not .*none"):
        analysis.total()
