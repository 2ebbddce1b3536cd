"""Findings of matrix products and attention: dtypes, unfused attention, unaligned shapes, loops and slow clocks."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence

from fvflops.devices.kernel_models.fused_attention import Attention
from fvflops.devices.kernel_models.products import Product
from fvflops.explain.findings.finding import MEASURED, Evidence, Finding, Findings, Group, shapes_of, types_of
from fvflops.explain.step_records import WorkRow
from fvflops.plan.step_time.kernel_times import Kernel
from fvflops.units import format_quantity, format_seconds

_NO_TF32 = re.compile(r"sgemm|simt|ffma|f32f32_f32f32", re.IGNORECASE)
_DTYPES = {"bfloat16": "bfloat16", "half": "float16", "float": "float32", "double": "float64"}
# Code → the products' dtype, the next faster one, and what to do.
_SLOW_DTYPES = {
    "float64_products": (
        *("fp64", "bf16"),
        "use float32 or bfloat16: look for NumPy arrays and Python floats that make doubles",
    ),
    "float32_without_tf32": (*("fp32", "tf32"), 'call torch.set_float32_matmul_precision("high"), or use bfloat16'),
    "float32_products": ("tf32", "bf16", "use bfloat16: torch.autocast or FSDP's MixedPrecisionPolicy"),
}
_PRODUCTS = ("matmul", "convolution")
_SHORT_NS, _MANY, _KINDS_OF_ROWS = 30_000, 200, 8
_ALIGNED, _SLOW, _FEW_ROWS = 64, 1.15, 128


def find_products(evidence: Evidence) -> Findings:
    """Yield the findings of products and attention."""
    rest = [row for row in evidence.work if row.kind in (*_PRODUCTS, "experts") and row.kernel_ns]
    scores, others = _find_scores(evidence)
    if scores:
        yield from _judge_attention(evidence, scores + others)
        in_attention = {id(row) for row in scores}
        rest = [row for row in rest if id(row) not in in_attention]
    slow = [row for row in rest if types_of(row)[:1] in (("float",), ("double",))]
    yield from _judge_dtypes(evidence, slow)
    rest = [row for row in rest if row not in slow] if evidence.on_gpu else rest
    loops = _find_loops(evidence, rest)
    yield from (_judge_loop(evidence, rows) for rows in loops)
    looped = {id(row) for rows in loops for row in rows}
    rest = [row for row in rest if id(row) not in looped and row.expected_ns]
    if evidence.timer is not None:
        yield from _judge_alignment(evidence, rest)
        yield from _judge_rows(evidence, rest)
        yield from _judge_clock(evidence, rest)


def _find_scores(evidence: Evidence) -> tuple[list[WorkRow], list[WorkRow]]:
    """Return the products of unfused attention, and its softmax and elementwise ops, by their matrices of scores."""
    softmax = [row for row in evidence.work if "softmax" in row.op and "log_softmax" not in row.op]
    scores = {shape[-2:] for row in softmax for shape in shapes_of(row)[:1] if len(shape) >= 3 and min(shape[-2:]) > 1}
    if not scores:
        return [], []
    members = [row for row in evidence.work if row.phase != "optimizer" and _has_scores(row, scores)]
    products = [row for row in members if "mm" in row.op or "matmul" in row.op]
    return products, [row for row in members if row not in products]


def _has_scores(row: WorkRow, scores: set[tuple[int, ...]]) -> bool:
    shapes = shapes_of(row)
    if "mm" in row.op and len(shapes) >= 2 and len(shapes[0]) == 3:
        return (shapes[0][1], shapes[1][2]) in scores or any(shape[-2:] in scores for shape in shapes[:2])
    return any(len(shape) >= 3 and shape[-2:] in scores for shape in shapes)


def _judge_attention(evidence: Evidence, rows: Sequence[WorkRow]) -> Findings:
    measured = sum(row.ns for row in rows)
    expected = _fused_ns(evidence, rows)
    certainty = evidence.certainty("attention")
    if expected is None:  # the products remain, the other ops on scores go
        expected, certainty = sum(row.ns for row in rows if "mm" in row.op), MEASURED
    if measured > expected:
        times = f"{evidence.time(measured)}, expected {evidence.time(expected)}"
        text = f"attention: {times}: separate products and softmax, not a fused kernel"
        advice = "call scaled_dot_product_attention with inputs that flash or cuDNN kernels take"
        yield evidence.finding("unfused_attention", text, measured - expected, rows, advice, certainty)


def _fused_ns(evidence: Evidence, rows: Sequence[WorkRow]) -> float | None:
    """Return the time of a fused kernel for the products of some attention, None without a device."""
    timer, total = evidence.timer, 0.0
    if timer is None:
        return None
    for row in rows:
        shapes = shapes_of(row)
        if "mm" not in row.op or len(shapes) < 2 or len(shapes[0]) != 3 or not row.macs:
            continue
        queries, keys = max(shapes[0][1:]), max(shapes[1][1:])
        size = min(*shapes[0][1:], *shapes[1][1:])
        kind = "attention" if row.phase != "backward" else "attention backward"
        each = row.macs // max(row.calls, 1)
        shape = Attention(*(1, queries, keys, shapes[0][0], shapes[0][0], size, False), element_bytes=2, key_bytes=2)
        products = 2 if kind == "attention" else 5
        kernel = Kernel(kind, products * each, 4 * 2 * shapes[0][0] * queries * size, "bfloat16", shape)
        # A fused kernel does two separate products forward and four backward: each has an equal part of its time.
        total += row.calls * timer.seconds(kernel) * 1e9 / (2 if kind == "attention" else 4)
    return total


def _judge_dtypes(evidence: Evidence, rows: Sequence[WorkRow]) -> Findings:
    groups: Group = defaultdict(list)
    for row in rows:
        is_double = types_of(row)[0] == "double"
        if is_double:
            groups["float64_products"].append(row)
        elif evidence.on_gpu:
            groups["float32_without_tf32" if _NO_TF32.search(row.kernel) else "float32_products"].append(row)
    for code, found in groups.items():
        ns = sum(row.ns for row in found)
        slow, fast, advice = _SLOW_DTYPES[code]
        how = " without TF32" if "without" in code else ""
        text = f"matrix products in {code.partition('_')[0]}{how}: {evidence.time(ns)}"
        saved = ns * (1 - _speedup(evidence, slow, fast))
        yield evidence.finding(code, text, saved, found, advice, evidence.certainty("product"))


def _speedup(evidence: Evidence, slow: str, fast: str) -> float:
    """Return the time in the faster dtype as a share of the time in the slower one, by the device's peaks."""
    if evidence.device is None:
        return 0.5
    known = {**evidence.device.vector, **evidence.device.matrix}
    own = evidence.device.vector if slow == "fp32" else known
    return max(0.1, own[slow] / known[fast]) if slow in own and fast in known else 0.5


def _find_loops(evidence: Evidence, rows: Sequence[WorkRow]) -> list[list[WorkRow]]:
    """Return rows of products that a loop in Python divides: many short calls, or many numbers of rows."""
    groups: Group = defaultdict(list)
    for row in rows:
        shapes = shapes_of(row)
        if len(shapes) >= 2 and row.phase != "optimizer" and row.kind != "experts":
            groups[row.phase, row.op, shapes[-1]].append(row)
    found = []
    for members in groups.values():
        calls = sum(row.calls for row in members)
        mean = sum(row.kernel_ns for row in members) / max(calls, 1)
        many = calls >= _MANY * evidence.steps and mean < _SHORT_NS
        if many or len({shapes_of(row)[-2] for row in members}) >= _KINDS_OF_ROWS:
            found.append(members)
    return found


def _judge_loop(evidence: Evidence, rows: list[WorkRow]) -> Finding:
    ns = sum(row.kernel_ns for row in rows)
    calls = sum(row.calls for row in rows)
    # Ops on the CPU have Python between them, as kernels have launches.
    causes = ("launch", "synchronisation") if evidence.on_gpu else ("host",)
    gaps = sum(row.ns for row in evidence.idle if row.cause in causes)
    flops = sum(row.flops or 0 for row in rows)
    fastest = max((row.flops_per_second or 0.0 for row in evidence.work if row.kind in _PRODUCTS), default=0.0)
    device = evidence.device
    if device is not None and types_of(rows[0]):
        peak = _peak_of(evidence, types_of(rows[0])[0])
        fastest = max(fastest, 0.6 * peak)
    expected = flops * 1e9 / fastest if fastest else 0.0
    each = f"{format_quantity(evidence.each(calls), 'call')} of {format_seconds(ns / 1e9 / max(calls, 1))}"
    one = f"one product takes {evidence.time(expected)}"
    text = f"{rows[0].op} in a loop: {each}, {evidence.time(ns)}; {one}"
    share = ns / max(sum(row.kernel_ns for row in evidence.work), 1)
    saved = max(ns - expected, 0.0) + gaps * share
    advice = "batch the products: one bmm or grouped_mm for all experts, heads or time steps"
    return evidence.finding("product_loop", text, saved, rows, advice, evidence.certainty("product"))


def _peak_of(evidence: Evidence, dtype: str) -> float:
    try:
        return float(evidence.device.peak(_DTYPES[dtype])) if evidence.device and dtype in _DTYPES else 0.0
    except ValueError:
        return 0.0


def _product_of(row: WorkRow) -> tuple[int, int, int] | None:
    """Return rows, columns and inner size of a product with one weight, None for others."""
    shapes = [shape for shape in shapes_of(row) if len(shape) >= 2]
    if row.op not in ("aten::mm", "aten::addmm", "aten::linear", "aten::matmul") or len(shapes) < 2 or not row.calls:
        return None
    first = shapes[-2]
    rows, inner = math.prod(first[:-1]), first[-1]
    macs = (row.macs or 0) // row.calls
    return (rows, macs // (rows * inner), inner) if macs and rows * inner else None


def _alone(evidence: Evidence, dtype: str, sizes: tuple[int, int, int]) -> float:
    rows, columns, inner = sizes
    alignment = math.gcd(16, 2 * columns, 2 * inner, 2 * rows)
    shape = Product(rows, columns, inner, alignment=alignment)
    kernel = Kernel("matmul", rows * columns * inner, shape.nbytes, dtype, shape)
    assert evidence.timer is not None
    return evidence.timer.alone(kernel) * 1e9


def _judge_alignment(evidence: Evidence, rows: Sequence[WorkRow]) -> Findings:
    """Yield a finding for each length that is not a multiple of 64 and slows its products."""
    groups: dict[int, float] = defaultdict(float)
    shown: Group = defaultdict(list)
    typical = evidence.typical()
    for row in rows:
        sizes, dtype = _product_of(row), (types_of(row) or ("",))[0]
        if sizes is None or dtype not in ("bfloat16", "half"):
            continue
        odd = [length for length in sizes if length % 8 and length > 512]
        if odd:
            padded = [math.ceil(length / _ALIGNED) * _ALIGNED for length in sizes]
            expected = typical * row.calls * _alone(evidence, _DTYPES[dtype], (padded[0], padded[1], padded[2]))
            groups[odd[0]] += row.kernel_ns - expected
            shown[odd[0]].append(row)
    for length, ns in groups.items():
        if ns > 0:
            text = f"{length:,} is not a multiple of 64: {evidence.time(ns)} in its products"
            advice = f"pad it to {math.ceil(length / _ALIGNED) * _ALIGNED:,}"
            yield evidence.finding("unaligned_size", text, ns, shown[length], advice, evidence.certainty("product"))


def _judge_rows(evidence: Evidence, rows: Sequence[WorkRow]) -> Findings:
    """Yield a finding of products whose rows are too few for the GPU's peak: they take the time of reading weights."""
    small, saved = [], 0.0
    for row in rows:
        sizes, dtype = _product_of(row), (types_of(row) or ("",))[0]
        if sizes is not None and min(sizes) < _FEW_ROWS and row.flops and _peak_of(evidence, dtype):
            small.append(row)
            saved += row.kernel_ns - row.flops * 1e9 / (0.6 * _peak_of(evidence, dtype))
    if small and saved > 0:
        least = min(min(_product_of(row) or (0,)) for row in small)
        ns = sum(row.kernel_ns for row in small)
        taken = f"{evidence.time(ns)}, as long as reading their weights"
        larger = f"in larger batches the same work takes {evidence.time(ns - saved)}"
        text = f"products of {least} rows: {taken}; {larger}"
        advice = "use larger batches or longer sequences for each GPU"
        yield evidence.finding("small_batch", text, saved, small, advice, evidence.certainty("product"))


def _judge_clock(evidence: Evidence, rows: Sequence[WorkRow]) -> Findings:
    """Yield a finding of products that are all slower than on this GPU in a step."""
    timer = evidence.timer
    assert timer is not None
    # The models of short kernels and of convolutions are less sure.
    rows = [row for row in rows if row.kind == "matmul" and row.kernel_ns > _SHORT_NS * row.kernels]
    expected = sum(row.expected_ns or 0.0 for row in rows) / timer.efficiency.matmul
    measured = sum(row.modelled_ns for row in rows)
    if expected and measured > _SLOW * expected:
        times = f"{evidence.time(measured)}, expected {evidence.time(expected)}"
        text = f"matrix products: {times}: all are {measured / expected:.2f} times as long"
        advice = "look at clocks and power (nvidia-smi -q -d CLOCK,PERFORMANCE) while it trains"
        yield evidence.finding("slow_products", text, measured - expected, rows, advice, evidence.certainty("product"))
