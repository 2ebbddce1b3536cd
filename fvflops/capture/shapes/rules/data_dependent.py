"""Shape rules of ops with data-dependent output size, from an assumed size or from known values or lengths."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fvflops.capture.shapes.shape_tensor import DataDependentError
from fvflops.trace.calls import packet_of

Size = int | float


def selected_count(size: Size, total: int) -> int:
    """Return the assumed number of selected elements: an int, at most `total`, or a fraction of it, rounded up.

    >>> selected_count(3, 10), selected_count(30, 10), selected_count(0.25, 10)
    (3, 10, 3)
    """
    return min(int(size), total) if isinstance(size, int) else math.ceil(size * total)


def nonzero(size: Size, self: Tensor) -> Tensor:
    return self.new_empty((self.ndim, selected_count(size, self.numel())), dtype=torch.int64).t()


def nonzero_numpy(size: Size, self: Tensor) -> list[Tensor]:
    """Return the indices of the nonzero elements, one tensor per dimension, and one for a scalar."""
    return list(nonzero(size, self if self.ndim else self.unsqueeze(0)).unbind(1))


def masked_select(size: Size, self: Tensor, mask: Tensor) -> Tensor:
    return self.new_empty(selected_count(size, math.prod(torch.broadcast_shapes(self.shape, mask.shape))))


def masked_select_known(self: Tensor, mask: Tensor) -> Tensor:
    """Return the elements where a mask with known values is true; otherwise raise DataDependentError."""
    _require_values(mask, "aten::masked_select")
    shape = torch.broadcast_shapes(self.shape, mask.shape)
    return self.new_empty(int(mask.expand(shape).count_nonzero()))


def index(size: Size, self: Tensor, indices: list[Tensor | None]) -> Tensor:
    """Return the result of indexing; each mask among the indices selects the assumed number of elements."""
    positions: list[Tensor | None] = []
    for item in indices:
        if item is not None and item.dtype in (torch.bool, torch.uint8):
            count = selected_count(size, item.numel())
            positions.extend(item.new_empty(count, dtype=torch.int64, device="meta") for _ in range(item.ndim))
        else:
            positions.append(item)
    return torch.ops.aten.index.Tensor(self, positions)


def unique(
    size: Size, self: Tensor, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    return unique_consecutive(size, self, return_inverse, return_counts)


def unique_consecutive(
    size: Size, self: Tensor, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the first element of each group of consecutive equal ones, the inverse indices and the counts."""
    if dim is not None:
        return unique_dim(size, self, dim)
    count = selected_count(size, self.numel())
    inverse = self.new_empty(self.shape if return_inverse else 0, dtype=torch.int64)
    return self.new_empty(count), inverse, self.new_empty(count if return_counts else 0, dtype=torch.int64)


def unique_dim(size: Size, self: Tensor, dim: int, *_: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the distinct slices along a dimension, the inverse indices and the counts."""
    first = self.movedim(dim, 0)
    count = selected_count(size, len(first))
    counts = self.new_empty(count, dtype=torch.int64)
    values = self.new_empty((count, *first.shape[1:])).movedim(0, dim)
    return values, self.new_empty(len(first), dtype=torch.int64), counts


def repeat_interleave(size: Size, *args: Any, output_size: int | None = None) -> Tensor:
    """Return the elements, or slices along a dimension, each repeated; `size` is the total."""
    size = output_size if output_size is not None else size
    if len(args) == 1:  # repeats only: the result contains indices
        return args[0].new_empty(_result_count(size, args[0].numel()))
    self, _, *rest = args
    dim = rest[0] if rest else None
    if dim is None:
        return self.new_empty(_result_count(size, self.numel()))
    shape = list(self.shape)
    shape[dim] = _result_count(size, shape[dim])
    return self.new_empty(shape)


def bincount(size: Size, self: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    dtype = torch.int64 if weights is None else torch.float32 if weights.dtype is torch.float32 else torch.float64
    return self.new_empty(max(_result_count(size, self.numel()), minlength), dtype=dtype, device="meta")


def bincount_known(self: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    _require_values(self, "aten::bincount")
    return bincount(int(self.max()) + 1 if self.numel() else 0, self, weights, minlength)


def one_hot(size: Size, self: Tensor, num_classes: int = -1) -> Tensor:
    return self.new_empty((*self.shape, _result_count(size, self.numel())), dtype=torch.int64)


def one_hot_known(self: Tensor, num_classes: int = -1) -> Tensor:
    """Return one-hot rows with `num_classes`, or a number of classes from known values, else DataDependentError.

    The result is contiguous, as for real tensors; torch's own rule for meta tensors decomposes into a comparison.
    """
    if num_classes < 0:
        _require_values(self, "aten::one_hot")
        num_classes = int(self.max()) + 1
    return self.new_empty((*self.shape, num_classes), dtype=torch.int64)


def nms(size: Size, dets: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    return dets.new_empty(selected_count(size, len(dets)), dtype=torch.int64)


def combinations(self: Tensor, r: int = 2, with_replacement: bool = False) -> Tensor:
    """Return the combinations of r elements; their number is static, although torch computes it from a mask."""
    n = self.numel()
    return self.new_empty((math.comb(n + r - 1 if with_replacement else n, r), r) if r else (0,))


def _result_count(size: Size, total: int) -> int:
    """Return the assumed number of results, which may exceed the number of elements `total`."""
    return int(size) if isinstance(size, int) else selected_count(size, total)


def pack_padded_sequence(input: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """Return the packed elements [sum of lengths, *], and the batch size at each step, a real tensor with values."""
    _require_values(lengths, "aten::_pack_padded_sequence", "sequence lengths")
    one_feature = torch.empty(*input.shape[:2], 1)  # a real tensor, so that torch checks the lengths
    _, batch_sizes = torch.ops.aten._pack_padded_sequence(one_feature, lengths, batch_first)
    return input.new_empty((int(lengths.sum()), *input.shape[2:])), batch_sizes


def pad_packed_sequence(
    data: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: Any, total_length: int
) -> tuple[Tensor, Tensor]:
    """Return the padded elements [steps, batch, *] or [batch, steps, *], and the lengths, a real tensor."""
    _require_values(batch_sizes, "aten::_pad_packed_sequence", "batch sizes")
    one_feature = torch.empty(data.shape[0], 1)
    padded, lengths = torch.ops.aten._pad_packed_sequence(one_feature, batch_sizes, batch_first, 0.0, total_length)
    steps, batch = (padded.shape[1], padded.shape[0]) if batch_first else padded.shape[:2]
    output = data.new_empty((steps, batch, *data.shape[1:]))
    return (output.transpose(0, 1) if batch_first else output), lengths


def pack_padded_sequence_backward(
    grad: Tensor, input_size: Sequence[int], batch_sizes: Tensor, batch_first: bool
) -> Tensor:
    """Return the gradient of the padded input, [steps, batch, *] or [batch, steps, *]."""
    output = grad.new_empty(tuple(input_size) if not batch_first else (input_size[1], input_size[0], *input_size[2:]))
    return output.transpose(0, 1) if batch_first else output


def is_left_aligned(t: Tensor, mask: Tensor) -> bool:
    """Return whether the true elements of each row of the mask come first."""
    _require_values(mask, "aten::_nested_tensor_from_mask_left_aligned", "the mask's values")
    return bool(torch.ops.aten._nested_tensor_from_mask_left_aligned(torch.empty(*mask.shape, 1), mask))


def _require_values(tensor: Tensor, name: str, what: str = "values") -> None:
    if tensor.device.type == "meta":
        raise DataDependentError.of_op(name, what)


# By name without overload. A rule takes the assumed size, a number of results or a fraction, then the op's arguments.
SIZE_RULES: dict[str, Callable[..., Any]] = {
    "aten::_unique": lambda *args: unique(*args)[:2],
    "aten::_unique2": unique,
    "aten::_unsafe_index": index,
    "aten::argwhere": nonzero,
    "aten::bincount": bincount,
    "aten::index": index,
    "aten::masked_select": masked_select,
    "aten::nonzero": nonzero,
    "aten::nonzero_numpy": nonzero_numpy,
    "aten::one_hot": one_hot,
    "aten::repeat_interleave": repeat_interleave,
    "aten::unique_consecutive": unique_consecutive,
    "aten::unique_dim": unique_dim,
    "aten::unique_dim_consecutive": unique_dim,
    "aten::where": nonzero_numpy,
    "torchvision::nms": nms,
    "torchvision::qnms": nms,
}

# Ops whose only data-dependent overload is the unnamed one.
_UNNAMED_OVERLOAD = frozenset({"aten::where"})


def data_dependent_key(name: str) -> str:
    """Return an op's key in the tables of this module, "" for an overload that is not data-dependent.

    >>> [data_dependent_key(name) for name in ("aten::index.Tensor", "aten::where", "aten::where.self")]
    ['aten::index', 'aten::where', '']
    """
    packet = packet_of(name)
    return "" if packet in _UNNAMED_OVERLOAD and name != packet else packet


# Ops that keep at most all elements (boxes): this bound is their size, so that detection models need no assumption.
UPPER_BOUNDED = frozenset({"torchvision::nms", "torchvision::qnms"})

# By name without overload: ops that return a Python scalar.
SCALAR_RESULTS = frozenset(
    {"aten::_local_scalar_dense", "aten::allclose", "aten::equal", "aten::is_nonzero", "aten::item"}
)

DATA_DEPENDENT = frozenset(
    {
        *SIZE_RULES,
        *SCALAR_RESULTS,
        "aten::_ctc_loss.Tensor",  # log_alpha is as wide as the longest target
        *("aten::_nested_tensor_from_mask", "aten::_pack_padded_sequence", "aten::_pad_packed_sequence"),
        *("aten::_padded_dense_to_jagged_forward", "aten::_to_dense", "aten::narrow.Tensor"),
        *(f"aten::{kind}to_sparse{layout}" for kind in ("", "_") for layout in ("", "_bsc", "_bsr", "_csc", "_csr")),
        "aten::tensor_split.tensor_indices_or_sections",
    }
)

# Positions of the arguments whose values are read, for ops that do not read all of their tensors.
_DECISIVE = {
    "aten::bincount": (0,),
    "aten::_ctc_loss.Tensor": (2, 3),
    **{
        f"aten::{name}": (1,)
        for name in (
            *("_nested_tensor_from_mask", "_pack_padded_sequence", "_pad_packed_sequence", "masked_select"),
            *("_padded_dense_to_jagged_forward", "repeat_interleave.self_Tensor"),
            "tensor_split.tensor_indices_or_sections",
        )
    },
}
# Data-dependent ops whose results have a size that the arguments' shapes give.
_STATIC = frozenset({"aten::_to_dense", "aten::narrow.Tensor"})
_MASKS = (torch.bool, torch.uint8)


def depends_on_values(name: str) -> bool:
    """Return whether an op's result, or its size, depends on its arguments' values."""
    return name in DATA_DEPENDENT or data_dependent_key(name) in DATA_DEPENDENT


def reads_values(name: str) -> bool:
    """Return whether an op may read values, to return them to Python or to determine the size of a result."""
    return depends_on_values(name) and name not in _STATIC


def tensors_read(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors whose values a call reads, to return them to Python or to determine the size of its result.

    >>> x = torch.arange(3)
    >>> tensors_read("aten::index.Tensor", (x, [x]), {}), tensors_read("aten::item", (x,), {})
    ([], [tensor([0, 1, 2])])
    """
    if data_dependent_key(name) in ("aten::index", "aten::_unsafe_index"):
        return [item for item in args[1] if item is not None and item.dtype in _MASKS]
    classes = args[1] if len(args) > 1 else kwargs.get("num_classes", -1)
    if kwargs.get("output_size") is not None or (packet_of(name) == "aten::one_hot" and classes >= 0):
        return []
    positions = _DECISIVE.get(name, _DECISIVE.get(packet_of(name)))
    values = (*args, *kwargs.values()) if positions is None else [args[item] for item in positions if item < len(args)]
    return [value for value in values if isinstance(value, Tensor)]


CPU_RULES: dict[str, Callable[..., Any]] = {
    # The indices of `size` elements, row-major.
    "aten::nonzero_static": lambda self, *, size, fill_value=-1: self.new_empty((size, self.ndim), dtype=torch.int64)
}

# Rules that need no assumption: the size is static, or follows from known values.
RULES: dict[str, Callable[..., Any]] = {
    "aten::_nested_tensor_from_mask_left_aligned": is_left_aligned,
    "aten::_pack_padded_sequence": pack_padded_sequence,
    "aten::_pack_padded_sequence_backward": pack_padded_sequence_backward,
    "aten::_pad_packed_sequence": pad_packed_sequence,
    "aten::bincount": bincount_known,
    "aten::combinations": combinations,
    "aten::masked_select": masked_select_known,
    "aten::narrow.Tensor": lambda self, dim, start, length: self.narrow(dim, 0, length),
    "aten::one_hot": one_hot_known,
}
