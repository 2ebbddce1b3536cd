"""Shape rules of ops with data-dependent output size, for sizes that are assumed or known."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from fvflops.capture.shapes.shape_tensor import DataDependentError
from fvflops.trace.signature import packet_of

Size = int | float


def take(given: Size, examined: int) -> int:
    """Return how many of the examined elements are kept: a number, at most all, or a fraction, rounded up.

    >>> take(3, 10), take(30, 10), take(0.25, 10)
    (3, 10, 3)
    """
    return min(int(given), examined) if isinstance(given, int) else math.ceil(given * examined)


def find_nonzero(given: Size, self: torch.Tensor) -> torch.Tensor:
    """Return the indices of the kept elements, one row each, with the kernels' strides."""
    return self.new_empty((self.ndim, take(given, self.numel())), dtype=torch.int64).t()


def find_nonzero_by_axis(given: Size, self: torch.Tensor) -> list[torch.Tensor]:
    """Return the indices of the kept elements, one tensor per dimension; a scalar has one."""
    return list(find_nonzero(given, self if self.ndim else self.unsqueeze(0)).unbind(1))


def select_masked(given: Size, self: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the elements under a mask, after broadcasting."""
    return self.new_empty(take(given, math.prod(torch.broadcast_shapes(self.shape, mask.shape))))


def select_known(self: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the elements under a mask with known values; else DataDependentError."""
    _require_values(mask, "aten::masked_select")
    shape = torch.broadcast_shapes(self.shape, mask.shape)
    return self.new_empty(int(mask.expand(shape).count_nonzero()))


def index(given: Size, self: torch.Tensor, indices: list[torch.Tensor | None]) -> torch.Tensor:
    """Return the result of indexing; each mask among the indices selects the given number of elements."""
    plain: list[torch.Tensor | None] = []
    for item in indices:
        if item is not None and item.dtype in (torch.bool, torch.uint8):
            kept = take(given, item.numel())
            plain.extend(item.new_empty(kept, dtype=torch.int64, device="meta") for _ in range(item.ndim))
        else:
            plain.append(item)
    return torch.ops.aten.index.Tensor(self, plain)


def find_unique(
    given: Size, self: torch.Tensor, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the distinct elements, the inverse indices and the counts."""
    return _distinct(self, take(given, self.numel()), return_inverse, return_counts)


def find_unique_only(
    given: Size, self: torch.Tensor, sorted: bool = True, return_inverse: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the distinct elements and the inverse indices."""
    return find_unique(given, self, sorted, return_inverse)[:2]


def find_runs(
    given: Size,
    self: torch.Tensor,
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the first element of each run of equal ones, the inverse indices and the run lengths."""
    if dim is None:
        return _distinct(self, take(given, self.numel()), return_inverse, return_counts)
    return find_unique_rows(given, self, dim)


def find_unique_rows(
    given: Size, self: torch.Tensor, dim: int, *_: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the distinct slices along a dimension, the inverse indices and the counts."""
    first = self.movedim(dim, 0)
    kept = take(given, len(first))
    counts = self.new_empty(kept, dtype=torch.int64)
    values = self.new_empty((kept, *first.shape[1:])).movedim(0, dim)
    return values, self.new_empty(len(first), dtype=torch.int64), counts


def _distinct(
    self: torch.Tensor, kept: int, inverse: bool, counts: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    none = (0,)
    return (
        self.new_empty(kept),
        self.new_empty(self.shape if inverse else none, dtype=torch.int64),
        self.new_empty(kept if counts else none, dtype=torch.int64),
    )


def repeat(given: Size, *args: Any, output_size: int | None = None) -> torch.Tensor:
    """Return the elements, or slices along a dimension, each repeated; `given` is the total."""
    total = output_size if output_size is not None else given
    if len(args) == 1:  # repeats only: the result contains positions
        return args[0].new_empty(_total(total, args[0].numel()))
    self, _, *rest = args
    dim = rest[0] if rest else None
    if dim is None:
        return self.new_empty(_total(total, self.numel()))
    shape = list(self.shape)
    shape[dim] = _total(total, shape[dim])
    return self.new_empty(shape)


def count_bins(
    given: Size, self: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0
) -> torch.Tensor:
    """Return the counts of integers, or the sums of weights, for the given number of bins."""
    dtype = torch.int64 if weights is None else torch.float32 if weights.dtype is torch.float32 else torch.float64
    return self.new_empty(max(_total(given, self.numel()), minlength), dtype=dtype, device="meta")


def count_known_bins(self: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> torch.Tensor:
    """Return the counts of integers in a tensor with known values; else DataDependentError."""
    _require_values(self, "aten::bincount")
    return count_bins(int(self.max()) + 1 if self.numel() else 0, self, weights, minlength)


def encode_one_hot(given: Size, self: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """Return one-hot rows with the given number of classes."""
    return self.new_empty((*self.shape, _total(given, self.numel())), dtype=torch.int64)


def encode_known_one_hot(self: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """Return one-hot rows; without a number of classes it follows from known values, else DataDependentError.

    Contiguous, as from torch's kernels for real tensors; for meta tensors torch decomposes into a comparison.
    """
    if num_classes < 0:
        _require_values(self, "aten::one_hot")
        num_classes = int(self.max()) + 1
    return self.new_empty((*self.shape, num_classes), dtype=torch.int64)


def suppress(given: Size, dets: torch.Tensor, scores: torch.Tensor, iou_threshold: float) -> torch.Tensor:
    """Return the indices of the boxes kept."""
    return dets.new_empty(take(given, len(dets)), dtype=torch.int64)


def combine(self: torch.Tensor, r: int = 2, with_replacement: bool = False) -> torch.Tensor:
    """Return the combinations of r elements: their number is known, although torch computes it from a mask."""
    n = self.numel()
    return self.new_empty((math.comb(n + r - 1 if with_replacement else n, r), r) if r else (0,))


def narrow(self: torch.Tensor, dim: int, start: torch.Tensor, length: int) -> torch.Tensor:
    """Return slices from a start given by a tensor: their number does not depend on it."""
    return self.narrow(dim, 0, length)


def find_static(self: torch.Tensor, *, size: int, fill_value: int = -1) -> torch.Tensor:
    """Return the indices of a given number of elements, row-major as from the CPU's kernel."""
    return self.new_empty((size, self.ndim), dtype=torch.int64)


def _total(given: Size, examined: int) -> int:
    """Return a number of results, which may exceed the number of elements examined."""
    return int(given) if isinstance(given, int) else take(given, examined)


def _require_values(tensor: torch.Tensor, name: str) -> None:
    if tensor.device.type == "meta":
        raise DataDependentError.of_op(name)


# By name without overload. The first argument is the given size, a number of results or a fraction; the op's follow.
SIZED: dict[str, Callable[..., Any]] = {
    "aten::_unique": find_unique_only,
    "aten::_unique2": find_unique,
    "aten::_unsafe_index": index,
    "aten::argwhere": find_nonzero,
    "aten::bincount": count_bins,
    "aten::index": index,
    "aten::masked_select": select_masked,
    "aten::nonzero": find_nonzero,
    "aten::nonzero_numpy": find_nonzero_by_axis,
    "aten::one_hot": encode_one_hot,
    "aten::repeat_interleave": repeat,
    "aten::unique_consecutive": find_runs,
    "aten::unique_dim": find_unique_rows,
    "aten::unique_dim_consecutive": find_unique_rows,
    "aten::where": find_nonzero_by_axis,
    "torchvision::nms": suppress,
    "torchvision::qnms": suppress,
}

# Ops of which only the overload without a name is data-dependent.
_ONE_OVERLOAD = frozenset({"aten::where"})


def selection_of(name: str) -> str:
    """Return an op's key in these tables, "" for an overload that is not data-dependent.

    >>> selection_of("aten::index.Tensor"), selection_of("aten::where"), selection_of("aten::where.self")
    ('aten::index', 'aten::where', '')
    """
    packet = packet_of(name)
    return "" if packet in _ONE_OVERLOAD and name != packet else packet


# All boxes may be kept: an upper bound with which detection models run.
BOUNDED = frozenset({"torchvision::nms", "torchvision::qnms"})

# By name without overload: the result is a Python scalar.
VALUES = frozenset({"aten::_local_scalar_dense", "aten::allclose", "aten::equal", "aten::is_nonzero", "aten::item"})

NEED_VALUES = frozenset(
    {
        *SIZED,
        *VALUES,
        "aten::_ctc_loss.Tensor",  # log_alpha is as wide as the longest target
        "aten::_nested_tensor_from_mask",
        "aten::_pack_padded_sequence",
        "aten::_pad_packed_sequence",
        "aten::_padded_dense_to_jagged_forward",
        "aten::_to_dense",
        "aten::_to_sparse",
        "aten::_to_sparse_bsc",
        "aten::_to_sparse_bsr",
        "aten::_to_sparse_csc",
        "aten::_to_sparse_csr",
        "aten::narrow.Tensor",
        "aten::tensor_split.tensor_indices_or_sections",
        "aten::to_sparse",
        "aten::to_sparse_bsc",
        "aten::to_sparse_bsr",
        "aten::to_sparse_csc",
        "aten::to_sparse_csr",
    }
)

CPU_RULES: dict[str, Callable[..., Any]] = {"aten::nonzero_static": find_static}

# Ops that turn out not to be data-dependent, or whose values are known.
RULES: dict[str, Callable[..., Any]] = {
    "aten::bincount": count_known_bins,
    "aten::combinations": combine,
    "aten::masked_select": select_known,
    "aten::narrow.Tensor": narrow,
    "aten::one_hot": encode_known_one_hot,
}
