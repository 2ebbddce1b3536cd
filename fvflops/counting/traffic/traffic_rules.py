"""Traffic rules of ops that do not read or write all of their arguments.

Each entry is an exception to the general rule of `fvflops.counting.traffic.traffic`, which uses an op's schema only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import prod

from fvflops.trace import Signature, TensorSpec, Value, tensors_in

_INDEX_BYTES = 8  # indices of sparse tensors are int64
_BLOCKED = frozenset({"sparse_bsr", "sparse_bsc"})
_COMPRESSED_DIMENSION = {"sparse_csr": -2, "sparse_csc": -1}

# Ops that access no elements: allocation without initialisation, in-place changes of a tensor's shape or storage, and
# queries of metadata.
MOVES_NOTHING = frozenset(
    {
        *("aten::empty", "aten::empty_like", "aten::empty_permuted", "aten::empty_strided", "aten::empty_quantized"),
        *("aten::new_empty", "aten::new_empty_strided", "aten::_efficientzerotensor"),
        *("aten::as_strided_", "aten::detach_", "aten::resize_", "aten::resize_as_", "aten::_resize_output_"),
        *("aten::set_", "aten::squeeze_", "aten::swapaxes_", "aten::swapdims_", "aten::t_", "aten::transpose_"),
        *("aten::unsqueeze_", "aten::_shape_as_tensor", "aten::_fused_sdp_choice", "aten::_nnz", "aten::is_same_size"),
        *("profiler::_record_function_enter", "profiler::_record_function_enter_new"),
        "profiler::_record_function_exit",
        *("aten::_assert_tensor_metadata", "aten::_has_compatible_shallow_copy_type", "aten::_has_same_storage_numel"),
    }
)
# Views whose schemas have no alias annotation.
VIEWS = frozenset(
    {
        *("aten::_unsafe_view", "aten::unsafe_split", "aten::unsafe_split_with_sizes", "aten::unsafe_chunk"),
        *("aten::broadcast_tensors", "aten::meshgrid", "aten::atleast_1d", "aten::atleast_2d", "aten::atleast_3d"),
        "aten::lift",
    }
)
# Ops that return their input or a view of it if possible, else a copy.
MAY_COPY = frozenset(
    {
        *("aten::reshape", "aten::reshape_as", "aten::flatten", "aten::ravel", "aten::contiguous", "aten::to"),
        *("aten::type_as", "aten::cpu", "aten::cuda", "aten::pin_memory", "aten::resolve_conj", "aten::resolve_neg"),
        *("aten::_autocast_to_full_precision", "aten::_autocast_to_reduced_precision", "aten::coalesce"),
    }
)
# Ops that return their input in eval mode.
DROPOUTS = frozenset(
    f"aten::{kind}dropout{suffix}" for kind in ("", "alpha_", "feature_", "feature_alpha_") for suffix in ("", "_")
)
# Ops that overwrite their first argument without reading it.
OVERWRITES = frozenset(
    {
        *("aten::copy_", "aten::fill_", "aten::zero_", "aten::_foreach_copy_", "aten::_foreach_zero_"),
        *("aten::bernoulli_", "aten::cauchy_", "aten::exponential_", "aten::geometric_", "aten::log_normal_"),
        *("aten::normal_", "aten::random_", "aten::uniform_", "aten::_no_grad_fill_", "aten::_no_grad_zero_"),
        *("aten::_no_grad_normal_", "aten::_no_grad_uniform_", "aten::_copy_from"),
    }
)


def bytes_of(spec: TensorSpec) -> int:
    """Return the bytes of a tensor; of a sparse one those of its stored elements and of their indices."""
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
    """Return the bytes of all tensors in a value."""
    return sum(map(bytes_of, tensors_in(value)))


_Bytes = Callable[[Signature], int]


@dataclass(frozen=True, slots=True)
class TrafficRule:
    """Bytes read or written by argument name, for the arguments that are exceptions to the general rule."""

    reads: Mapping[str, _Bytes] = field(default_factory=dict)
    writes: Mapping[str, _Bytes] = field(default_factory=dict)


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


def _one_for_each_target(signature: Signature) -> int:
    return _elements_of(_spec(signature, "target").numel, _spec(signature, "self"))


def _rows(name: str, table: str) -> _Bytes:
    """Return a function for the bytes of the table's rows that an argument's indices select."""

    def count(signature: Signature) -> int:
        spec = _spec(signature, table)
        return replace(spec, shape=(_spec(signature, name).numel, *spec.shape[1:])).nbytes

    return count


def _indexed_bytes(signature: Signature) -> int:
    """Return the bytes of `self[indices]`."""
    spec, indices = _spec(signature, "self"), argument_of(signature, "indices")
    by_axis = indices if isinstance(indices, tuple) else ()
    tensors = list(tensors_in(by_axis))
    if any(tensor.dtype in ("bool", "uint8") for tensor in tensors):
        values = _spec(signature, "values")
        return bytes_of(spec) if values.numel == 1 else _elements_of(values.numel, spec)
    unindexed = [size for axis, size in enumerate(spec.shape) if axis >= len(by_axis) or by_axis[axis] is None]
    shapes = [tensor.shape for tensor in tensors]
    positions = prod(max(sizes) for sizes in zip(*map(_aligned(max(map(len, shapes), default=0)), shapes), strict=True))
    return replace(spec, shape=(positions, *unindexed)).nbytes


def _aligned(ndim: int) -> Callable[[tuple[int, ...]], tuple[int, ...]]:
    return lambda shape: (1,) * (ndim - len(shape)) + shape


def _accumulated_bytes(signature: Signature) -> int:
    return _indexed_bytes(signature) if argument_of(signature, "accumulate") else 0


def _one_for_each_index(signature: Signature) -> int:
    return _elements_of(_spec(signature, "index").numel, _spec(signature, "self"))


def _sources_for_indices(signature: Signature) -> int:
    return _elements_of(_spec(signature, "index").numel, _spec(signature, "src"))


def _slices_for_indices(signature: Signature) -> int:
    """Return the bytes of a slice of `self` along `dim` for each index."""
    spec, dim = _spec(signature, "self"), argument_of(signature, "dim")
    size = spec.shape[dim] if isinstance(dim, int) and spec.shape else 1
    return _elements_of(spec.numel // max(size, 1) * _spec(signature, "index").numel, spec)


def _bytes_if_unscaled(name: str) -> _Bytes:
    """Return a function for the bytes of an argument if gradients are unscaled, else 0."""
    return lambda signature: (
        0 if argument_of(signature, "grad_scale") is None else bytes_in(argument_of(signature, name))
    )


def _bytes_if_training(name: str) -> _Bytes:
    """Return a function for the bytes of a running statistic if it is updated, else 0."""

    def count(signature: Signature) -> int:
        trains = any(argument_of(signature, flag) is True for flag in ("training", "train", "use_input_stats"))
        return bytes_in(argument_of(signature, name)) if trains else 0

    return count


_ALL = TrafficRule()


def _unless_ignored(signature: Signature) -> int:
    """Bytes of the added tensor, which these ops ignore where beta is 0 (torch's documentation of `torch.addmm`)."""
    ignored = argument_of(signature, "beta") == 0
    return 0 if ignored else bytes_in(argument_of(signature, "self"))


_LOOKED_UP = TrafficRule(reads={"self": _as_results})
_SHAPE_OF_SELF = TrafficRule(reads={"self": _none})
_SELECTED = TrafficRule(reads={"self": _one_for_each_target})
_INDEXED = TrafficRule(reads={"self": _accumulated_bytes}, writes={"self": _indexed_bytes})
_SCATTERED = TrafficRule(reads={"self": _none, "src": _sources_for_indices}, writes={"self": _one_for_each_index})
_SCATTER_ADDED = TrafficRule(
    reads={"self": _one_for_each_index, "src": _sources_for_indices}, writes={"self": _one_for_each_index}
)
_SLICES_SET = TrafficRule(reads={"self": _none}, writes={"self": _slices_for_indices})
_SLICES_ADDED = TrafficRule(reads={"self": _slices_for_indices}, writes={"self": _slices_for_indices})
_TRAINED = TrafficRule(writes={name: _bytes_if_training(name) for name in ("running_mean", "running_var")})
_STEPPED = TrafficRule(writes={"grads": _bytes_if_unscaled("grads")})

_TRAFFIC_RULES: Mapping[str, TrafficRule] = {
    **dict.fromkeys(
        (
            *("aten::addmm", "aten::addmm_", "aten::baddbmm", "aten::baddbmm_", "aten::addbmm", "aten::addbmm_"),
            *("aten::addmv", "aten::addmv_"),
        ),
        TrafficRule(reads={"self": _unless_ignored}),
    ),
    # Only the selected rows of a table are read.
    "aten::embedding": TrafficRule(reads={"weight": _as_results}),
    **dict.fromkeys(
        ("aten::embedding_bag", "aten::_embedding_bag", "aten::_embedding_bag_forward_only"),
        TrafficRule(reads={"weight": _rows("indices", "weight")}),
    ),
    "aten::embedding_renorm_": TrafficRule(
        reads={"self": _rows("indices", "self")}, writes={"self": _rows("indices", "self")}
    ),
    **dict.fromkeys(
        (
            *("aten::index", "aten::_unsafe_index", "aten::index_select", "aten::gather", "aten::take"),
            *("aten::take_along_dim", "aten::masked_select"),
        ),
        _LOOKED_UP,
    ),
    # One element of each row of log probabilities is read.
    **dict.fromkeys(
        (
            *("aten::nll_loss", "aten::nll_loss_nd", "aten::nll_loss2d"),
            *("aten::nll_loss_forward", "aten::nll_loss2d_forward"),
        ),
        _SELECTED,
    ),
    # Only indexed elements are written: a KV cache receives the new positions.
    **dict.fromkeys(("aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index_put_"), _INDEXED),
    "aten::scatter_": _SCATTERED,
    **dict.fromkeys(
        ("aten::scatter_add_", "aten::scatter_reduce_", "aten::scatter_.reduce", "aten::scatter_.value_reduce"),
        _SCATTER_ADDED,
    ),
    **dict.fromkeys(("aten::index_copy_", "aten::index_fill_"), _SLICES_SET),
    **dict.fromkeys(("aten::index_add_", "aten::index_reduce_"), _SLICES_ADDED),
    # These use the shape of `self`, not its elements.
    **dict.fromkeys(
        (
            *("aten::zeros_like", "aten::ones_like", "aten::full_like", "aten::rand_like", "aten::randn_like"),
            *("aten::randint_like", "aten::new_zeros", "aten::new_ones", "aten::new_full", "aten::bernoulli.p"),
            *("aten::max_pool2d_with_indices_backward", "aten::max_pool3d_with_indices_backward"),
            *("aten::adaptive_max_pool2d_backward", "aten::adaptive_max_pool3d_backward"),
            *("aten::fractional_max_pool2d_backward", "aten::fractional_max_pool3d_backward"),
            *("aten::avg_pool2d_backward", "aten::avg_pool3d_backward", "aten::adaptive_avg_pool3d_backward"),
            *("aten::_adaptive_avg_pool2d_backward", "aten::_adaptive_avg_pool3d_backward"),
            *("aten::nll_loss_backward", "aten::nll_loss2d_backward"),
            *(f"aten::{kind}_pad{rank}d_backward" for kind in ("reflection", "replication") for rank in (1, 2, 3)),
        ),
        _SHAPE_OF_SELF,
    ),
    "aten::type_as": TrafficRule(reads={"other": _none}),
    # The schemas do not mark running statistics as written, or mark them in eval mode too.
    **dict.fromkeys(
        (
            *("aten::batch_norm", "aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"),
            *("aten::_native_batch_norm_legit", "aten::_batch_norm_impl_index", "aten::instance_norm"),
        ),
        _TRAINED,
    ),
    # Gradients are written only if they are unscaled for a gradient scaler.
    **dict.fromkeys(
        ("aten::_fused_adam_", "aten::_fused_adamw_", "aten::_fused_sgd_", "aten::_fused_adagrad_"), _STEPPED
    ),
}


def traffic_rule_of(signature: Signature) -> TrafficRule:
    """Return the exceptions for a call, by its overload or else its op."""
    return _TRAFFIC_RULES.get(signature.op) or _TRAFFIC_RULES.get(signature.packet, _ALL)
