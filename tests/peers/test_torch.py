"""The conventions `torch` and `torch_profiler` beside the counters that torch ships."""

import warnings
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from fvflops import FlopCountAnalysis
from fvflops.capture.run import record_call
from fvflops.formulas import load_table
from fvflops.trace import TraceError
from tests.support.models.parts import Applied, Parts
from tests.support.models.whole_models import MODELS, USUAL, build_case
from tests.support.random_cases import long_except


class Layers(Parts):
    """The layers that the models lack: convolutions of other ranks, transposed ones, elementwise arithmetic."""

    def forward(self, x):
        x = self.back(self.one(x))
        rows = x.transpose(1, 2)
        mixed = self.attention(rows, rows, rows)[0] @ torch.ones(4, 4)
        picture = self.same(self.three(x[:, None, :, :, None].expand(-1, -1, -1, -1, 3)).flatten(3))
        tail = picture.add(1).mul(picture).sub(2).div(3).sum() * mixed.sum()
        return tail + self.bilinear(rows, rows).sum()


CASES = {
    **MODELS,
    "layers": lambda: (
        Layers(
            one=nn.Conv1d(4, 6, 3, groups=2),
            back=nn.ConvTranspose1d(6, 4, 3, stride=2, groups=2),
            three=nn.Conv3d(1, 2, 2),
            same=nn.Conv2d(2, 4, 3, padding="same"),
            attention=nn.MultiheadAttention(4, 2, batch_first=True),
            bilinear=nn.Bilinear(4, 4, 3),
        ),
        (torch.ones(2, 4, 9),),
    ),
    "recurrent": lambda: (
        Applied(
            lambda self, x: self.gru(x)[0].sum() + self.lstm(x)[0].mean() + self.cell(x[:, 0])[0].sum(),
            gru=nn.GRU(4, 5, bidirectional=True, batch_first=True),
            lstm=nn.LSTM(4, 5, batch_first=True),
            cell=nn.LSTMCell(4, 5),
        ),
        (torch.ones(2, 9, 4),),
    ),
}
NAMES = long_except((*USUAL, "layers", "recurrent"), CASES)

# Where the profiler sees more of the ops that it counts than a dispatch mode does, or fewer.
INSIDE_A_KERNEL = {
    "zoo:llama_tiny": "the profiler sees the mul of _fused_rms_norm, and the add of sizes in repeat",
    "timm:xcit_nano_12_p16_224": "the profiler sees the add of sizes in repeat",
    "timm:convit_tiny": "the profiler sees the add of sizes in repeat",
    "layers": "the profiler sees the bmm of _trilinear",
    "recurrent": "under a dispatch mode a GRU adds its gates with add, elsewhere with add_",
}


@contextmanager
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def count_by_mode(model, inputs):
    with quiet(), FlopCounterMode(display=False) as mode:
        model(*inputs)
    return mode


@pytest.mark.parametrize("name", NAMES)
def test_torch_counts_what_flop_counter_mode_counts(name):
    model, inputs = build_case(name, CASES)
    mode = count_by_mode(model, inputs)
    analysis = FlopCountAnalysis(model, inputs, table="torch")
    assert analysis.total() == mode.get_total_flops()
    ours = analysis.ancestor_mode("caller").by_module()
    root = type(model).__name__
    for name, counts in mode.get_flop_counts().items():
        module = name.removeprefix(root).removeprefix(".")
        if name.startswith(root) and module in ours:
            assert ours[module] == sum(counts.values()), module


@pytest.mark.parametrize("name", NAMES)
def test_torch_profiler_counts_what_the_profiler_counts(name):
    model, inputs = build_case(name, CASES)
    ours = FlopCountAnalysis(model, inputs, table="torch_profiler").total()
    with quiet(), profile(activities=[ProfilerActivity.CPU], with_flops=True, record_shapes=True) as profiler:
        model(*inputs)
    theirs = sum(event.flops for event in profiler.events())
    assert (ours == theirs) == (name not in INSIDE_A_KERNEL), f"{ours:,} beside {theirs:,}"


def backward_totals(model, inputs):
    trace = record_call(model, inputs, {}, loss=lambda result: result.sum(), stops_at=load_table("torch").stops_at)
    with FlopCounterMode(display=False) as mode:
        model(*inputs).sum().backward()
    return FlopCountAnalysis.from_trace(trace, table="torch").total(), mode.get_total_flops()


def test_resnet18_forward_and_backward():
    import torchvision

    image = torch.randn(1, 3, 224, 224, requires_grad=True)
    # Horace He's notebook on counting flops, of which FlopCounterMode came, has this figure, and torch's tests too.
    assert backward_totals(torchvision.models.resnet18(weights=None), (image,)) == (10_884_440_064, 10_884_440_064)


@pytest.mark.parametrize("name", ["torchvision:efficientnet_b0", "layers", "timm:resnest14d"])
def test_a_backward_pass_copies_the_bug_of_groups(name):
    model, inputs = build_case(name, CASES)
    ours, theirs = backward_totals(model, inputs)
    assert ours == theirs


@pytest.mark.parametrize("execution", ["shapes", "real"])
@pytest.mark.parametrize("name", ["layer", "attention"])
def test_a_fast_path_counts_as_with_gradients(name, execution):
    """Without gradients torch runs one fused op, and its counter says 0; the layers count here in either case."""
    x = torch.rand(2, 5, 16)
    model, inputs = {
        "layer": (nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), (x,)),
        "attention": (nn.MultiheadAttention(16, 2, batch_first=True), (x, x, x)),
    }[name]
    model.eval()
    with torch.no_grad():
        assert count_by_mode(model, inputs).get_total_flops() == 0
    analysis = FlopCountAnalysis(model, inputs, table="torch", execution=execution)
    assert analysis.total() == count_by_mode(model, inputs).get_total_flops() > 0


@pytest.mark.parametrize("op", ["_transformer_encoder_layer_fwd", "_native_multi_head_attention"])
def test_a_fused_op_is_omitted_as_torch_has_no_formula_for_it(op):
    """It is named among the unsupported ops, so that the zero is not silent."""
    assert getattr(torch.ops.aten, op) not in flop_registry
    row = load_table("torch").row(f"aten::{op}")
    assert row.kind == "ignored" and load_table("default").row(f"aten::{op}").kind == "counted"


def test_a_recording_of_composite_ops_says_what_the_table_cannot_count():
    """A loaded trace of layers recorded whole raises, never counting zero; with its own stops it has the ops inside."""
    model, x = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)).eval(), torch.rand(3, 16)
    with torch.inference_mode():
        expected = count_by_mode(model, (x,)).get_total_flops()
    whole, apart = (record_call(model, (x,), {}, stops_at=load_table(name).stops_at) for name in ("default", "torch"))
    assert expected == 2 * 3 * (16 * 8 + 8 * 4)
    with pytest.raises(TraceError, match="aten::linear as a whole"):
        FlopCountAnalysis.from_trace(whole, table="torch").counts()
    assert FlopCountAnalysis.from_trace(apart, table="torch").total() == expected
