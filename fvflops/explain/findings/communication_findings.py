"""Findings of communication: exposed collectives, ranks that come late, and links that are slow."""

from __future__ import annotations

from collections import defaultdict
from statistics import median

from fvflops.explain.findings.finding import MEASURED, Evidence, Finding, Findings, list_evidence
from fvflops.explain.step_records import WorkRow
from fvflops.plan.step_time.calibration import Network, assume_network
from fvflops.trace.process_group import ProcessGroupSpec
from fvflops.units import format_percent, format_quantity, format_seconds

# Collective, as a part of the recorded name → its code, its name, and how to hide it.
_COLLECTIVES = {
    "allgather": ("exposed_all_gather", "all_gather", "prefetch the next module's parameters (FSDP: forward_prefetch)"),
    "reducescatter": ("exposed_reduce_scatter", "reduce_scatter", "reduce gradients beside the backward pass"),
    "allreduce": ("exposed_all_reduce", "all_reduce", "reduce in buckets beside the backward pass, as DDP does"),
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
_SIZES = {"bfloat16": 2, "half": 2, "float16": 2, "float": 4, "float32": 4, "byte": 1, "double": 8}
_LATE, _SLOW = 1.6, 1.5  # times the median of equal collectives, and the network's time


def find_communication(evidence: Evidence) -> Findings:
    """Yield findings of exposed collectives, first the parts due to late ranks and slow links."""
    groups: dict[str, list[WorkRow]] = defaultdict(list)
    for row in evidence.work:
        if row.kind == "communication":
            groups[_key(row)].append(row)
    for key, rows in groups.items():
        exposed = sum(row.ns for row in rows)
        count = sum(row.kernels for row in rows)
        # One of them can seldom be hidden, such as the first gather of a step and the last reduction.
        longest = max((row.kernel_ns / row.kernels for row in rows if row.kernels), default=0.0)
        unavoidable = 0.0 if evidence.is_planned else evidence.steps * longest
        late = min(_lateness(evidence, key), exposed) if key not in _PAIRS else 0.0
        slow = min(_slowness(evidence, key, rows), exposed - late) if not late and key not in _PAIRS else 0.0
        code, _, advice = _COLLECTIVES.get(key, (f"exposed_{key}", "", "overlap it with compute"))
        name, number = key.replace("all", "all-").replace("scatter", "-scatter"), evidence.each(count)
        shown = list_evidence(rows, evidence.steps)
        if late:
            text = f"{name} waits for other ranks: {format_seconds(evidence.seconds(late))} over the usual time"
            yield Finding(
                *("straggler", text, evidence.seconds(late), shown),
                *("compare the traces of all ranks: one has more work, or a slower GPU or host", MEASURED),
            )
        if slow:
            over = format_seconds(evidence.seconds(slow))
            text = f"{name} takes {over} more than this network's usual time, or waits for other ranks"
            yield Finding(
                *("slow_network", text, evidence.seconds(slow), shown),
                *(
                    "check links and NCCL's choice of adapters (NCCL_DEBUG=INFO), and the traces of other ranks",
                    "network model: within a third",
                ),
            )
        left = exposed - unavoidable - late - slow
        if left > 0:
            total = sum(row.kernel_ns for row in rows)
            text = (
                f"{name} exposed: {format_seconds(evidence.seconds(exposed))} in {format_quantity(number, 'call')}, "
                f"{format_percent(exposed, total)} of their time"
            )
            yield Finding(code, text, evidence.seconds(left), shown, advice, MEASURED)


def _key(row: WorkRow) -> str:
    name = f"{dict(row.details).get('Collective name') or ''} {row.op} {row.kernel}".lower().replace("_", "")
    return next((key for key in _COLLECTIVES if key in name), "collective")


def _lateness(evidence: Evidence, key: str) -> float:
    """Return how much longer single collectives take than the median for equal payloads, exposed or not."""
    late = 0.0
    for timeline in evidence.trace.timelines:
        activities, columns = timeline.activities, timeline.columns
        durations: dict[int, list[int]] = defaultdict(list)
        for index, number in enumerate(activities.details):
            details = columns.details[number] if number >= 0 else {}
            name = str(details.get("Collective name") or "").lower().replace("_", "")
            if key in name:
                durations[number].append(activities.end[index] - activities.start[index])
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
        details = dict(row.details)
        size, dtype = details.get("Group size"), str(details.get("dtype", "")).lower()
        elements = max(details.get("In msg nelems", 0), details.get("Out msg nelems", 0))
        if isinstance(size, int) and size > 1 and dtype in _SIZES and elements:
            group = ProcessGroupSpec("", size, "", 0, 1)
            expected += row.kernels * network.seconds(_COLLECTIVES[key][1], elements * _SIZES[dtype], group) * 1e9
            measured += row.kernel_ns
    return measured - expected if expected and measured > _SLOW * expected else 0.0


def _find_network(evidence: Evidence) -> Network | None:
    try:
        return None if evidence.device is None else assume_network(evidence.device)
    except ValueError:  # no network is known for the device
        return None
