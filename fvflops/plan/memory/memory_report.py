"""Report of predicted memory: the peak, its kinds and modules, the curve over the run, and changes that lower it."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import groupby
from typing import Any, NamedTuple

from fvflops import paths
from fvflops.plan.memory.step_settings import Verdict, introduction
from fvflops.plan.memory.storage_lifetimes import KINDS, MemoryMoment, MemoryTimeline, read_memory
from fvflops.reports.display import Displayed
from fvflops.reports.document import (
    Chart,
    Document,
    Items,
    Part,
    Table,
    Value,
    data_only,
    difference_column,
    module_column,
    number_column,
    text_column,
)
from fvflops.reports.escaping import list_ops, plain_name
from fvflops.reports.formats import write_document
from fvflops.reports.pictures.svg_picture import svg_chart
from fvflops.reports.terminal.collapse import collapse, format_range
from fvflops.text import record_repr, short_repr
from fvflops.trace import PHASES, Event, ModuleTree, Summary, Trace
from fvflops.trace.module_tree import innermost, modules_above
from fvflops.trace.records import list_run_notes, reads_of
from fvflops.units import format_bytes, format_change, format_percent, format_quantity
from fvflops.views.breakdown import MemoryCurve
from fvflops.views.summary_rows import ITSELF, count_itself, depth_of

# Recompute happens inside the backward pass.
_SECTIONS = {"recompute": "backward"}


def memory_chart(timeline: MemoryTimeline) -> Chart:
    """Return the bytes of each kind of memory at each op, and the phases."""
    ops, layers = _read_ops(timeline)
    phases = groupby(_SECTIONS.get(event.phase, event.phase) for event in ops)
    sections = [(name, len(list(group))) for name, group in phases]
    return Chart("memory", layers, sections, title="Memory over the ops of the run, in bytes by kind")


def _read_ops(timeline: MemoryTimeline) -> tuple[list[Event], dict[str, list[int]]]:
    """Return the ops with tensors, and the bytes of each kind after each of them."""
    events = timeline.trace.events or ()
    ops = [index for index, event in enumerate(events) if event.kind == "op" and (event.reads or event.writes)]
    curves = {kind: timeline.curve(kind) for kind in KINDS}
    # The first value of a curve is from before the run.
    layers = {kind: [curve[index + 1] for index in ops] for kind, curve in curves.items()}
    return [events[index] for index in ops], layers


def draw_memory(timeline: MemoryTimeline, title: str) -> str:
    return svg_chart(replace(memory_chart(timeline), title=title, form=format_bytes))


def memory_curve(source: Trace | MemoryTimeline) -> MemoryCurve | None:
    """Return the bytes of each kind of memory after each op of a run; None where its Trace has no order of events.

    >>> import torch
    >>> from fvflops import record_call
    >>> curve = memory_curve(record_call(torch.nn.Linear(3, 2), (torch.ones(4, 3),)))
    >>> curve.ops, max(curve.totals())
    (['aten::t', 'aten::addmm'], 112)
    """
    if isinstance(source, Trace) and source.events is None:
        return None
    timeline = read_memory(source) if isinstance(source, Trace) else source
    trace = timeline.trace
    ops, layers = _read_ops(timeline)
    scopes = trace.scopes()
    return MemoryCurve(
        {kind: values for kind, values in layers.items() if any(timeline.curve(kind))},
        [trace.signatures[event.item].op for event in ops],
        [innermost(scopes[event.stack]) for event in ops],
        [event.phase for event in ops],
    )


DEPTH = 2  # levels of modules below the root

_LAST_NUMBER = re.compile(r"(?<![^.])\d{1,18}((?:\.(?!\d+(?:\.|$))[^.]*)*)$")
_HEADINGS = {"optimizer state": "optimizer"}


class MemoryPrediction(MemoryTimeline, Displayed):
    """A MemoryTimeline that `print` and a notebook show as its report."""

    __slots__ = ()
    _report = "fvflops.plan.memory.memory_report:memory_report"

    def report(
        self,
        *,
        savings: MemorySavings | None = None,
        depth: int | None = DEPTH,
        collapsed: bool = True,
        subject: str = "",
    ) -> Document:
        """Return the report as a document, which every format of a report can write.

        It has `depth` levels of modules, all if None; `collapsed` shows consecutive equal layers as one row. `savings`
        is the result of `memory_savings`, and `subject` the name of the model.
        """
        return memory_report(self, savings=savings, depth=depth, collapsed=collapsed, subject=subject)

    def to_markdown(self) -> str:
        """Return the report in GitHub's Markdown."""
        return write_document(self.report(), "markdown")

    def to_json(self) -> str:
        """Return all modules and kinds at the peak, and the curve, as JSON text with exact numbers."""
        return write_document(self.report(collapsed=False, depth=None), "json")

    def to_html(self, path: str | os.PathLike[str] | None = None, *, savings: MemorySavings | None = None) -> str:
        """Return the report as an HTML page that needs no network; write it to `path` if given."""
        page = write_document(self.report(savings=savings), "html")
        if path is not None:
            paths.write_text(os.fspath(path), page)
        return page

    def to_picture(self, path: str | os.PathLike[str]) -> None:
        """Write the curve over the run as an SVG picture."""
        paths.write_text(os.fspath(path), draw_memory(self, memory_title(self, "")))

    def _repr_markdown_(self) -> str:
        return self.to_markdown()


def as_prediction(timeline: MemoryTimeline, settings: Mapping[str, Any]) -> MemoryPrediction:
    """Return a timeline with other settings, as a MemoryPrediction, which prints its report."""
    values = {item.name: getattr(timeline, item.name) for item in fields(timeline) if item.init}
    return MemoryPrediction(**{**values, "settings": settings})


def memory_report(
    timeline: MemoryTimeline,
    *,
    savings: MemorySavings | None = None,
    depth: int | None = DEPTH,
    collapsed: bool = True,
    subject: str = "",
    verdict: Verdict | None = None,
    command: str = "",
    notes: Sequence[str] = (),
) -> Document:
    """Return whether it fits, the assumptions, the peak with its kinds, phases and modules, the curve, the savings.

    The arguments are as for `MemoryPrediction.report`; `verdict` is by default the peak on an unknown device,
    `command` the command line of the report, and `notes` are further sentences.
    """
    moment = timeline.at_peak()
    verdict = verdict or Verdict(timeline.peak)
    texts, about = introduction(verdict, timeline.settings, command)
    parts: list[Part] = [*texts, _describe_peak(timeline, moment)]
    chart = memory_chart(timeline)
    parts += [chart] if any(chart.totals()) else []
    parts += [_tabulate_peak(timeline, moment), _tabulate_kinds(timeline, moment, chart), _tabulate_phases(timeline)]
    parts.append(_tabulate_modules(timeline, moment, depth, collapsed))
    if savings is not None:
        parts.append(_tabulate_savings(savings))
        # Formats for people omit an empty table with its notes.
        parts += [] if savings.changes else [Items("", [*_note(savings)])]
    unseen = list_ops(dict(timeline.unseen.most_common()))
    gaps = [f"Unknown workspace, so not included: {unseen}."] if timeline.unseen else []
    parts.append(Items("", [*notes, *gaps, *list_run_notes(timeline.trace.about, plain_name)]))
    column = data_only((text_column("location"),), ["location"])
    for kind, locations in reads_of(timeline.trace.info).items():
        parts.append(Table(kind, column, [(location,) for location in locations]))
    title = memory_title(timeline, subject, verdict.needed if verdict.device else None)
    return Document("memory", title, parts, main="modules", about=about)


def memory_title(timeline: MemoryTimeline, subject: str, reserved: int | None = None) -> str:
    name = plain_name(subject or timeline.trace.modules.root.class_name) or "The run"
    inputs = timeline.trace.info.inputs
    reserves = "" if reserved is None else f", {format_bytes(reserved)} reserved by torch's allocator"
    return f"{name}{f' on {plain_name(inputs)}' if inputs else ''}: peak memory {format_bytes(timeline.peak)}{reserves}"


def _describe_peak(timeline: MemoryTimeline, moment: MemoryMoment) -> str:
    runs = {"backward": "a training step", "optimizer": "an optimizer step", "forward": "a forward pass"}
    run = next((text for phase, text in runs.items() if phase in timeline.by_phase()), "a run without ops")
    where = "before it begins"
    if moment.op:
        op, module = plain_name(_short(moment.op)), plain_name(moment.module) or "the model"
        where = f"in the {moment.phase} phase, at {op} of {module}"
    return f"Predicted for {run} on {timeline.device}: the peak of {format_bytes(timeline.peak)} is {where}."


def _short(op: str) -> str:
    return op.removeprefix("aten::")


def _tabulate_peak(timeline: MemoryTimeline, moment: MemoryMoment) -> Table:
    sizes = [number_column("bytes"), number_column("before_the_run")]
    columns = [*sizes, *map(text_column, ("phase", "op", "module", "device"))]
    row = (timeline.peak, timeline.baseline, moment.phase, moment.op, moment.module, timeline.device)
    return Table("peak", [replace(column, only_for="data") for column in columns], [row])


def _tabulate_kinds(timeline: MemoryTimeline, moment: MemoryMoment, chart: Chart) -> Table:
    columns = (
        text_column("kind"),
        number_column("bytes", "at the peak"),
        number_column("share", form=format_percent),
        number_column("highest", "highest in the run"),
    )
    rows = [
        (kind, moment.by_kind[kind], _share(moment.by_kind[kind], timeline.peak), max(timeline.curve(kind)))
        for kind in KINDS
        if any(chart.layers[kind]) or kind in moment.by_kind
    ]
    total = ("total", timeline.peak, _share(timeline.peak, timeline.peak), timeline.peak)
    return Table("kinds", columns, rows, title="Bytes by kind", total=total, noun="kind")


def _tabulate_phases(timeline: MemoryTimeline) -> Table:
    columns = (
        text_column("phase"),
        number_column("bytes", "peak"),
        text_column("op", form=_short),
        text_column("module", form=lambda name: name or "model"),
    )
    totals, rows = timeline.curve(), []
    for phase, peak in sorted(timeline.by_phase().items(), key=lambda item: PHASES.index(item[0])):
        ops = (i for i, event in enumerate(timeline.trace.events or ()) if (event.kind, event.phase) == ("op", phase))
        moment = timeline.at(next(index for index in ops if totals[index + 1] == peak))
        rows.append((phase, peak, moment.op, moment.module))
    return Table("phases", columns, rows, title="Most bytes in each phase", noun="phase")


def _tabulate_modules(timeline: MemoryTimeline, moment: MemoryMoment, depth: int | None, collapsed: bool) -> Table:
    kinds = [kind for kind, nbytes in moment.by_kind.items() if nbytes]
    largest = [kind for kind, _ in moment.by_kind.most_common()]
    of_kinds = [number_column(kind.replace(" ", "_"), _HEADINGS.get(kind, kind)) for kind in kinds]
    columns = (
        module_column(),
        number_column("bytes", "at the peak"),
        number_column("share", form=format_percent),
        *(replace(column, hide_order=1 + largest.index(kind)) for kind, column in zip(kinds, of_kinds, strict=True)),
    )
    summary = _summarise_modules(timeline, moment)
    if collapsed:
        summary = collapse(summary)
    filled = [module.name for module in summary.modules.modules() if summary.columns["bytes"].get(module.name)]
    shown = [name for name in filled if depth is None or depth_of(name) <= depth]
    parents = dict.fromkeys(name.rpartition(".")[0] for name in shown if name) if collapsed else ()
    itself = count_itself(summary, parents, "bytes")
    rows: list[tuple[Value, ...]] = []
    for name in shown:
        label = _label(name, summary.labels)
        counts = {heading: column.get(name, 0) for heading, column in summary.columns.items()}
        for text, row in ((label, counts), (f"{label}.{ITSELF}".lstrip("."), itself.get(name, {}))):
            if row:
                rows.append((text, row["bytes"], _share(row["bytes"], timeline.peak), *(row[kind] for kind in kinds)))
    hidden = len(filled) - len(shown)
    notes = [f"{format_quantity(hidden, 'more module')} below depth {depth}."] if hidden else []
    if "" in itself:
        notes.append("(itself) of the model: in no submodule, as inputs, the loss and the optimizer's temporaries.")
    title = "Bytes of modules at the peak, with their submodules"
    return Table("modules", columns, rows, title=title, notes=notes, noun="module")


def _summarise_modules(timeline: MemoryTimeline, moment: MemoryMoment) -> Summary:
    columns: dict[str, Counter[str]] = {kind: Counter() for kind in (*moment.by_kind, "bytes")}
    for block in timeline.blocks:
        for kind in (block.kind, "bytes") if block.is_alive(moment.event) else ():
            columns[kind].update(dict.fromkeys((*modules_above(block.module), block.module), block.nbytes))
    tree: ModuleTree = timeline.trace.modules
    return Summary(tree.with_pseudo_modules([name for name in moment.by_module if name not in tree.by_name]), columns)


def _label(name: str, labels: Mapping[str, str]) -> str:
    """Return a module's name, in which each ancestor that represents repeated layers has its label."""
    for above in (*modules_above(name)[1:], name):
        if above in labels:
            return labels[above] + name[len(above) :]
    return name


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def savings_report(savings: MemorySavings) -> Document:
    parts: list[Part] = [_tabulate_savings(savings)] if savings.changes else [Items("", [*_note(savings)])]
    return Document("memory_savings", f"Peak memory {format_bytes(savings.peak)}", parts)


def _tabulate_savings(savings: MemorySavings) -> Table:
    columns = (
        text_column("change", shorten_last=True),
        replace(text_column("modules"), hide_order=1),
        number_column("peak"),
        number_column("saved"),
        number_column("share", form=format_percent),
        difference_column("flops", "FLOPs"),
        difference_column("relative", form=format_change),
    )
    rows = []
    for saving in savings.changes:
        *_, modules, peak, saved, flops = saving
        shares = _share(saved, savings.peak), _share(flops, savings.flops)
        rows.append((_describe_change(saving), _join_names(modules), peak, saved, shares[0], flops, shares[1]))
    notes = [*_note(savings)] if savings.changes else []
    title = "What lowers the peak, in bytes, each predicted on its own"
    return Table("savings", columns, rows, title=title, notes=notes, noun="change")


def _describe_change(saving: MemorySaving) -> str:
    if saving.change == "checkpoint":
        return f"checkpoint {saving.name} × {len(saving.modules)}"
    return f"{saving.change} {saving.name}"


def _join_names(names: Iterable[str]) -> str:
    """Return names of modules, one for all that differ only in the last of their numbers.

    >>> _join_names(["h.0.mlp", "h.1.mlp", "layer1.0", "layer1.1", "layer2.0"])
    'h.0–1.mlp, layer1.0–1, layer2.0'
    """
    by_pattern: dict[str, list[str]] = {}
    for name in names:
        by_pattern.setdefault(_LAST_NUMBER.sub(r"#\1", name), []).append(name)
    return ", ".join(map(format_range, by_pattern.values()))


def _note(savings: MemorySavings) -> Iterator[str]:
    if not savings.changes:
        yield "No change that was tried lowers the peak."
    if savings.useless:
        yield f"Not lower: {', '.join(plain_name(_describe_change(saving)) for saving in savings.useless)}."
    for change, error in savings.failed.items():
        yield f"Not predicted: {plain_name(change)}: {plain_name(error)}."
    if savings.untried:
        yield f"Not tried: {', '.join(map(plain_name, savings.untried))}."
    yield f"FLOPs: convention {plain_name(savings.table)}."


class MemorySaving(NamedTuple):
    """A change to a training step: its peak memory in bytes, and the FLOPs that it adds, both predicted.

    `change` is "checkpoint" and the class of the `modules` whose activations are recomputed, "dtype" and the dtype of
    weights and inputs, "autocast" and the dtype of the forward pass, or "optimizer" and its name. `saved` is how much
    lower the peak is.
    """

    change: str
    name: str
    modules: tuple[str, ...]
    peak: int
    saved: int
    flops: int

    def __repr__(self) -> str:
        return record_repr(self)


@dataclass(frozen=True, slots=True, repr=False)
class MemorySavings(Displayed):
    """Changes that lower the peak memory of a training step, the largest saving first.

    `peak` is the step's peak in bytes, `flops` its FLOPs in the convention `table`. `useless` are changes that do not
    lower the peak, `failed` is change → error for changes that make the step raise, and `untried` names further ones.
    """

    _report = "fvflops.plan.memory.memory_report:savings_report"

    peak: int
    flops: int
    table: str
    changes: tuple[MemorySaving, ...]
    useless: tuple[MemorySaving, ...] = ()
    failed: Mapping[str, str] = field(default_factory=dict)
    untried: tuple[str, ...] = ()

    def __repr__(self) -> str:
        best = f"at best {format_bytes(min(change.peak for change in self.changes))}" if self.changes else ""
        changes = format_quantity(len(self.changes), "change")
        return short_repr(self, "", f"peak {format_bytes(self.peak)}", f"{changes} that lower it", best)
