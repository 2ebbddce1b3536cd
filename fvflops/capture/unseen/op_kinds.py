"""Ops that do not write their results' contents: uninitialised memory, copies, metadata."""

from __future__ import annotations

# Ops that return uninitialised memory.
UNINITIALISED = frozenset(
    f"aten::{name}"
    for name in (
        *("empty.memory_format", "empty.names", "empty.out", "empty_like", "empty_permuted", "empty_strided"),
        *("new_empty", "new_empty_strided", "empty_quantized", "_empty_affine_quantized"),
    )
)
# Ops that read only an argument's shape or dtype, as views do.
METADATA_ONLY = frozenset(
    f"aten::{name}"
    for name in (
        *("zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like", "randint_like.low_dtype"),
        *("new_zeros", "new_ones", "new_full", "expand_as", "view_as", "reshape_as", "type_as", "is_same_size"),
        *(
            "_shape_as_tensor",
            "result_type.Tensor",
            "result_type.Scalar",
            "resize_",
            "resize_as_",
            "set_.source_Tensor",
        ),
        *("lift_fresh", "record_stream", "_has_compatible_shallow_copy_type"),
    )
)
# Ops whose result has the contents of the argument.
COPIES = frozenset(
    f"aten::{name}"
    for name in (
        *("clone", "contiguous", "_to_copy", "to.dtype", "to.dtype_layout", "to.device", "to.other", "alias", "detach"),
        *("cpu", "cuda", "pin_memory", "view_as_real", "view_as_complex"),
    )
)
# Ops that create a tensor on an existing storage.
SET_STORAGE = "aten::set_.source_Storage"
