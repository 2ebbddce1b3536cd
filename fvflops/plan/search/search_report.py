"""Report of a search for a layout: the best, those that do not fit, and the time and memory of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from fvflops.devices.measured_errors import describe_verdicts
from fvflops.plan.memory.step_settings import Verdict, introduction
from fvflops.plan.search.candidates import Candidate, LayoutResult, LayoutSearch
from fvflops.plan.step_time.buckets import describe_buckets
from fvflops.plan.step_time.step_time_report import judge, list_unknown
from fvflops.reports.document import Command, Document, Items, Part, Point, Scatter, Table, number_column, text_column
from fvflops.reports.escaping import plain_name
from fvflops.text import record_data
from fvflops.units import format_bytes, format_quantity, format_seconds, format_share, format_short, format_thousands

_DIFFERENCES = "Layouts differ in mesh, batch, microbatches, schedule, sharding and checkpointing; the above is for {}."
# Figures of a layout in JSON.
_CANDIDATE_FIELDS = (
    *("mesh", "micro_batch", "microbatches", "schedule", "checkpoint"),
    "reshard_after_forward=reshard",
    "optimizer_sharding",
)
_RESULT_FIELDS = (
    *("seconds", "peak", "tokens_per_second", "samples_per_second", "mfu", "hfu"),
    *("bubble_share", "exposed_share", "least_seconds", "least_peak"),
)
_AXES = {"pp": "pipeline", "tp": "tensor parallelism"}
_SHOWN = 10  # layouts that do not fit: planned ones first, then the closest


def search_report(search: LayoutSearch, *, name: str = "", command: str = "", best: int | None = None) -> Document:
    """Return the report of a search for the model `name`; `command` plans the first layout."""
    found = search.best(best)
    verdict = _judge(search)
    settings = {**search.settings, "device": search.device.name}
    settings["efficiency"] = search.efficiency.source.partition(";")[0]
    settings |= {} if search.network is None else {"network": search.network.name}
    texts, about = introduction(verdict, settings)
    differences = _DIFFERENCES.format("the fastest" if found else "the one with the lowest memory")
    parts: list[Part] = [*texts, differences, _summarise(search), *_list_failures(search)]
    if found:
        parts.append(_tabulate_best(search, found))
        of_any_model = f"fvflops plan MODEL --device '{search.device.name}' {found[0].candidate.command()}"
        parts.append(Command("The first in full:", command or of_any_model))
        parts += _suggest_larger(search, found[0])
        parts += list_unknown(found[0].unknown, found[0].bytes_only)
    else:
        parts.append("No layout fits: use more GPUs or shorter sequences.")
    parts += [*_draw(search), *_list_not_fitting(search)]
    parts += [f"No {_AXES[axis]} was tried: {reason}." for axis, reason in search.not_tried.items()]
    parts.append(Items("Assumptions:", list(_list_assumptions(search))))
    title = f"{plain_name(name or 'the model')} on {format_thousands(search.gpus)} × {search.device.name}: "
    if found:
        seconds, mfu = format_seconds(found[0].seconds or 0), format_share(found[0].mfu or 0)
        title += f"{seconds} a step with {describe(found[0].candidate)}, MFU {mfu}"
    else:
        title += "no layout fits"
    return Document("layout_search", title, parts, main="best", data=_encode(search), about=about)


def _judge(search: LayoutSearch) -> Verdict:
    """Return whether the fastest layout fits; if none does, whether the one with the lowest memory does."""
    found = search.best(1) or [item for item in search.results if item.status != "failed"]
    verdicts = [judge(item.peak or item.least_peak, search.device, item.candidate.mesh) for item in found]
    return min(verdicts or [judge(0, search.device, {})], key=lambda verdict: verdict.needed + verdict.reserve)


def describe(candidate: Candidate) -> str:
    return " ".join(f"{axis}{size}" for axis, size in candidate.mesh.items())


def _describe_policies(candidate: Candidate) -> str:
    policies = [candidate.schedule] if candidate.schedule else []
    if not candidate.schedule and candidate.size("fsdp") > 1:
        policies.append("ZeRO-3" if candidate.reshard else "ZeRO-2")
    policies += ["ZeRO-1"] * (candidate.optimizer_sharding != "none")
    policies += [candidate.checkpoint] * (candidate.checkpoint != "none")
    return " ".join(policies)


_LAYOUT_COLUMNS = (text_column("mesh"), text_column("batch"), text_column("policy"))


def _cells_of(candidate: Candidate) -> tuple[str, str, str]:
    return describe(candidate), f"{candidate.micro_batch} × {candidate.microbatches}", _describe_policies(candidate)


def _summarise(search: LayoutSearch) -> str:
    counts = Counter(result.status for result in search.results)
    planned = sum(result.seconds is not None for result in search.results)
    rest = [
        f"{format_thousands(counts[status])} {what}"
        for status, what in (("does not fit", "do not fit"), ("slower", "are slower"), ("failed", "cannot be planned"))
        if counts[status]
    ]
    return (
        f"A global batch of {format_quantity(search.global_batch, 'sample')}. "
        f"{format_quantity(len(search.results), 'layout')}: {format_thousands(counts['fits'])} fit"
        f"{''.join(f', {text}' for text in rest)}; {format_thousands(planned)} were planned and simulated, in "
        f"{format_seconds(search.seconds)}."
    )


def _tabulate_best(search: LayoutSearch, found: Sequence[LayoutResult]) -> Table:
    front = {id(result) for result in search.pareto_front()}
    per_second = "samples" if found[0].tokens_per_second is None else "tokens"
    pipelines = any(result.candidate.schedule for result in found)
    columns = (
        number_column("rank", "#"),
        *_LAYOUT_COLUMNS,
        number_column("seconds", "step", form=format_seconds),
        number_column("mfu", "MFU", form=format_share),
        number_column("peak", "memory", form=format_bytes),
        text_column("front", "*"),
        number_column("exposed_share", "exposed", form=format_share),
        number_column("bubble_share", "bubble", form=format_share, only_for="" if pipelines else "data"),
        replace(number_column(f"{per_second}_per_second", f"{per_second}/s", form=format_short), hide_order=1),
    )
    rows = []
    for number, result in enumerate(found, start=1):
        candidate, mark = result.candidate, "*" if id(result) in front else ""
        bubble = result.bubble_share if candidate.schedule else None
        rate = result.samples_per_second if per_second == "samples" else result.tokens_per_second
        figures = (result.seconds, result.mfu, result.peak, mark, result.exposed_share, bubble, rate)
        rows.append((number, *_cells_of(candidate), *figures))
    notes = [
        "Batch: samples of a microbatch × microbatches of a replica. Policy: pipeline schedule or sharding, and "
        "activation checkpointing.",
        "Exposed: share of the step in which the slowest rank waits for collectives; "
        + "bubble: share in which a pipeline's ranks are idle, on average; " * pipelines
        + "most of the rest is time in kernels.",
        f"* No planned layout that fits is both faster and smaller. Memory of {search.device.name}: "
        f"{format_bytes(search.device.memory) if search.device.memory else 'unknown'}. {describe_verdicts()}",
        search.error.text,
    ]
    return Table("best", columns, rows, title="The fastest layouts that fit", notes=notes, noun="layout")


def _suggest_larger(search: LayoutSearch, result: LayoutResult) -> Iterator[str]:
    """Yield that a larger microbatch may be faster, if the best has the largest that was tried."""
    candidate = result.candidate
    largest = max(other.candidate.micro_batch for other in search.results)
    if candidate.micro_batch == largest and candidate.microbatches % 2 == 0:
        yield (
            f"The first has the largest microbatch that was tried: a larger one may be faster, with --choices "
            f"micro-batch={largest},{2 * largest}."
        )


def _draw(search: LayoutSearch) -> Iterator[Part]:
    front = {id(result) for result in search.pareto_front()}
    points = [
        Point(result.seconds, result.peak, result.candidate.command(), id(result) in front)
        for result in search.results
        if result.seconds is not None and result.peak is not None
    ]
    if len({format_bytes(point.y) for point in points}) > 1:
        memory = search.device.memory
        limit = None
        if memory is not None and memory < 2 * max(point.y for point in points):
            limit = float(memory), f"{format_bytes(memory)} of {search.device.name}"
        yield Scatter(
            *("layouts", points, "step time", "memory"),
            x_form=format_seconds,
            y_form=lambda value: format_bytes(round(value)),
            title="Time and memory of the planned layouts",
            limit=limit,
        )


def _list_not_fitting(search: LayoutSearch) -> Iterator[Part]:
    rejected = [item for item in search.results if item.status == "does not fit"]
    if not rejected:
        return
    rejected.sort(key=lambda item: (item.peak is None, item.peak or item.least_peak))
    columns = (*_LAYOUT_COLUMNS, number_column("seconds", "step", form=format_seconds), text_column("reason", "memory"))
    rows = [(*_cells_of(item.candidate), item.seconds, item.reason.partition(",")[0]) for item in rejected[:_SHOWN]]
    left = len(rejected) - len(rows)
    notes = [f"{format_quantity(left, 'further layout')} in JSON."] if left else []
    title = "Layouts that do not fit, the closest first"
    yield Table("rejected", columns, rows, title=title, notes=notes, noun="layout")


def _list_failures(search: LayoutSearch) -> Iterator[Part]:
    reasons = Counter(result.reason for result in search.results if result.status == "failed")
    if reasons:
        yield Items(
            "These layouts failed, and one of them may be faster:",
            [f"{format_quantity(count, 'layout')}: {reason}" for reason, count in reasons.most_common(_SHOWN)],
        )


def _list_assumptions(search: LayoutSearch) -> Iterator[str]:
    yield f"Efficiency of {search.device.name}: {search.efficiency.source}."
    if search.network is not None:
        yield f"Network {search.network.name}: {search.network.source}."
    yield (
        "A layout is not planned if a lower bound of its time exceeds the best time: the least bubble, "
        "all of FSDP2's and DDP's communication hidden, and larger microbatches that take a tenth less per sample."
    )
    if any(item.candidate.size("dp") > 1 and item.candidate.size("fsdp") == 1 for item in search.results):
        yield f"{describe_buckets(search.bucket_cap_mb)}."
    yield "Memory: what torch's allocator reserves with expandable segments; NCCL's allowance counts the mesh's axes."
    yield "`fvflops plan` of one layout lists the other assumptions of its time."


def _encode(search: LayoutSearch) -> dict[str, Any]:
    front = {id(result) for result in search.pareto_front()}
    layouts = [
        {
            **record_data(result.candidate, *_CANDIDATE_FIELDS),
            "options": result.candidate.command(),
            "status": result.status,
            "reason": result.reason,
            "on_pareto_front": id(result) in front,
            **record_data(result, *_RESULT_FIELDS),
            "settings": search.settings_of(result.candidate),
        }
        for result in search.results
    ]
    names = ("gpus", "global_batch", "device=device.name", "network=network.name", "seconds")
    return {**record_data(search, *names), "error": search.error._asdict(), "layouts": layouts}
