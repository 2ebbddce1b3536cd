"""Findings of memory-bound kernels: copies, casts, transfers from the host, and optimizers that are not fused."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from statistics import median

from fvflops.explain.findings.finding import Evidence, Findings, Group, shapes_of, types_of
from fvflops.explain.step_records import WorkRow
from fvflops.units import format_quantity

_OF_FSDP = re.compile(r"^fsdp::|chunk_cat|split_with_sizes_copy")
_COPIES = re.compile(r"::(copy_|clone|contiguous|_to_copy|to|cat|stack|repeat\w*|constant_pad_nd|pad)$")
_LAYOUTS = re.compile(r"nchwtonhwc|nhwctonchw", re.IGNORECASE)
# Code → the work, and the remedy.
_REASONS = {
    "copies": (
        "copies of tensors in another order of memory",
        "avoid transposes before kernels that need contiguous tensors, and repeated or concatenated copies",
    ),
    "casts": ("casts between dtypes", "keep one dtype: autocast caches weights, and inputs can be cast once"),
    "unpinned_copies": (
        "copies from host memory that is not pinned",
        "use pin_memory=True in the DataLoader, and .to(device, non_blocking=True)",
    ),
    "host_copies": ("copies between host and GPU", "keep the data on the GPU, or overlap copies with compute"),
    "layout_conversions": ("conversions between NCHW and NHWC", "call model.to(memory_format=torch.channels_last)"),
    "zeroing": ("filling of tensors with constants", "call zero_grad(set_to_none=True), and allocate with empty"),
    "indexing": (
        "scatters and gathers by index",
        "avoid index_put and masked selection; deterministic algorithms make them slow",
    ),
}
# Code → share of a step that models need anyway, such as to divide a product into queries, keys and values.
_USUAL = {"copies": 0.04}
_LOOP = 4  # kernels of an optimizer for each parameter, or a group of them
_STATES = 7  # tensors that a fused Adam reads or writes: parameter, gradient and two states


def find_memory(evidence: Evidence) -> Findings:
    """Yield findings of copies, and of the optimizer."""
    groups: Group = defaultdict(list)
    for row in evidence.work:
        if row.ns and row.phase != "optimizer" and (code := _reason(row)):
            groups[code].append(row)
    for code, rows in groups.items():
        ns = sum(row.ns for row in rows)
        if ns < _USUAL.get(code, 0.0) * evidence.total_ns:
            continue
        what, advice = _REASONS[code]
        number = format_quantity(max(evidence.each(sum(row.kernels for row in rows)), 1), "kernel")
        yield evidence.finding(code, f"{what}: {evidence.time(ns)} in {number}", ns, rows, advice)
    yield from _judge_optimizer(evidence)


def _reason(row: WorkRow) -> str:
    """Return the code of a row's reason, "" for work that a step needs."""
    if row.group == "memcpy" and "DtoD" not in row.kernel:
        return "unpinned_copies" if "Pageable" in row.kernel and "HtoD" in row.kernel else "host_copies"
    if _LAYOUTS.search(row.kernel):
        return "layout_conversions"
    if row.kind != "copy" or _OF_FSDP.search(row.op):
        return ""
    if re.search(r"::(fill_?|zero_|zeros\w*|ones\w*|full\w*)$", row.op) or "Memset" in row.kernel:
        return "zeroing"
    if re.search(r"::(index\w*|scatter\w*|masked_select|nonzero)$", row.op):
        return "indexing"
    if not _COPIES.search(row.op):
        return ""
    is_cast = row.op.endswith(("::_to_copy", "::to")) or len(set(types_of(row)[:2])) > 1
    return "casts" if is_cast else "copies"


def _judge_optimizer(evidence: Evidence) -> Findings:
    rows = [row for row in evidence.work if row.phase == "optimizer"]
    if any("_fused_" in row.op for row in rows):
        return
    kernels, ns = sum(row.kernels for row in rows), sum(row.ns for row in rows)
    by_op: dict[str, float] = defaultdict(float)
    for row in rows:
        if shapes := shapes_of(row):
            by_op[row.op] += row.calls * math.prod(shapes[0])
    gaps = sum(row.ns for row in evidence.idle if row.cause == "launch" and row.name in by_op)
    passes = len({row.op for row in rows})
    if passes < _LOOP or not kernels:
        return
    # Each op reads and writes about three tensors, a fused kernel seven in all.
    once = median(by_op.values()) if by_op else 1.0
    moved = 3 * (sum(by_op.values()) if by_op else passes)
    saved = ns * max(0.0, 1 - _STATES * once / moved)
    number = format_quantity(evidence.each(kernels), "kernel")
    text = f"optimizer: {number} of {passes} ops, {evidence.time(ns)}: not one fused kernel"
    certainty = "from the tensors that a fused kernel reads and writes"
    advice = "pass fused=True to the optimizer"
    yield evidence.finding("unfused_optimizer", text, saved + gaps, rows, advice, certainty)
