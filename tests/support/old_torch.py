"""How the installed torch differs from the one that the tables are written for."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.flop_counter import flop_registry

from fvflops.torch_internals import too_old_message

# An older torch lacks some ops, or their kernels for the meta device.
WRITTEN_FOR = (2, 13)
VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
OLDER = VERSION < WRITTEN_FOR
# It dispatches a further `detach`, which costs nothing, for each mode on the stack.
REPEATS_DETACH = VERSION < (2, 10)
# The tables price ops that came after that version, and ops that went.
LATER = frozenset(
    (
        *("_c10d_functional::wait_tensors", "_native::_foreach_mm_native_1", "_native::bmm_triton_0"),
        *("aten::_cudnn_attention_forward_no_dropout_inplace", "aten::_philox_randint", "aten::_scaled_addmm"),
        *("aten::shallow_copy_data_", "c10d::gather_into_tensor_", "flex_gemm::autograd_not_implemented"),
        *("flex_gemm::to_blocked", "fsdp::chunk_cat_mixed_dtype", "fsdp::record_grad_output_stream"),
        *("inductor::quack_symmetric_mm", "symm_mem::_low_contention_all_gather_ce_multicast"),
        *("symm_mem::_low_contention_all_gather_ce_multicast_out", "symm_mem::memcpy_to_multicast_"),
        *("symm_mem::nccl_all_to_all_nd", "torchvision::_cuda_version", "torchvision::qroi_align"),
    )
)
GONE = frozenset(
    (
        *("_native::_foreach_mm_native_0", "aten::cholesky", "aten::qr"),
        *("prims::_low_memory_max_pool2d_offsets_to_indices", "prims::_low_memory_max_pool2d_with_offsets"),
    )
)


def needs(feature: str) -> pytest.MarkDecorator:
    """Skip a test of a feature with the refusal that a user reads, where torch is older than the feature's minimum."""
    message = too_old_message(feature)
    return pytest.mark.skipif(message is not None, reason=message or "")


def since(minor: int, reason: str) -> pytest.MarkDecorator:
    """Skip a test of what torch itself cannot do before 2.`minor`."""
    return pytest.mark.skipif((2, minor) > VERSION, reason=f"torch {torch.__version__}: {reason}")


def checkpoint_to_the_end(function, *args):
    """Checkpoint without early stop, but with it inside; torch 2.8 and older have no argument for it."""

    def run(*args):
        with set_checkpoint_early_stop(True):
            return function(*args)

    with set_checkpoint_early_stop(False):
        return checkpoint(run, *args, use_reentrant=False)


def may_lack(op: str) -> bool:
    """Return whether a supported torch may have no such op."""
    return OLDER or op in LATER or op in GONE


def forget_later_formulas():
    """Take from torch's counter the formulas that it got after the version that the convention `torch` follows."""
    for suffix in ("", "_backward"):
        flop_registry.pop(getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention_for_cpu{suffix}"), None)
