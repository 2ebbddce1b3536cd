"""Traffic rules of ops that do not read or write all of their arguments.

Each entry is an exception to the general rule of `fvflops.counting.traffic.traffic`, which uses an op's schema only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod

from fvflops.trace import Signature, TensorSpec, Value, tensors_in

_INDEX_BYTES = 8  # indices of sparse tensors are int64
_BLOCKED = frozenset({"sparse_bsr", "sparse_bsc"})
_COMPRESSED_DIMENSION = {"sparse_csr": -2, "sparse_csc": -1}


def _aten(names: str) -> frozenset[str]:
    return frozenset(f"aten::{name}" for name in names.split())


# Ops that access no elements: allocation without initialisation, in-place changes of a tensor's shape or storage, and
# queries of metadata.
MOVES_NOTHING = _aten(
    "empty empty_like empty_permuted empty_strided empty_quantized new_empty new_empty_strided _efficientzerotensor"
    " as_strided_ detach_ resize_ resize_as_ _resize_output_ set_ squeeze_ swapaxes_ swapdims_ t_ transpose_"
    " unsqueeze_ _shape_as_tensor _fused_sdp_choice _nnz is_same_size _assert_tensor_metadata"
    " _has_compatible_shallow_copy_type _has_same_storage_numel"
) | {"profiler::_record_function_enter", "profiler::_record_function_enter_new", "profiler::_record_function_exit"}
# Views whose schemas have no alias annotation.
VIEWS = _aten(
    "_unsafe_view unsafe_split unsafe_split_with_sizes unsafe_chunk broadcast_tensors meshgrid atleast_1d"
    " atleast_2d atleast_3d lift"
)
# Ops that return their input or a view of it if possible, else a copy.
MAY_COPY = _aten(
    "reshape reshape_as flatten ravel contiguous to type_as cpu cuda pin_memory resolve_conj resolve_neg"
    " _autocast_to_full_precision _autocast_to_reduced_precision coalesce"
)
# Ops that return their input in eval mode.
DROPOUTS = frozenset(
    f"aten::{kind}dropout{suffix}" for kind in ("", "alpha_", "feature_", "feature_alpha_") for suffix in ("", "_")
)
# Ops that overwrite their first argument without reading it.
OVERWRITES = _aten(
    "copy_ fill_ zero_ _foreach_copy_ _foreach_zero_ bernoulli_ cauchy_ exponential_ geometric_ log_normal_ normal_"
    " random_ uniform_ _no_grad_fill_ _no_grad_zero_ _no_grad_normal_ _no_grad_uniform_ _copy_from"
)


def bytes_of(spec: TensorSpec) -> int:
    """Return the bytes of a tensor; of a sparse one, of its stored elements and their indices."""
    if spec.nnz is None:
        return spec.nbytes
    values = replace(spec, shape=(spec.nnz,)).nbytes
    if spec.layout in _BLOCKED:
        return values
    if spec.layout in _COMPRESSED_DIMENSION:
        compressed = spec.shape[_COMPRESSED_DIMENSION[spec.layout]]
        batches = prod(spec.shape[:-2])
        return values + _INDEX_BYTES * (spec.nnz + batches * (compressed + 1))
    return values + _INDEX_BYTES * spec.nnz * spec.ndim


def bytes_in(value: Value) -> int:
    return sum(map(bytes_of, tensors_in(value)))


_Bytes = Callable[[Signature], int]
# Name of an argument → its bytes.
_ByArgument = Mapping[str, _Bytes]


def argument_of(signature: Signature, name: str) -> Value:
    """Return the value of an argument, None where the op has no such argument."""
    return dict(zip(signature.names, signature.inputs, strict=False)).get(name)


def _spec(signature: Signature, name: str) -> TensorSpec:
    value = argument_of(signature, name)
    return value if isinstance(value, TensorSpec) else TensorSpec((0,))


def _elements_of(count: int, spec: TensorSpec) -> int:
    """Return the bytes of `count` elements of a tensor, at most all."""
    return replace(spec, shape=(min(count, spec.numel),)).nbytes


def _none(_: Signature) -> int:
    return 0


def _as_results(signature: Signature) -> int:
    return bytes_in(signature.outputs[:1])


def _one_for_each(index: str, name: str) -> _Bytes:
    """Return a function for the bytes of an element of an argument for each element of another, `index`."""
    return lambda signature: _elements_of(_spec(signature, index).numel, _spec(signature, name))


def _rows(name: str, table: str) -> _Bytes:
    """Return a function for the bytes of the table's rows that an argument's indices select."""

    def count(signature: Signature) -> int:
        spec = _spec(signature, table)
        return replace(spec, shape=(_spec(signature, name).numel, *spec.shape[1:])).nbytes

    return count


def _indexed_bytes(signature: Signature) -> int:
    spec, indices = _spec(signature, "self"), argument_of(signature, "indices")
    by_axis = indices if isinstance(indices, tuple) else ()
    tensors = list(tensors_in(by_axis))
    if any(tensor.dtype in ("bool", "uint8") for tensor in tensors):
        values = _spec(signature, "values")
        return bytes_of(spec) if values.numel == 1 else _elements_of(values.numel, spec)
    unindexed = [size for axis, size in enumerate(spec.shape) if axis >= len(by_axis) or by_axis[axis] is None]
    shapes = [tensor.shape for tensor in tensors]
    ndim = max(map(len, shapes), default=0)
    padded = [(1,) * (ndim - len(shape)) + shape for shape in shapes]
    positions = prod(max(sizes) for sizes in zip(*padded, strict=True))
    return replace(spec, shape=(positions, *unindexed)).nbytes


def _accumulated_bytes(signature: Signature) -> int:
    return _indexed_bytes(signature) if argument_of(signature, "accumulate") else 0


def _slices_for_indices(signature: Signature) -> int:
    """Return the bytes of a slice of `self` along `dim` for each index."""
    spec, dim = _spec(signature, "self"), argument_of(signature, "dim")
    size = spec.shape[dim] if isinstance(dim, int) and spec.shape else 1
    return _elements_of(spec.numel // max(size, 1) * _spec(signature, "index").numel, spec)


def _bytes_if_training(name: str) -> _Bytes:
    """Return a function for the bytes of a running statistic if it is updated, else 0."""

    def count(signature: Signature) -> int:
        trains = any(argument_of(signature, flag) is True for flag in ("training", "train", "use_input_stats"))
        return bytes_in(argument_of(signature, name)) if trains else 0

    return count


def _unscaled_gradients(signature: Signature) -> int:
    return 0 if argument_of(signature, "grad_scale") is None else bytes_in(argument_of(signature, "grads"))


def _unless_ignored(signature: Signature) -> int:
    """Bytes of the added tensor, which these ops ignore where beta is 0 (torch's documentation of `torch.addmm`)."""
    ignored = argument_of(signature, "beta") == 0
    return 0 if ignored else bytes_in(argument_of(signature, "self"))


# Names of ops in aten, and which bytes of their arguments they read and write.
_RULES: tuple[tuple[str, _ByArgument, _ByArgument], ...] = (
    ("addmm addmm_ baddbmm baddbmm_ addbmm addbmm_ addmv addmv_", {"self": _unless_ignored}, {}),
    # Only the selected rows of a table are read.
    ("embedding", {"weight": _as_results}, {}),
    ("embedding_bag _embedding_bag _embedding_bag_forward_only", {"weight": _rows("indices", "weight")}, {}),
    ("embedding_renorm_", {"self": _rows("indices", "self")}, {"self": _rows("indices", "self")}),
    ("index _unsafe_index index_select gather take take_along_dim masked_select", {"self": _as_results}, {}),
    # One element of each row of log probabilities is read.
    (
        "nll_loss nll_loss_nd nll_loss2d nll_loss_forward nll_loss2d_forward",
        {"self": _one_for_each("target", "self")},
        {},
    ),
    # Only indexed elements are written: a KV cache receives the new positions.
    ("index_put_ _index_put_impl_ _unsafe_index_put_", {"self": _accumulated_bytes}, {"self": _indexed_bytes}),
    ("scatter_", {"self": _none, "src": _one_for_each("index", "src")}, {"self": _one_for_each("index", "self")}),
    (
        "scatter_add_ scatter_reduce_ scatter_.reduce scatter_.value_reduce",
        {"self": _one_for_each("index", "self"), "src": _one_for_each("index", "src")},
        {"self": _one_for_each("index", "self")},
    ),
    ("index_copy_ index_fill_", {"self": _none}, {"self": _slices_for_indices}),
    ("index_add_ index_reduce_", {"self": _slices_for_indices}, {"self": _slices_for_indices}),
    # These use the shape of `self`, not its elements.
    (
        "zeros_like ones_like full_like rand_like randn_like randint_like new_zeros new_ones new_full bernoulli.p"
        " max_pool2d_with_indices_backward max_pool3d_with_indices_backward adaptive_max_pool2d_backward"
        " adaptive_max_pool3d_backward fractional_max_pool2d_backward fractional_max_pool3d_backward"
        " avg_pool2d_backward avg_pool3d_backward adaptive_avg_pool3d_backward _adaptive_avg_pool2d_backward"
        " _adaptive_avg_pool3d_backward nll_loss_backward nll_loss2d_backward reflection_pad1d_backward"
        " reflection_pad2d_backward reflection_pad3d_backward replication_pad1d_backward replication_pad2d_backward"
        " replication_pad3d_backward",
        {"self": _none},
        {},
    ),
    ("type_as", {"other": _none}, {}),
    # The schemas do not mark running statistics as written, or mark them in eval mode too.
    (
        "batch_norm native_batch_norm cudnn_batch_norm miopen_batch_norm _native_batch_norm_legit"
        " _batch_norm_impl_index instance_norm",
        {},
        {name: _bytes_if_training(name) for name in ("running_mean", "running_var")},
    ),
    # Gradients are written only if they are unscaled for a gradient scaler.
    ("_fused_adam_ _fused_adamw_ _fused_sgd_ _fused_adagrad_", {}, {"grads": _unscaled_gradients}),
)
_RULE_OF_OP = {op: (reads, writes) for names, reads, writes in _RULES for op in _aten(names)}


def traffic_rule_of(signature: Signature) -> tuple[_ByArgument, _ByArgument]:
    """Return the arguments of which a call, by its overload or else its op, reads and writes other bytes than all."""
    return _RULE_OF_OP.get(signature.op) or _RULE_OF_OP.get(signature.packet) or ({}, {})
