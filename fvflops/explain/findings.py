"""Find why steps are slow, from their rows of work and idle time; the largest loss first."""

from __future__ import annotations

from dataclasses import replace

from fvflops.explain.communication_findings import find_communication
from fvflops.explain.explained_trace import ExplainedTrace
from fvflops.explain.finding import Finding, gather_evidence
from fvflops.explain.idle_findings import find_idle
from fvflops.explain.memory_findings import find_memory
from fvflops.explain.plan_findings import find_rest, find_unplanned
from fvflops.explain.planned_step import PlannedStep
from fvflops.explain.product_findings import find_products
from fvflops.units import format_seconds

LEAST = 0.02  # share of a step: clean steps lose up to this much in many small ways
_LEAST_OF_REST = 0.1  # share of kernels that the plan misses anyway: the error of the kernel models
_FINDERS = (find_idle, find_communication, find_products, find_memory)


def find_losses(trace: ExplainedTrace, planned: PlannedStep | None = None) -> list[Finding]:
    """Return what a step loses, the largest first, without what is less than 2 % of it.

    With a plan, what it expects is no loss, and what it does not have is one.
    """
    evidence = gather_evidence(trace, is_planned=planned is not None)
    found = [finding for find in _FINDERS for finding in find(evidence)]
    if planned is not None:
        found = [*_over(found, planned), *find_unplanned(evidence, planned)]
    total = evidence.seconds(evidence.total_ns)
    found = [finding for finding in found if finding.seconds >= LEAST * total]
    if planned is not None:
        rest = find_rest(evidence, planned, found)
        found += [finding for finding in rest if finding.seconds >= _LEAST_OF_REST * total]
    return sorted(found, key=lambda finding: -finding.seconds)


def _over(found: list[Finding], planned: PlannedStep) -> list[Finding]:
    """Return findings without the seconds that the plan has for them; exposed collectives share theirs."""
    left: dict[str, float] = {}
    result = []
    for finding in sorted(found, key=lambda finding: -finding.seconds):
        key = "exposed" if finding.code.startswith("exposed_") else finding.code
        allowed = left.setdefault(key, planned.allowance(finding.code))
        used = min(allowed, finding.seconds)
        left[key] = allowed - used
        text = f"{finding.text}, {format_seconds(used)} of it planned" if used else finding.text
        result.append(replace(finding, seconds=finding.seconds - used, text=text))
    return result
