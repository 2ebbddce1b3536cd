"""Count the elements of an expression that are true, without computing all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from fvflops.capture.lazy_values.lazy_expressions import Elementwise, Expression, Indices
from fvflops.capture.restore import interrupts
from fvflops.torch_internals import disable_dispatch_modes

# A box that its bounds do not decide is divided into DIVISIONS boxes along each of its two longest dimensions, down to
# boxes of SMALLEST elements, all of which are evaluated, CHUNK at a time and at most MAX_EVALUATED for a count.
_DIVISIONS = 8
_SMALLEST = 1 << 12
_CHUNK = 1 << 20
_MAX_EVALUATED = 1 << 28
_MAX_BOXES = 1 << 20


def count_unmasked(mask: Expression, dtype: torch.dtype) -> int | None:
    """Return the number of unmasked entries of an attention mask: true ones, or values above half of the minimum.

    None if the mask is too irregular for it.
    """
    if dtype is torch.bool:
        return count_true(mask)
    threshold = torch.finfo(dtype).min / 2
    if mask.count is None or mask.count[0] != threshold:
        above = Elementwise("gt", torch.gt, (mask, threshold), {}, mask.shape)
        mask.count = threshold, count_true(above)
    return mask.count[1]


def count_true(expression: Expression) -> int | None:
    """Return the number of true elements of a bool expression, None if it is too irregular.

    >>> from fvflops.capture.lazy_values.lazy_expressions import Constant
    >>> rows, columns = Constant(torch.arange(5).view(5, 1)), Constant(torch.arange(5))
    >>> count_true(Elementwise("ge", torch.ge, (rows, columns), {}, (5, 5)))
    15
    """
    if expression.count is None:
        if 0 in expression.shape:
            return 0
        leading = expression.shape[:-2]
        counts = count_boxes(expression, range(len(leading))) if math.prod(leading) <= _MAX_BOXES else None
        expression.count = 0.0, None if counts is None else int(counts.sum())
    return expression.count[1]


def count_boxes(expression: Expression, kept: Sequence[int]) -> torch.Tensor | None:
    """Return the number of true elements for each index of the dimensions `kept`, in order; None if too irregular."""
    shape = expression.shape
    with interrupts.deferred(), disable_dispatch_modes(), torch.no_grad():
        sizes = [shape[dim] for dim in kept]
        boxes = math.prod(sizes)
        flat, low, high = torch.arange(boxes), [], []
        for dim, size in enumerate(shape):
            if dim in kept:
                inner = math.prod(sizes[list(kept).index(dim) + 1 :])
                index = flat // inner % size
                low.append(index)
                high.append(index)
            else:
                low.append(torch.zeros(boxes, dtype=torch.int64))
                high.append(torch.full((boxes,), size - 1))
        counts = torch.zeros(boxes, dtype=torch.int64)
        return counts.view(sizes) if _count(expression, counts, flat, low, high) else None


def _count(
    expression: Expression,
    counts: torch.Tensor,
    owners: torch.Tensor,
    low: list[torch.Tensor],
    high: list[torch.Tensor],
) -> bool:
    """Add the true elements of boxes to the counts of their owners; return whether all could be counted."""
    evaluated = 0
    while owners.numel():
        volumes = _volumes(low, high)
        bounds = expression.bounds(low, high)
        if bounds is not None:
            surely, possibly = (torch.as_tensor(bound).expand(owners.shape) for bound in bounds)
            counts.index_add_(0, owners[surely], volumes[surely])
            open_ = possibly & ~surely
            owners, volumes, low, high = owners[open_], volumes[open_], _select(low, open_), _select(high, open_)
        small = volumes <= _SMALLEST
        evaluated += int(volumes[small].sum())
        if evaluated > _MAX_EVALUATED or int((~small).sum()) > _MAX_BOXES:
            return False
        _evaluate(expression, counts, owners[small], _select(low, small), _select(high, small))
        owners, low, high = _divide(owners[~small], _select(low, ~small), _select(high, ~small))
    return True


def _volumes(low: Indices, high: Indices) -> torch.Tensor:
    return torch.stack([last - first + 1 for first, last in zip(low, high, strict=True)]).prod(0)


def _select(indices: Indices, chosen: torch.Tensor) -> list[torch.Tensor]:
    return [index[chosen] for index in indices]


def _divide(
    owners: torch.Tensor, low: list[torch.Tensor], high: list[torch.Tensor]
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """Divide boxes along their two longest dimensions."""
    if not owners.numel():
        return owners, low, high
    lengths = [int((last - first).max()) + 1 for first, last in zip(low, high, strict=True)]
    for dim in sorted(range(len(lengths)), key=lambda dim: -lengths[dim])[:2]:
        step = -(-lengths[dim] // _DIVISIONS)
        parts = torch.arange(0, lengths[dim], step)
        first = (low[dim].unsqueeze(1) + parts).flatten()
        owners = owners.repeat_interleave(len(parts))
        low, high = ([index.repeat_interleave(len(parts)) for index in indices] for indices in (low, high))
        low[dim], high[dim] = first, torch.minimum(first + step - 1, high[dim])
        exists = low[dim] <= high[dim]
        owners, low, high = owners[exists], _select(low, exists), _select(high, exists)
    return owners, low, high


def _evaluate(
    expression: Expression,
    counts: torch.Tensor,
    owners: torch.Tensor,
    low: list[torch.Tensor],
    high: list[torch.Tensor],
) -> None:
    """Add the true elements of boxes by evaluating all elements."""
    if not owners.numel():
        return
    rank = len(low)
    lengths = [int((last - first).max()) + 1 for first, last in zip(low, high, strict=True)]
    size = math.prod(lengths)
    boxes = max(1, _CHUNK // size)
    for start in range(0, owners.numel(), boxes):
        chunk = slice(start, start + boxes)
        indices, inside = [], torch.ones((), dtype=torch.bool)
        for dim, length in enumerate(lengths):
            shape = [-1, *(1,) * dim, length, *(1,) * (rank - dim - 1)]
            index = (low[dim][chunk].unsqueeze(1) + torch.arange(length)).view(shape)
            last = high[dim][chunk].view(-1, *(1,) * rank)
            inside = inside & (index <= last)
            indices.append(torch.minimum(index, last))
        true = expression.at(indices) & inside
        counts.index_add_(0, owners[chunk], true.expand(len(owners[chunk]), *lengths).flatten(1).sum(1))
