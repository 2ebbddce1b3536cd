"""Find why steps are slow, from their rows of work and idle time; the largest loss first."""

from __future__ import annotations

from fvflops.explain.communication_findings import find_communication
from fvflops.explain.explained_trace import ExplainedTrace
from fvflops.explain.finding import Finding, gather_evidence
from fvflops.explain.idle_findings import find_idle
from fvflops.explain.memory_findings import find_memory
from fvflops.explain.product_findings import find_products

LEAST = 0.02  # share of a step: clean steps lose up to this much in many small ways
_FINDERS = (find_idle, find_communication, find_products, find_memory)


def find_losses(trace: ExplainedTrace) -> list[Finding]:
    """Return what a step loses, the largest first, without what is less than 2 % of it."""
    evidence = gather_evidence(trace)
    least = LEAST * evidence.seconds(evidence.total_ns)
    found = [finding for find in _FINDERS for finding in find(evidence) if finding.seconds >= least]
    return sorted(found, key=lambda finding: -finding.seconds)
