"""Count the elements of an expression that are true, without computing all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fvflops.capture.lazy_values.lazy_expressions import Elementwise, Expression
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
    """Return the number of unmasked entries (true, or above half of the minimum), None if the mask is too irregular."""
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


def count_boxes(expression: Expression, kept: Sequence[int]) -> Tensor | None:
    """Return the number of true elements for each index of the dimensions `kept`, in order; None if too irregular."""
    shape = expression.shape
    with interrupts.deferred(), disable_dispatch_modes(), torch.no_grad():
        sizes = [shape[dim] for dim in kept]
        owners = torch.arange(math.prod(sizes))
        # The first and the last index of each box in each dimension: [dimensions, boxes].
        low = torch.zeros((len(shape), len(owners)), dtype=torch.int64)
        high = low + torch.tensor(shape, dtype=torch.int64).unsqueeze(1) - 1
        for position, dim in enumerate(kept):  # torch.unravel_index would import sympy
            low[dim] = high[dim] = owners // math.prod(sizes[position + 1 :]) % sizes[position]
        counts = torch.zeros_like(owners)
        return counts.view(sizes) if _count(expression, counts, owners, low, high) else None


def _count(expression: Expression, counts: Tensor, owners: Tensor, low: Tensor, high: Tensor) -> bool:
    """Add the true elements of boxes to the counts of their owners; return whether all could be counted."""
    evaluated = 0
    while owners.numel():
        volumes = (high - low + 1).prod(0)
        bounds = expression.bounds(low, high)
        if bounds is not None:
            surely, possibly = (torch.as_tensor(bound).expand(owners.shape) for bound in bounds)
            counts.index_add_(0, owners[surely], volumes[surely])
            open_ = possibly & ~surely
            owners, volumes, low, high = owners[open_], volumes[open_], low[:, open_], high[:, open_]
        small = volumes <= _SMALLEST
        evaluated += int(volumes[small].sum())
        if evaluated > _MAX_EVALUATED or int((~small).sum()) > _MAX_BOXES:
            return False
        if bool(small.any()):
            _evaluate(expression, counts, owners[small], low[:, small], high[:, small])
        owners, low, high = _divide(owners[~small], low[:, ~small], high[:, ~small])
    return True


def _lengths(low: Tensor, high: Tensor) -> list[int]:
    return [int(length) + 1 for length in (high - low).amax(1)]


def _divide(owners: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if not owners.numel():
        return owners, low, high
    lengths = _lengths(low, high)
    for dim in sorted(range(len(lengths)), key=lambda dim: -lengths[dim])[:2]:
        step = -(-lengths[dim] // _DIVISIONS)
        parts = torch.arange(0, lengths[dim], step)
        first = (low[dim].unsqueeze(1) + parts).flatten()
        owners, low, high = (item.repeat_interleave(len(parts), -1) for item in (owners, low, high))
        low[dim], high[dim] = first, torch.minimum(first + step - 1, high[dim])
        exists = low[dim] <= high[dim]
        owners, low, high = owners[exists], low[:, exists], high[:, exists]
    return owners, low, high


def _evaluate(expression: Expression, counts: Tensor, owners: Tensor, low: Tensor, high: Tensor) -> None:
    lengths = _lengths(low, high)
    rank = len(lengths)
    boxes = max(1, _CHUNK // math.prod(lengths))
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
