"""Findings against a plan: recomputation, more work than planned, and time that nothing else explains."""

from __future__ import annotations

from collections.abc import Sequence

from fvflops.explain.findings.finding import Evidence, Finding, Findings
from fvflops.explain.findings.planned_step import PlannedStep, measure_kernels
from fvflops.units import format_seconds, format_share

_MORE = 1.02  # times the planned multiply-adds


def find_unplanned(evidence: Evidence, planned: PlannedStep) -> Findings:
    """Yield findings of work that the plan does not have."""
    recomputed = [row for row in evidence.work if row.phase == "recompute"]
    ns = sum(row.ns for row in recomputed)
    expected = 1e9 * evidence.steps * sum(time for (_, phase), time in planned.kernels.items() if phase == "recompute")
    if ns > expected:
        text = f"recomputation of activations: {evidence.time(ns)}, planned {evidence.time(expected)}"
        advice = "checkpoint fewer modules, if memory allows: see `fvflops memory`"
        yield evidence.finding("unplanned_recomputation", text, ns - expected, recomputed, advice)
    products = [row for row in evidence.work if row.kind in ("matmul", "convolution", "experts") and row.macs]
    products = [row for row in products if row.phase != "recompute"]
    macs = sum(row.macs or 0 for row in products) / evidence.steps
    if planned.macs and macs > _MORE * planned.macs:
        share = 1 - planned.macs / macs
        more_ns = sum(row.ns for row in products) * share
        text = (
            f"products do {format_share(macs / planned.macs - 1)} more work than planned: {round(macs):,} "
            f"multiply-adds, planned {planned.macs:,}"
        )
        advice = "look for padding in batches, longer sequences, or a model that differs from the plan's"
        yield evidence.finding("more_work", text, more_ns, products, advice)


def find_rest(evidence: Evidence, planned: PlannedStep, found: Sequence[Finding]) -> Findings:
    """Yield a finding of the kernels' time over the plan that no other finding explains."""
    measured = measure_kernels(evidence)
    over = sum(measured.values()) - sum(planned.kernels.values())
    left = over - sum(finding.seconds for finding in found if finding.code in _OF_KERNELS)
    losses = {key: seconds - planned.kernels.get(key, 0.0) for key, seconds in measured.items()}
    shown = sorted(losses, key=lambda key: -losses[key])[:3]
    if left > 0 and shown:
        kind, phase = shown[0]
        text = (
            f"kernels take {format_seconds(left)} more than planned without a known reason, most in {kind} {phase}: "
            f"{format_seconds(measured[shown[0]])}, expected {format_seconds(planned.kernels.get(shown[0], 0.0))}"
        )
        evidence_rows = tuple(f"{kind} {phase}: {format_seconds(losses[kind, phase])} over" for kind, phase in shown)
        advice = "compare the rows of both sides: other kernels, dtypes or shapes than the plan's"
        yield Finding("slower_than_planned", text, left, evidence_rows, advice, planned.error)


# Findings whose seconds are of kernels.
_OF_KERNELS = frozenset(
    (
        *("unfused_attention", "float64_products", "float32_without_tf32", "float32_products", "product_loop"),
        *("unaligned_size", "small_batch", "slow_products", "copies", "casts", "unpinned_copies", "host_copies"),
        *("layout_conversions", "zeroing", "indexing", "unfused_optimizer", "unplanned_recomputation", "more_work"),
    )
)
