"""Triton kernels that a program launches itself are recorded by name, with their parameters, in every execution."""

import os

import pytest
import torch
from torch import nn

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels run in Python, on the CPU

triton = pytest.importorskip("triton", reason="triton has no package for this platform")
tl = pytest.importorskip("triton.language")
interpreter = pytest.importorskip("triton.runtime.interpreter")
if not torch.cuda.is_available() and not hasattr(interpreter.InterpretedFunction, "run"):
    pytest.skip(f"the interpreter of triton {triton.__version__} has no method that runs", allow_module_level=True)

from fvflops import FlopCountAnalysis, TrainingStepAnalysis, load_table, record  # noqa: E402
from tests.support.models.unseen_work import Unseen  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LINEAR = 512


@triton.jit
def double(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    tl.store(out_ptr + offsets, 2 * tl.load(x_ptr + offsets, mask=inside), mask=inside)


with_heuristics = triton.heuristics({"BLOCK": lambda arguments: 32})(double)
try:
    tuned = triton.autotune([triton.Config({"BLOCK": 16}), triton.Config({"BLOCK": 32})], key=["n"])(double)
except RuntimeError as error:
    pytest.skip(f"triton {triton.__version__} tunes kernels beside a GPU only: {error}", allow_module_level=True)


def _launch(kernel, x, **options):
    out = torch.empty_like(x)
    kernel[(triton.cdiv(x.numel(), 16),)](x, out, x.numel(), **options)
    return out


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return _launch(double, x, BLOCK=16)

    @staticmethod
    def backward(ctx, grad):
        return _launch(double, grad.contiguous(), BLOCK=16)


WAYS = {
    "directly": lambda x: _launch(double, x, BLOCK=16),
    "with heuristics": lambda x: _launch(with_heuristics, x),
    "in a Function": _Double.apply,
}
if DEVICE == "cuda":  # to tune is to time on a GPU
    WAYS["by an autotuner"] = lambda x: _launch(tuned, x)


def _net(way):
    return nn.Sequential(nn.Linear(8, 8), Unseen(WAYS[way]), nn.Linear(8, 8)).to(DEVICE)


@pytest.mark.parametrize("execution", ["auto", "real", pytest.param("shapes", marks=pytest.mark.long)])
@pytest.mark.parametrize("way", WAYS)
def test_a_launch_is_unknown_by_the_kernel_s_name(way, execution):
    x = torch.ones(4, 8, device=DEVICE)
    analysis = FlopCountAnalysis(_net(way), x, execution=execution).unsupported_ops_warnings(False)
    assert analysis.total() == LINEAR
    assert analysis.unsupported_ops("1") == {"triton::double": 1}
    (signature,) = [item for item in analysis.trace().signatures if item.op == "triton::double"]
    arguments = dict(zip(signature.names, signature.inputs, strict=True))
    assert list(arguments) == ["x_ptr", "out_ptr", "n", "BLOCK"]
    assert arguments["n"] == 32 and arguments["x_ptr"].shape == (4, 8)
    assert [output.shape for output in signature.outputs] == [(4, 8)]
    assert signature.source.startswith("tests/capture/test_triton.py:")
    assert analysis.trace().about["execution"] == ("real" if execution == "real" else "shapes")


@pytest.mark.parametrize("way", WAYS)
def test_a_row_prices_a_launch_by_its_parameters(way, tmp_path):
    path = tmp_path / "rows.yaml"
    path.write_text("extends: default\nops:\n  triton::double: {flops: numel(x_ptr) + n}\n")
    analysis = FlopCountAnalysis(_net(way), torch.ones(4, 8, device=DEVICE), table=load_table(str(path)))
    assert analysis.total() == LINEAR + 32 + 32


def test_the_kernel_still_computes():
    model = _net("directly")
    x = torch.randn(4, 8, device=DEVICE)
    expected = model(x)
    with record(model) as run:
        found = model(x)
    assert torch.equal(found, expected)
    assert run.unsupported_ops() == {"triton::double": 1}
    assert torch.equal(model(x), expected)


def test_launches_of_a_training_step_are_recorded_in_both_passes():
    model, x = _net("in a Function"), torch.ones(4, 8, device=DEVICE)
    step = TrainingStepAnalysis(model, x, loss=torch.Tensor.sum).unsupported_ops_warnings(False)
    with record(model) as run:
        model(x).sum().backward()
    for found in (step, run):
        phases = {entry.phase: entry.calls for entry in found.counts().entries if entry.op == "triton::double"}
        assert phases == {"forward": 1, "backward": 1}


def test_a_kernel_is_left_as_it_was():
    launchers = [type(kernel) for kernel in (double, with_heuristics, tuned)]
    before = [vars(launcher)["run"] for launcher in launchers]
    FlopCountAnalysis(_net("directly"), torch.ones(4, 8, device=DEVICE)).total()
    assert [vars(launcher)["run"] for launcher in launchers] == before
