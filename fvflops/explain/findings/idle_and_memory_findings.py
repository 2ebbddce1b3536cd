"""Findings of idle time by the host's activity, and of memory-bound kernels by the kind of their work."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from statistics import median

from fvflops.explain.findings.finding import MEASURED, Evidence, Finding, Findings, Group, shapes_of, types_of
from fvflops.explain.step_records import IdleRow, WorkRow
from fvflops.units import format_quantity

# Cause → code of the reason.
_CODES = {
    "data": "data_loading",
    "compilation": "compilation",
    "garbage": "garbage_collection",
    "saving": "checkpoint_saving",
    **dict.fromkeys(("launch", "start", "queue"), "launch_bound"),
    "synchronisation": "synchronisation",
    "runtime": "allocation",
    "host": "host_work",
}
_READ, _MANY_READS = "aten::_local_scalar_dense", 500
_SHORT_NS = 100_000  # from op to op, in Python
_DISPATCH = 0.15  # share of a step on the CPU that Python takes between ops, with the profiler
# Code → the host's activity or the kernels' work, and the remedy.
_REASONS = {
    "data_loading": (
        "the GPU waits for the data loader",
        "add workers, prefetch batches, and move work out of the loader",
    ),
    "synchronisation": (
        "the GPU runs out of work after the host waited for it",
        "read values less often, such as the loss every 100 steps; avoid ops whose sizes depend on data",
    ),
    "compilation": (
        "the GPU waits while torch.compile recompiles",
        "find what changes between steps with TORCH_LOGS=recompiles; pad inputs or mark sizes as dynamic",
    ),
    "garbage_collection": (
        "the GPU waits while Python collects garbage",
        "call gc.freeze() after the first step, and gc.collect() at a time that suits all ranks",
    ),
    "checkpoint_saving": ("the GPU waits while a checkpoint is saved", "save asynchronously, or less often"),
    "allocation": (
        "the GPU waits while memory is allocated or freed, or kernels are loaded",
        "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, and leave memory free",
    ),
    "launch_bound": (
        "the GPU waits for the host to launch kernels",
        "use torch.compile, CUDA graphs or larger batches: the host is slower than the kernels",
    ),
    "item_calls": ("Python reads values one by one", "read them at once by tolist(), or keep them in tensors"),
    "host_work": (
        "the GPU waits for Python code outside of ops",
        "move this work to another thread, or out of the step",
    ),
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
_OF_FSDP = re.compile(r"^fsdp::|chunk_cat|split_with_sizes_copy")
_COPIES = re.compile(r"::(copy_|clone|contiguous|_to_copy|to|cat|stack|repeat\w*|constant_pad_nd|pad)$")
_LAYOUTS = re.compile(r"nchwtonhwc|nhwctonchw", re.IGNORECASE)
# Code → share of a step that models need anyway, such as to divide a product into queries, keys and values.
_USUAL = {"copies": 0.04}
_LOOP = 4  # kernels of an optimizer for each parameter, or a group of them
_STATES = 7  # tensors that a fused Adam reads or writes: parameter, gradient and two states


def find_idle(evidence: Evidence) -> Findings:
    """Yield a finding for each reason of idle time."""
    groups: dict[str, list[IdleRow]] = defaultdict(list)
    reads = evidence.each(sum(row.calls for row in evidence.work if row.op == _READ))
    for row in evidence.idle:
        code = _CODES.get(row.cause, "")
        if code == "host_work":
            is_short = row.ns < _SHORT_NS * row.intervals
            if evidence.on_gpu:
                code = "launch_bound" if is_short else code
            else:
                code = "item_calls" if reads >= _MANY_READS else "" if is_short else code
        groups[code].append(row)
    kernels = evidence.each(sum(row.kernels for row in evidence.work))
    for code, rows in groups.items():
        ns = sum(row.ns for row in rows)
        least = _DISPATCH * evidence.total_ns if code == "host_work" and not evidence.on_gpu else 0
        if code not in _REASONS or ns <= least:
            continue
        what, advice = _REASONS[code]
        what = what if evidence.on_gpu else what.replace("the GPU", "the step")
        name = max(rows, key=lambda row: row.ns).name
        text = f"{what}: {evidence.time(ns)} idle"
        if code == "launch_bound":
            text += f" between {format_quantity(kernels, 'kernel')} of a step"
        elif code == "item_calls":
            text += f", with {format_quantity(reads, 'call')} of .item()"
        elif name:
            text += f", most at {name}"
        longest = sorted(rows, key=lambda row: -row.ns)[:3]
        shown = tuple(f"{row.name}: {evidence.time(row.ns)} idle" for row in longest)
        yield Finding(code, text, evidence.seconds(ns), shown, advice, MEASURED)


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
