"""Findings of idle time: launches, synchronisations, data loading, compilation and other work of the host."""

from __future__ import annotations

import re
from collections import defaultdict

from fvflops.explain.findings.finding import MEASURED, Evidence, Finding, Findings, describe_idle
from fvflops.explain.step_records import IdleRow
from fvflops.units import format_quantity, format_seconds

_COMPILES = re.compile(r"dynamo|inductor|compiled_?fx|_compile|aot_?autograd|triton.*(compile|jit)", re.IGNORECASE)
_COLLECTS = re.compile(r"gc\.collect|function collect>|garbage|gc_collect", re.IGNORECASE)
_SAVES = re.compile(r"torch/serialization|checkpoint.*save|save.*checkpoint|torch\.save|_save\b", re.IGNORECASE)
_READ, _MANY_READS = "aten::_local_scalar_dense", 500
_SHORT_NS = 100_000  # from op to op, in Python
_DISPATCH = 0.15  # share of a step on the CPU that Python takes between ops, with the profiler
_LAUNCH = ("launch", "start", "queue")
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
        "the GPU waits while torch.compile compiles anew",
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
        code = _reason(row)
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
        name = max(rows, key=lambda row: row.ns).name
        text = f"{what}: {format_seconds(evidence.seconds(ns))} idle"
        if code == "launch_bound":
            text += f" between {format_quantity(kernels, 'kernel')} of a step"
        elif code == "item_calls":
            text += f", with {format_quantity(reads, 'call')} of .item()"
        elif name:
            text += f", most at {name}"
        yield Finding(code, text, evidence.seconds(ns), describe_idle(rows, evidence.steps), advice, MEASURED)


def _reason(row: IdleRow) -> str:
    """Return the code of a row's reason, "" of one that is known by its cause only."""
    if row.cause == "data":
        return "data_loading"
    for code, pattern in (
        ("compilation", _COMPILES),
        ("garbage_collection", _COLLECTS),
        ("checkpoint_saving", _SAVES),
    ):
        if pattern.search(row.name):
            return code
    if row.cause in _LAUNCH:
        return "launch_bound"
    return {"synchronisation": "synchronisation", "runtime": "allocation", "host": "host_work"}.get(row.cause, "")
