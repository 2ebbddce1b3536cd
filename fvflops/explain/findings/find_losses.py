"""Find why steps are slow, from their rows of work and idle time; the largest loss first."""

from __future__ import annotations

from dataclasses import replace

from fvflops.explain.explained_trace import ExplainedTrace
from fvflops.explain.findings.communication_findings import find_communication
from fvflops.explain.findings.finding import Finding, gather_evidence
from fvflops.explain.findings.idle_findings import find_idle
from fvflops.explain.findings.memory_findings import find_memory
from fvflops.explain.findings.plan_findings import find_rest, find_unplanned
from fvflops.explain.findings.planned_step import EXPOSED, PlannedStep
from fvflops.explain.findings.product_findings import find_products
from fvflops.units import format_seconds

LEAST = 0.02  # share of a step: clean steps lose up to this much in many small ways
_LEAST_OF_REST = 0.1  # share of kernels that the plan misses anyway: the error of the kernel models
_FINDERS = (find_idle, find_communication, find_products, find_memory)


def find_losses(trace: ExplainedTrace, planned: PlannedStep | None = None) -> list[Finding]:
    """Return the losses of a step, the largest first, without losses under 2 % of it.

    With a plan, of `expect_step`, expected time is no loss, and unplanned work is one.

    >>> import os, tempfile, torch
    >>> from fvflops import explain_trace
    >>> model, x = torch.nn.Linear(8, 8), torch.ones(2, 8)
    >>> with torch.profiler.profile(record_shapes=True, with_stack=True) as profile:
    ...     for _ in range(500):
    ...         x = x + model(x).sum().item()
    >>> path = os.path.join(tempfile.mkdtemp(), "trace.json")
    >>> profile.export_chrome_trace(path)
    >>> [finding.seconds > 0 and finding.advice != "" for finding in find_losses(explain_trace(path))][:1]
    [True]
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
    """Return findings without the seconds that the plan has for them; exposed collectives share theirs by size."""
    exposed = sum(finding.seconds for finding in found if finding.code.startswith(EXPOSED))
    result = []
    for finding in found:
        share = finding.seconds / exposed if finding.code.startswith(EXPOSED) and exposed else 1.0
        used = min(planned.allowance(finding.code) * share, finding.seconds)
        text = f"{finding.text}, {format_seconds(used)} of it planned" if used else finding.text
        result.append(replace(finding, seconds=finding.seconds - used, text=text))
    return result
