"""ptflops itself, run beside `table="ptflops"`: its number is equal, for a model and a module, but for a short list."""

import io
from contextlib import redirect_stdout
from functools import cache
from importlib.metadata import version

import ptflops
import pytest
import torch
import torch.nn.functional as F
from ptflops.pytorch_engine import add_flops_counting_methods
from torch import nn

from fvflops import FlopCountAnalysis, load_table
from fvflops.trace import Status
from tests.support.models.parts import Applied
from tests.support.models.peer_cases import build
from tests.support.models.whole_models import Function
from tests.support.peer_counts import CASES, REAL, USUAL_CASES, calm, count_case
from tests.support.random_cases import long_except

TABLE = load_table("ptflops")


def _case(function, *sizes):
    return lambda: (Function(function).eval(), tuple(torch.randn(size) for size in sizes))


_LINE, _IMAGE, _VOLUME = (2, 3, 8), (2, 3, 8, 6), (2, 3, 4, 8, 6)

# What is called is looked up by name at each call, as ptflops replaces it only while it counts.
FUNCTIONS = {
    "F.relu": _case(lambda x: F.relu(x), _LINE),
    "F.relu, in place": _case(lambda x: F.relu(x + 1, inplace=True), _LINE),
    "F.relu6": _case(lambda x: F.relu6(x), _LINE),
    "F.elu": _case(lambda x: F.elu(x), _LINE),
    "F.gelu": _case(lambda x: F.gelu(x), _LINE),
    "F.silu": _case(lambda x: F.silu(x), _LINE),
    "F.prelu": _case(lambda x, weight: F.prelu(x, weight), _LINE, (3,)),
    "F.avg_pool1d": _case(lambda x: F.avg_pool1d(x, 2), _LINE),
    "F.avg_pool2d": _case(lambda x: F.avg_pool2d(x, 2), _IMAGE),
    "F.avg_pool3d": _case(lambda x: F.avg_pool3d(x, 2), _VOLUME),
    "F.max_pool1d": _case(lambda x: F.max_pool1d(x, 2), _LINE),
    "F.max_pool2d": _case(lambda x: F.max_pool2d(x, 2), _IMAGE),
    "F.max_pool3d": _case(lambda x: F.max_pool3d(x, 2), _VOLUME),
    "F.max_pool1d with indices": _case(lambda x: F.max_pool1d(x, 2, return_indices=True)[0], _LINE),
    "F.max_pool2d with indices": _case(lambda x: F.max_pool2d(x, 2, return_indices=True)[0], _IMAGE),
    "F.max_pool3d with indices": _case(lambda x: F.max_pool3d(x, 2, return_indices=True)[0], _VOLUME),
    "F.adaptive_avg_pool1d": _case(lambda x: F.adaptive_avg_pool1d(x, 2), _LINE),
    "F.adaptive_avg_pool2d": _case(lambda x: F.adaptive_avg_pool2d(x, 2), _IMAGE),
    "F.adaptive_avg_pool3d": _case(lambda x: F.adaptive_avg_pool3d(x, 2), _VOLUME),
    "F.adaptive_max_pool1d": _case(lambda x: F.adaptive_max_pool1d(x, 2), _LINE),
    "F.adaptive_max_pool2d": _case(lambda x: F.adaptive_max_pool2d(x, 2), _IMAGE),
    "F.adaptive_max_pool3d": _case(lambda x: F.adaptive_max_pool3d(x, 2), _VOLUME),
    "F.interpolate, 1d": _case(lambda x: F.interpolate(x, scale_factor=2), _LINE),
    "F.interpolate, 2d": _case(lambda x: F.interpolate(x, (16, 9)), _IMAGE),
    "F.interpolate, 3d": _case(lambda x: F.interpolate(x, 9), _VOLUME),
    "F.interpolate, exact 1d": _case(lambda x: F.interpolate(x, 9, mode="nearest-exact"), _LINE),
    "F.interpolate, exact 2d": _case(lambda x: F.interpolate(x, 9, mode="nearest-exact"), _IMAGE),
    "F.interpolate, exact 3d": _case(lambda x: F.interpolate(x, 9, mode="nearest-exact"), _VOLUME),
    "F.interpolate, linear": _case(lambda x: F.interpolate(x, 9, mode="linear"), _LINE),
    "F.interpolate, bilinear": _case(lambda x: F.interpolate(x, scale_factor=(2, 3), mode="bilinear"), _IMAGE),
    "F.interpolate, smooth": _case(lambda x: F.interpolate(x, 5, mode="bilinear", antialias=True), _IMAGE),
    "F.interpolate, trilinear": _case(lambda x: F.interpolate(x, 9, mode="trilinear"), _VOLUME),
    "F.interpolate, bicubic": _case(lambda x: F.interpolate(x, 9, mode="bicubic"), _IMAGE),
    "F.interpolate, smooth bicubic": _case(lambda x: F.interpolate(x, 5, mode="bicubic", antialias=True), _IMAGE),
    "F.interpolate by 1.5": _case(lambda x: F.interpolate(x, scale_factor=1.5), (2, 3, 3, 3)),
    "F.interpolate, area": _case(lambda x: F.interpolate(x, 2, mode="area"), _IMAGE),
    "torch.mm": _case(lambda a, b: torch.mm(a, b), (4, 5), (5, 6)),
    "torch.bmm": _case(lambda a, b: torch.bmm(a, b), (2, 4, 5), (2, 5, 6)),
    "x.bmm": _case(lambda a, b: a.bmm(b), (2, 4, 5), (2, 5, 6)),
    "torch.addmm": _case(lambda x, a, b: torch.addmm(x, a, b), (6,), (4, 5), (5, 6)),
    "torch.addmm, beta 0": _case(lambda x, a, b: torch.addmm(x, a, b, beta=0), (6,), (4, 5), (5, 6)),
    "torch.baddbmm": _case(lambda x, a, b: torch.baddbmm(x, a, b), (2, 4, 6), (2, 4, 5), (2, 5, 6)),
    # of one op, the way to call it that the table takes, and the other
    "torch.relu": _case(lambda x: torch.relu(x), _LINE),
    "a @ b": _case(lambda a, b: a @ b, (2, 4, 5), (5, 6)),
    "torch.matmul": _case(lambda a, b: torch.matmul(a, b), (2, 4, 5), (5, 6)),
    "x.softmax": _case(lambda x: x.softmax(-1), _LINE),
    "F.softmax": _case(lambda x: F.softmax(x, dim=-1), _LINE),
    "a + b": _case(lambda a, b: a + b, _LINE, _LINE),
    "torch.add": _case(lambda a, b: torch.add(a, b), _LINE, _LINE),
    "a * b": _case(lambda a, b: a * b, _LINE, _LINE),
    "torch.mul": _case(lambda a, b: torch.mul(a, b), _LINE, _LINE),
    # what ptflops does not replace
    "F.linear": _case(lambda x, weight: F.linear(x, weight), _LINE, (5, 8)),
    "F.conv1d": _case(lambda x, weight: F.conv1d(x, weight), _LINE, (5, 3, 3)),
    "F.leaky_relu": _case(lambda x: F.leaky_relu(x), _LINE),
    "F.scaled_dot_product_attention": _case(lambda x: F.scaled_dot_product_attention(x, x, x), _LINE),
}

# Case → why its number differs. Nothing else may differ, and each of these must.
KNOWN_DIFFERENCES = {
    "toy": "it calls torch.relu, which ptflops does not count, where others call F.relu",
    "torchvision:swin_t": "it calls x.matmul and F.softmax, which ptflops counts, where others call `@` and x.softmax",
    "timm:coat_lite_tiny": "modules stand at several places: ptflops counts each with all its calls at each place",
    "shared": "a module stands at two places: ptflops counts it with all its calls at each place",
    "renamed": "a subclass of nn.Linear that changes nothing: ptflops goes by the very class, and counts 0",
    "upsample by 1.5": "the scale is not whole: ptflops counts the input times the scale, the table the output",
    "F.interpolate by 1.5": "the scale is not whole: ptflops counts the input times the scale, the table the output",
    "F.interpolate, area": "ptflops counts this and the adaptive pooling that it calls, which alone is the op",
    "encoder layer": "it looks F.relu up when it is made, so that ptflops, which replaces it later, does not see it",
    "decoder layer": "it looks F.relu up when it is made, so that ptflops, which replaces it later, does not see it",
    "torch.relu": "ptflops replaces F.relu alone",
    "torch.matmul": "ptflops counts this, and not `@`, which runs the same op",
    "F.softmax": "ptflops counts this, and not x.softmax, which runs the same op",
    "torch.add": "ptflops counts this, and not `+`, which runs the same op",
    "torch.mul": "ptflops counts this, and not `*`, which runs the same op",
}
# This class has a test of its own.
DEFORMABLE = "torchvision.ops.deform_conv.DeformConv2d"
# Cases that ptflops fails on: it asks a packed sequence for its shape.
FAILURES = {"rnn, packed", "gru, packed", "lstm, packed"}
# As the ops are called where autograd sees them, which is not how a count without gradients sees them.
AS_AUTOGRAD_CALLS_THEM = {"aten::_prelu_kernel", "aten::_adaptive_avg_pool2d", "aten::_adaptive_avg_pool3d"}


def ask_ptflops(model, inputs):
    """Return ptflops' number of a model with all its inputs, None where it fails; it prints a lot."""
    with redirect_stdout(io.StringIO()):
        macs, _ = ptflops.get_model_complexity_info(
            Applied(lambda self, inputs: self.model(*inputs), model=model),
            (1,),
            input_constructor=lambda size: {"inputs": inputs},
            as_strings=False,
            print_per_layer_stat=False,
        )
    return macs


@cache
def measure(name):
    """Return what fvflops says of a case, and ptflops' number."""
    model, inputs = FUNCTIONS[name]() if name in FUNCTIONS else build(name)
    with calm():
        return count_case((model, inputs), TABLE), ask_ptflops(model, inputs)


def test_the_table_names_the_version_that_is_installed():
    assert TABLE.description.startswith(f"ptflops {version('ptflops')}'s")


@pytest.mark.parametrize(
    "name",
    long_except(*([name for name in (*cases, *FUNCTIONS) if name not in FAILURES] for cases in (USUAL_CASES, CASES))),
)
def test_the_number_is_ptflops(name):
    ours, theirs = measure(name)
    assert theirs is not None
    assert (ours.by_module[""] != theirs) == (name in KNOWN_DIFFERENCES), (ours.by_module[""], theirs)


@pytest.mark.parametrize("name", sorted(FAILURES))
def test_ptflops_fails_where_this_file_says(name, capsys):
    assert measure(name)[1] is None
    assert "'PackedSequence' object has no attribute 'shape'" in capsys.readouterr().err


def test_the_known_differences_are_few():
    assert KNOWN_DIFFERENCES.keys() <= {*CASES, *FUNCTIONS}
    assert len(set(REAL) - KNOWN_DIFFERENCES.keys()) >= 20


@pytest.mark.parametrize("name", ["torchvision:convnext_tiny", "torchvision:mobilenet_v2", "encoder layer"])
def test_the_number_of_each_module_is_ptflops(name):
    """Without the functions that it replaces, ptflops has a number at each module of a class that it counts."""
    model, inputs = build(name)
    with calm(), redirect_stdout(io.StringIO()):
        counter = add_flops_counting_methods(model)
        counter.start_flops_count(ost=io.StringIO(), verbose=False, ignore_list=[])
        counter(*inputs)
        theirs = {path: module.__flops__ for path, module in model.named_modules() if hasattr(module, "__flops__")}
        counter.stop_flops_count()
    twice = {path for path, module in model.named_modules() if isinstance(module, (nn.GELU, nn.AdaptiveAvgPool2d))}
    ours = measure(name)[0].by_module
    assert {path: ours[path] for path in theirs} == {
        path: macs * (1 + (path in twice)) for path, macs in theirs.items()
    }
    assert len(theirs) >= 5


def test_a_positional_batch_divides_what_modules_count_and_not_what_functions_count():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(4, 8)
    with redirect_stdout(io.StringIO()):
        theirs, _ = ptflops.get_model_complexity_info(
            model, (1,), input_constructor=lambda size: {"input": x}, as_strings=False, print_per_layer_stat=False
        )
    assert theirs == FlopCountAnalysis(model, x, table=TABLE).total() == 4 * (72 + 8 + 8)
    model, one = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), (8,)
    with redirect_stdout(io.StringIO()):
        theirs, _ = ptflops.get_model_complexity_info(model, one, as_strings=False, print_per_layer_stat=False)
    assert theirs == 72 + 8 + 8


@pytest.mark.parametrize("masked", [False, True])
def test_a_deformable_convolution_is_ptflops(masked, monkeypatch):
    """Neither side looks at what it computes, which torchvision can only where its library is there."""
    from torchvision.ops import DeformConv2d, deform_conv

    monkeypatch.setattr(deform_conv, "deform_conv2d", lambda x, *_, **__: x.new_zeros(2, 6, 4, 3))
    layer = DeformConv2d(4, 6, 3, stride=2, groups=2).eval()
    x, offset, mask = torch.randn(2, 4, 9, 7), torch.randn(2, 18, 4, 3), torch.randn(2, 9, 4, 3)
    inputs = (x, offset, mask) if masked else (x, offset)
    ours = count_case((layer, inputs), TABLE)
    assert ours.by_module[""] == ask_ptflops(layer, inputs)
    assert ours.classes == {DEFORMABLE}


def test_every_row_is_used():
    counted = [measure(name)[0] for name in [*USUAL_CASES, *FUNCTIONS]]
    classes = frozenset().union(*(ours.classes for ours in counted))
    assert TABLE.modules.keys() == classes | {DEFORMABLE}
    ops = {entry.op for ours in counted for entry in ours.counts.entries if entry.status is Status.COUNTED}
    used = {row.name for op in ops if (row := TABLE.row(op)) is not None}
    assert {name for name, row in TABLE.rows.items() if row.kind == "counted"} == used | AS_AUTOGRAD_CALLS_THEM
    assert not used & AS_AUTOGRAD_CALLS_THEM


def test_what_ptflops_does_not_see_is_omitted_and_not_unknown():
    ours, _ = measure("F.scaled_dot_product_attention")
    statuses = {entry.op: entry.status.name for entry in ours.counts.entries}
    assert statuses == {"aten::scaled_dot_product_attention": "IGNORED"}
