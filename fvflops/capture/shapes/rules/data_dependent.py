"""The rules of selections: ops that keep as many elements as their numbers say, and sizes that are given for them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from fvflops.capture.shapes.shape_tensor import DataDependentError
from fvflops.trace.signature import packet_of

Size = int | float


def take(given: Size, examined: int) -> int:
    """Return how many of the elements examined are kept: a number, at most all, or a share, rounded up.

    >>> take(3, 10), take(30, 10), take(0.25, 10)
    (3, 10, 3)
    """
    return min(int(given), examined) if isinstance(given, int) else math.ceil(given * examined)


def find_nonzero(given: Size, self: torch.Tensor) -> torch.Tensor:
    """Return the indices of the elements kept, one row each, laid out as the kernels do."""
    return self.new_empty((self.ndim, take(given, self.numel())), dtype=torch.int64).t()


def find_nonzero_by_axis(given: Size, self: torch.Tensor) -> list[torch.Tensor]:
    """Return the indices of the elements kept, one tensor for each dimension; a scalar has one."""
    return list(find_nonzero(given, self if self.ndim else self.unsqueeze(0)).unbind(1))


def select_masked(given: Size, self: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the elements under a mask that is broadcast with the tensor."""
    return self.new_empty(take(given, math.prod(torch.broadcast_shapes(self.shape, mask.shape))))


def select_known(self: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the elements under a mask whose numbers are known; DataDependentError for another."""
    _want_values(mask, "aten::masked_select")
    shape = torch.broadcast_shapes(self.shape, mask.shape)
    return self.new_empty(int(mask.expand(shape).count_nonzero()))


def index(given: Size, self: torch.Tensor, indices: list[torch.Tensor | None]) -> torch.Tensor:
    """Return what indices select, each mask among them standing for as many elements as are given."""
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
    """Return the distinct elements, which of them each element is, and how often each occurs."""
    return _distinct(self, take(given, self.numel()), return_inverse, return_counts)


def find_unique_only(
    given: Size, self: torch.Tensor, sorted: bool = True, return_inverse: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the distinct elements, and which of them each element is."""
    return find_unique(given, self, sorted, return_inverse)[:2]


def find_runs(
    given: Size,
    self: torch.Tensor,
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the first element of each run of equal ones, which run each element is in, and the runs' lengths."""
    if dim is None:
        return _distinct(self, take(given, self.numel()), return_inverse, return_counts)
    return find_unique_rows(given, self, dim)


def find_unique_rows(
    given: Size, self: torch.Tensor, dim: int, *_: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the distinct slices along a dimension, which of them each slice is, and how often each occurs."""
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
    """Return the elements, or the slices along a dimension, each as often as another tensor says."""
    total = output_size if output_size is not None else given
    if len(args) == 1:  # repeats alone: the result holds the positions
        return args[0].new_empty(_whole(total, args[0].numel()))
    self, _, *rest = args
    dim = rest[0] if rest else None
    if dim is None:
        return self.new_empty(_whole(total, self.numel()))
    shape = list(self.shape)
    shape[dim] = _whole(total, shape[dim])
    return self.new_empty(shape)


def count_bins(
    given: Size, self: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0
) -> torch.Tensor:
    """Return how often each whole number occurs, or the sums of the weights, for as many numbers as are given."""
    dtype = torch.int64 if weights is None else torch.float32 if weights.dtype is torch.float32 else torch.float64
    return self.new_empty(max(_whole(given, self.numel()), minlength), dtype=dtype, device="meta")


def count_known_bins(self: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> torch.Tensor:
    """Return how often each whole number occurs in a tensor whose numbers are known; DataDependentError for another."""
    _want_values(self, "aten::bincount")
    return count_bins(int(self.max()) + 1 if self.numel() else 0, self, weights, minlength)


def encode_one_hot(given: Size, self: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """Return a row of zeros with a single one for each element, as long as the number of classes."""
    return self.new_empty((*self.shape, _whole(given, self.numel())), dtype=torch.int64)


def encode_known_one_hot(self: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """Return one row per element of as many zeros as there are classes; without their number the values say it.

    Contiguous, as torch's kernels write it for real tensors; for meta tensors torch compares instead.
    """
    if num_classes < 0:
        _want_values(self, "aten::one_hot")
        num_classes = int(self.max()) + 1
    return self.new_empty((*self.shape, num_classes), dtype=torch.int64)


def suppress(given: Size, dets: torch.Tensor, scores: torch.Tensor, iou_threshold: float) -> torch.Tensor:
    """Return the indices of the boxes that are kept."""
    return dets.new_empty(take(given, len(dets)), dtype=torch.int64)


def combine(self: torch.Tensor, r: int = 2, with_replacement: bool = False) -> torch.Tensor:
    """Return the combinations of r elements, whose number is known, though torch looks for it in a mask."""
    n = self.numel()
    return self.new_empty((math.comb(n + r - 1 if with_replacement else n, r), r) if r else (0,))


def narrow(self: torch.Tensor, dim: int, start: torch.Tensor, length: int) -> torch.Tensor:
    """Return the slices from a start that a tensor holds: as many as asked for, wherever that is."""
    return self.narrow(dim, 0, length)


def find_static(self: torch.Tensor, *, size: int, fill_value: int = -1) -> torch.Tensor:
    """Return the indices of a given number of elements, laid out row by row as the CPU's kernel does."""
    return self.new_empty((size, self.ndim), dtype=torch.int64)


def _whole(given: Size, examined: int) -> int:
    """Return a number of results that may be more than the elements examined."""
    return int(given) if isinstance(given, int) else take(given, examined)


def _want_values(tensor: torch.Tensor, name: str) -> None:
    if tensor.device.type == "meta":
        raise DataDependentError.of_op(name)


# By name without overload: called with the size that is given, a number of results or a share, and then as the op is.
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

# Those of whose overloads only the one without a name selects.
_ONE_OVERLOAD = frozenset({"aten::where"})


def selection_of(name: str) -> str:
    """Return the name under which an op stands here, which is empty for an overload that does not select.

    >>> selection_of("aten::index.Tensor"), selection_of("aten::where"), selection_of("aten::where.self")
    ('aten::index', 'aten::where', '')
    """
    packet = packet_of(name)
    return "" if packet in _ONE_OVERLOAD and name != packet else packet


# All boxes may survive: an upper bound that detection models can run with.
BOUNDED = frozenset({"torchvision::nms", "torchvision::qnms"})

# By name without overload: the result is a number of the tensors, not a tensor.
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

# What needs no number after all, or only numbers that are at hand.
RULES: dict[str, Callable[..., Any]] = {
    "aten::bincount": count_known_bins,
    "aten::combinations": combine,
    "aten::masked_select": select_known,
    "aten::narrow.Tensor": narrow,
    "aten::one_hot": encode_known_one_hot,
}
