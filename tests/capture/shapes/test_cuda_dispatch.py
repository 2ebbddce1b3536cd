"""Ops that CUDA runs with other kernels than the CPU: torch's list of kernels has none that is unknown here."""

from importlib import resources

import pytest
import torch
import yaml
from torch import nn
from torch.nn import functional as F

from fvflops import TrainingStepAnalysis, predict_memory
from fvflops.plan.memory.workspaces import OWN_KERNELS
from fvflops.torch_internals import has_kernel_for_key
from fvflops.trace.spec import TensorSpec
from tests.support.models.parts import Applied
from tests.support.old_torch import OLDER, VERSION

# A composite op with kernels for these dispatch keys only is decomposed on dense tensors of the CPU and CUDA.
OTHER_KEYS = ("NestedTensor", "MPS", "XPU", "Sparse", "Mkldnn", "Quantized")
# Part of the name of an op that has a kernel for CUDA and none for the CPU → where a model runs it.
BY_RULE = {
    "_cudnn_rnn": "recurrent layers (cuda_kernels)",
    "cudnn_batch_norm": "batch and instance norm (cuda_kernels)",
    "cudnn_grid_sampler": "grid_sample (cuda_kernels)",
    "_thnn_fused": "LSTM and GRU cells (cuda_kernels)",
    "_fused_rms_norm_backward": "rms_norm (cuda_kernels)",
    "_scaled_dot_product": "attention (attention_kernels)",
    "_flash_attention": "attention",
    "_efficient_attention": "attention",
    "_cudnn_attention": "attention",
    "_fill_mem_eff_dropout_mask_": "attention",
    "native_dropout": "dropout (cuda_kernels)",
}
INSIDE = {
    "cudnn_convolution": "convolution",
    "miopen": "convolution, batch norm and recurrent layers of ROCm",
    "_conv_depthwise2d": "convolution",
    "conv_depthwise3d": "convolution",
    "_cudnn_ctc_loss": "ctc_loss with targets on the CPU: _ctc_loss is recorded",
    "_use_cudnn_ctc_loss": "ctc_loss's choice of a kernel",
    "_use_miopen_ctc_loss": "ctc_loss's choice of a kernel",
}
BY_NAME = {
    "_philox": "random keys",
    "cudnn_affine_grid_generator": "no function of torch.nn calls it",
    "_fused_dropout": "",
    "_masked_scale": "",
    "_cudnn_init_dropout_state": "",
    "_cslt": "2:4 sparsity",
    "_sparse_semi_structured": "2:4 sparsity",
    "_to_sparse_semi_structured": "2:4 sparsity",
    "_mixed_dtypes_linear": "",
    "int4pack": "quantised weights",
    "batch_norm_stats": "SyncBatchNorm",
    "batch_norm_elemt": "SyncBatchNorm",
    "batch_norm_gather_stats": "SyncBatchNorm",
    "batch_norm_backward": "SyncBatchNorm",
    "mm.dtype": "products with out_dtype=",
    "_scaled_grouped_mm": "float8",
    "_scaled_addmm": "float8, from torch 2.15 on",
    "record_stream": "no work",
    "_triton": "nested tensors",
}


@pytest.fixture(scope="module")
def kernels():
    """Op → the dispatch keys of its kernels, including kernels of the overload that it delegates to."""
    text = (resources.files("torchgen") / "packaged/ATen/native/native_functions.yaml").read_text()
    entries = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    own = {
        f"aten::{entry['func'].partition('(')[0]}": {
            key.strip() for keys in entry.get("dispatch", ()) for key in keys.split(",")
        }
        for entry in entries
    }
    for entry in entries:
        if "structured_delegate" in entry:
            own[f"aten::{entry['func'].partition('(')[0]}"] |= own[f"aten::{entry['structured_delegate']}"]
    return own


# The lists match the version of torch that the tables are written for, and newer ones.
listed = pytest.mark.skipif(OLDER, reason="the lists of ops match newer versions of torch")


@listed
def test_composite_ops_with_kernels_of_their_own_are_known(kernels):
    found = {}
    for op, keys in kernels.items():
        if "CompositeImplicitAutograd" in keys:
            kinds = tuple(sorted(key.lower() for key in keys & {"CPU", "CUDA"}))
            assert kinds or all(key.startswith((*OTHER_KEYS, "CompositeImplicit")) for key in keys), op
            if kinds:
                found[op] = kinds
    assert found == dict(OWN_KERNELS)


@listed
def test_torchs_list_of_kernels_matches_its_dispatcher(kernels):
    """A composite op with a kernel for autograd has kernels of its own on some device."""
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    assert len(names) > 3000
    composite = [name for name in names if has_kernel_for_key(name, "CompositeImplicitAutograd")]
    own = {name for name in composite if has_kernel_for_key(name, "Autograd") or has_kernel_for_key(name, "CPU")}
    listed = {op for op, keys in kernels.items() if "CompositeImplicitAutograd" in keys and len(keys) > 1}
    assert set(OWN_KERNELS) <= own <= listed


@listed
def test_kernels_that_only_cuda_has_have_a_rule_or_a_name(kernels):
    only = [
        op
        for op, keys in kernels.items()
        if "CUDA" in keys and "CPU" not in keys and not any(key.startswith("Composite") for key in keys)
    ]
    known = (*BY_RULE, *INSIDE, *BY_NAME)
    assert len(only) > 50 and [op for op in only if not any(part in op for part in known)] == []
    met = {part for part in known if any(part in op for op in only)}
    assert set(known) - met <= {"native_dropout", "_philox", "_scaled_addmm"}  # in some versions, the CPU has them too


fused = pytest.mark.skipif(VERSION < (2, 9), reason="CUDA has no fused RMSNorm before torch 2.9")


@fused
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_keeps_its_input_and_a_scale_for_each_row_on_cuda(dtype):
    """CUDA's kernel saves no float32 copies for the backward pass."""
    rows, width = 64, 128
    model = nn.Sequential(nn.Linear(width, width, bias=False), nn.RMSNorm(width)).to(dtype)
    step = TrainingStepAnalysis(model, torch.ones(rows, width, dtype=dtype), loss=torch.sum, device="cuda")
    timeline = predict_memory(step)
    ops = [signature.packet for signature in timeline.trace.signatures]
    assert ops.count("aten::_fused_rms_norm") == ops.count("aten::_fused_rms_norm_backward") == 1
    assert not {"aten::pow", "aten::mean", "aten::rsqrt"} & set(ops)
    events = timeline.trace.events
    kept = [
        (block.op, block.nbytes)
        for block in timeline.blocks
        if block.kind == "activation" and block.end is not None and events[block.end].phase == "backward"
        if events[block.begin].phase == "forward" and block.op != "aten::sum" and block.op != "aten::ones_like"
    ]
    assert kept == [("aten::mm", rows * width * dtype.itemsize), ("aten::_fused_rms_norm", 512)]  # rounded up
    on_cpu = predict_memory(step.varied(device="cpu"))
    assert "aten::_fused_rms_norm" not in {signature.packet for signature in on_cpu.trace.signatures}


def test_rms_norm_with_a_weight_of_another_dtype_is_decomposed_as_in_torch():
    trace = predict_memory(
        TrainingStepAnalysis(
            Applied(lambda self, x: F.rms_norm(x.bfloat16(), (8,), self.weight), weight=nn.Parameter(torch.ones(8))),
            torch.ones(4, 8),
            loss=torch.sum,
            device="cuda",
        )
    ).trace
    ops = {signature.packet for signature in trace.signatures}
    assert "aten::rsqrt" in ops and "aten::_fused_rms_norm" not in ops


def test_ops_of_other_libraries_run_under_autocast_as_cuda_runs_them():
    """Torchvision's ops have an AutocastCUDA kernel, which computes in float32 and returns the dtype of the input.

    Checkpointing recomputes in the same dtypes, and entering autocast again registers no kernel twice.
    """
    with torch.library._scoped_library("fvflops_autocast", "FRAGMENT") as library:
        library.define("rescale(Tensor x, Tensor rows) -> Tensor")
        library.impl("rescale", lambda x, rows: x * rows, "CompositeImplicitAutograd")
        library.impl("rescale", lambda x, rows: x, "AutocastCUDA")  # the emulation replaces it

        class Rescale(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear, self.rows = nn.Linear(8, 8), nn.Parameter(torch.ones(8))

            def forward(self, x):
                return torch.ops.fvflops_autocast.rescale(self.linear(x), self.rows)

        step = TrainingStepAnalysis(
            nn.Sequential(Rescale(), Rescale()),
            torch.ones(4, 8),
            loss=torch.sum,
            device="cuda",
            autocast=torch.bfloat16,
            checkpoint=[Rescale],
        )
        found = [signature for signature in step.trace().signatures if signature.packet in ("aten::mul", "aten::addmm")]
    dtypes = {(s.packet, spec.dtype) for s in found for spec in s.inputs if isinstance(spec, TensorSpec)}
    assert dtypes == {("aten::mul", "float32"), ("aten::addmm", "bfloat16")}
