"""Ops that change the shape, strides or memory of a tensor of the model in place, and reasons for real execution."""

import logging

import pytest
import torch
from torch import nn

from fvflops import FlopCountAnalysis
from fvflops.capture.run import ExecutionError

OPS = {
    "t_": lambda t: t.t_(),
    "t_ twice": lambda t: t.t_().t_(),
    "t_, mul_": lambda t: t.t_().mul_(2),
    "transpose_": lambda t: t.transpose_(0, 1),
    "swapaxes_": lambda t: t.swapaxes_(0, 1),
    "unsqueeze_": lambda t: t.unsqueeze_(0),
    "squeeze_": lambda t: t.unsqueeze_(0).squeeze_(0),
    "as_strided_": lambda t: t.as_strided_((2, 2), (4, 1), 3),
    "resize_": lambda t: t.resize_(2, 4),
    "resize_ to more": lambda t: t.resize_(6, 4),
    "resize_as_": lambda t: t.resize_as_(torch.ones(5, 4, dtype=t.dtype)),
    "set_": lambda t: t.set_(torch.ones(7, 4, dtype=t.dtype)),
    "detach_": lambda t: t.detach_(),
}


class Net(nn.Module):
    def __init__(self, op, name):
        super().__init__()
        self.op, self.name = op, name
        self.fc = nn.Linear(4, 4)
        self.register_buffer("floats", torch.rand(3, 4))
        self.register_buffer("integers", torch.arange(12).view(3, 4))
        self.attribute = torch.rand(3, 4)

    def forward(self, x, given):
        x, tensor = self.fc(x), given if self.name == "input" else getattr(self, self.name)
        self.op(tensor)
        tensor = tensor.float()
        return x.sum() + (tensor @ torch.ones(tensor.shape[-1], 2)).sum()


def count(model, given, execution):
    calls = FlopCountAnalysis(
        model, (torch.ones(3, 4), given), execution=execution, table="exact", warn=False
    ).op_calls()
    return [(call.op, call.flops, str(call.inputs)) for call in calls]


@pytest.mark.parametrize("name", ["floats", "integers", "attribute", "input"])
@pytest.mark.parametrize("op", OPS)
def test_a_changed_view_counts_as_in_real_execution_and_is_restored(op, name):
    model, given = Net(OPS[op], name), torch.rand(3, 4)
    tensors = {"floats": model.floats, "integers": model.integers, "attribute": model.attribute, "input": given}
    before = {key: (tensor.clone(), tensor.stride(), tensor.storage_offset()) for key, tensor in tensors.items()}
    assert count(model, given, "shapes") == count(model, given, "real")
    for key, (values, stride, offset) in before.items():
        tensor = tensors[key]
        assert torch.equal(tensor, values) and (tensor.stride(), tensor.storage_offset()) == (stride, offset)
    assert model.floats is tensors["floats"] and model.attribute is tensors["attribute"]


class Image(torch.Tensor):
    """A subclass that torch gives its results too."""


PACKED = torch.quantize_per_tensor(torch.ones(4, 4), 1.0, 0, torch.qint8)
REASONS = {
    "item": (
        lambda x: x * x.sum().item(),
        "aten::item is data-dependent: it needs values, which shape execution does not",
    ),
    "numpy": (lambda x: torch.from_numpy(x.numpy()), "Tensor.numpy is data-dependent"),
    "dlpack": (lambda x: torch.from_dlpack(x), "it reads a tensor's memory, which shape execution does not have"),
    "pointer": (lambda x: x * (x.data_ptr() > 0), "it reads a tensor's memory"),
    "storage": (lambda x: x * x.untyped_storage()[0], "it reads a tensor's memory"),
    "shared memory": (lambda x: x.share_memory_(), "it reads a tensor's memory"),
    "nested": (lambda x: torch.nested.nested_tensor([x, x]).to_padded_tensor(0.0), "torch cannot infer its result"),
    "subclass": (lambda x: x.as_subclass(Image), "shape execution does not support tensors of class Image"),
    "sparse": (
        lambda x: torch.sparse_coo_tensor(torch.zeros(1, 4, dtype=torch.long), x[0], (3,)).to_dense(),
        "(its result is a sparse_coo tensor, which shape execution does not support)",
    ),
    "quantized": (
        lambda x: torch.quantize_per_tensor(x, 1.0, 0, torch.quint8).dequantize(),
        "(shape execution does not support quantized tensors)",
    ),
    "packed": (
        lambda x: torch.ops.quantized.linear_dynamic(x, torch.ops.quantized.linear_prepack(PACKED, None)),
        "torch cannot infer its result without values",
    ),
    "mkldnn": (lambda x: x.to_mkldnn().to_dense(), "torch cannot infer its result without values"),
}


@pytest.mark.parametrize("name", REASONS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_fallback_has_a_reason_in_own_words(name, caplog):
    forward, reason = REASONS[name]

    def model(x):
        return forward((x @ torch.ones(4, 4)).detach())

    with caplog.at_level(logging.WARNING):
        assert FlopCountAnalysis(model, torch.ones(3, 4), warn=False).total() >= 48
    (message,) = [record.getMessage() for record in caplog.records]
    assert reason in message and message.endswith("; used real execution instead")
    with pytest.raises(ExecutionError, match=r': use execution="auto"') as caught:
        FlopCountAnalysis(model, torch.ones(3, 4), execution="shapes").total()
    for text in (message, str(caught.value)):
        assert reason in text and "\n" not in text and len(text) < 300
        assert not any(word in text for word in ("FakeTensor", "INTERNAL ASSERT", "report a bug", "https://", "Error:"))
