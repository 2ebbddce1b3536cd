"""Findings of idle time: launches, synchronisations, data loading, compilation and other work of the host."""

from __future__ import annotations

from collections import defaultdict

from fvflops.explain.findings.finding import MEASURED, Evidence, Finding, Findings
from fvflops.explain.step_records import IdleRow
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
# Code → the host's activity, and the remedy.
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
}


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
