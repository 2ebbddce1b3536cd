"""Findings of communication: exposed collectives, ranks that come late, and links that are slow."""

from __future__ import annotations

from collections import defaultdict
from statistics import median

from fvflops.explain.findings.finding import Evidence, Findings
from fvflops.explain.rank_timeline import list_collectives, sum_waits
from fvflops.explain.step_records import WorkRow
from fvflops.plan.step_time.calibration import Network, assume_network
from fvflops.trace.process_group import ProcessGroupSpec
from fvflops.units import format_percent, format_quantity

# Collective, as a part of the recorded name → its code, its name, and how to hide it.
_COLLECTIVES = {
    "allgather": ("exposed_all_gather", "all_gather", "prefetch the next module's parameters (FSDP: forward_prefetch)"),
    "reducescatter": ("exposed_reduce_scatter", "reduce_scatter", "reduce gradients during the backward pass"),
    "allreduce": ("exposed_all_reduce", "all_reduce", "reduce in buckets during the backward pass, as DDP does"),
    "alltoall": (
        "exposed_all_to_all",
        "all_to_all",
        "overlap the exchange of tokens with shared experts or another batch",
    ),
    "send": ("pipeline_bubble", "send", "use more microbatches, or stages of equal time"),
    "recv": ("pipeline_bubble", "send", "use more microbatches, or stages of equal time"),
    "broadcast": ("exposed_broadcast", "broadcast", "broadcast less often, such as buffers (broadcast_buffers=False)"),
}
# Their time includes waiting for the other stage.
_PAIRS = ("send", "recv")
_LATE, _SLOW = 1.6, 1.5  # times the median of equal collectives, and the network's time


def find_communication(evidence: Evidence) -> Findings:
    """Yield findings of exposed collectives, first the parts due to late ranks and slow links."""
    groups: dict[str, list[WorkRow]] = defaultdict(list)
    for row in evidence.work:
        if row.kind == "communication":
            groups[_find_key(f"{dict(row.details).get('Collective name') or ''} {row.op} {row.kernel}")].append(row)
    waits, waited = evidence.trace.waits(), sum_waits(evidence.trace.timelines)
    last = min(waits, key=lambda wait: wait.waiting_ns) if waits else None
    for key, rows in groups.items():
        exposed = sum(row.ns for row in rows)
        # On the CPU the ops of collectives only launch them.
        count = sum(row.kernels for row in rows if evidence.on_gpu or not row.op) or sum(row.kernels for row in rows)
        # One of them can seldom be hidden, such as the first gather of a step and the last reduction.
        longest = max((row.kernel_ns / row.kernels for row in rows if row.kernels), default=0.0)
        unavoidable = 0.0 if evidence.is_planned else evidence.steps * longest
        late = slow = 0.0
        if key not in _PAIRS:
            waiting = sum(ns for kind, ns in waited.items() if _find_key(kind) == key)
            late = min(waiting if waits else _lateness(evidence, key), exposed)
            slow = max(0.0, min(_slowness(evidence, key, rows), exposed) - late)
        code, _, advice = _COLLECTIVES.get(key, (f"exposed_{key}", "", "overlap it with compute"))
        name, number = key.replace("all", "all-").replace("scatter", "-scatter"), evidence.each(count)
        if late:
            who = f", of which rank {last.rank} joins last" if last else " over the usual time"
            text = f"{name} waits for other ranks: {evidence.time(late)}{who}"
            cause = "compare the traces of all ranks: one has more work, or a slower GPU or host"
            yield evidence.finding("straggler", text, late, rows, cause)
        if slow:
            text = f"{name} takes {evidence.time(slow)} more than this network's usual time, or waits for other ranks"
            cause = "check links and NCCL's choice of adapters (NCCL_DEBUG=INFO), and the traces of other ranks"
            yield evidence.finding("slow_network", text, slow, rows, cause, "network model: within a third")
        left = exposed - unavoidable - late - slow
        if left > 0:
            share = format_percent(exposed, sum(row.kernel_ns for row in rows))
            calls = format_quantity(number, "call")
            text = f"{name} exposed: {evidence.time(exposed)} in {calls}, {share} of their time"
            yield evidence.finding(code, text, left, rows, advice)


def _find_key(name: str) -> str:
    name = name.lower().replace("_", "")
    return next((key for key in _COLLECTIVES if key in name), "collective")


def _lateness(evidence: Evidence, key: str) -> float:
    """Return how much longer single collectives take than the median for equal payloads, exposed or not."""
    late = 0.0
    for timeline in evidence.trace.timelines:
        durations: dict[int, list[int]] = defaultdict(list)
        for _, number, details, duration in list_collectives(timeline):
            if key == _find_key(str(details.get("Collective name") or "")):
                durations[number].append(duration)
        for equal in durations.values():
            usual = median(equal)
            late += sum(duration - usual for duration in equal if duration > _LATE * usual)
    return late


def _slowness(evidence: Evidence, key: str, rows: list[WorkRow]) -> float:
    """Return how much longer the collectives take than the network of the device's usual nodes needs."""
    network = _find_network(evidence)
    if network is None or key not in _COLLECTIVES:
        return 0.0
    expected = measured = 0.0
    for row in rows:
        size = dict(row.details).get("Group size")
        if isinstance(size, int) and size > 1 and row.nbytes:
            group = ProcessGroupSpec("", size, "", 0, 1)
            seconds = network.seconds(_COLLECTIVES[key][1], row.nbytes // row.kernels, group)
            expected += row.kernels * seconds * 1e9
            measured += row.kernel_ns
    return measured - expected if expected and measured > _SLOW * expected else 0.0


def _find_network(evidence: Evidence) -> Network | None:
    try:
        return None if evidence.device is None else assume_network(evidence.device)
    except ValueError:  # no network is known for the device
        return None
