"""Changes of a recorded Trace to another rank, device or phase, and the traces of a distributed run's ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from fvflops.analysis.model_counts import FlopCountAnalysis
from fvflops.capture.recorder.tensor_specs import cached_schema, describe_tensor
from fvflops.formulas import FormulaTable
from fvflops.plan.communication import COLUMNS, Communication, read_communication
from fvflops.plan.rank_step import Call, Pass, RankStep, StageLinks
from fvflops.reports.display import Displayed
from fvflops.reports.document import Document, Table, number_column
from fvflops.text import explaining_arguments, short_repr
from fvflops.trace import Signature, TensorSpec, Trace, Value
from fvflops.trace.process_group import ProcessGroupSpec
from fvflops.units import format_quantity


def assign_phases(trace: Trace, slices: Mapping[tuple[int, int], str]) -> Trace:
    """Return a Trace with given phases for forward and other events in some slices of its events."""
    ranges = {(begin, end): phase for (begin, end), phase in slices.items() if begin < end}
    if not ranges:
        return trace
    events = list(trace.events or ())
    for (begin, end), phase in ranges.items():
        for index in range(begin, end):
            if events[index].phase in ("forward", "other"):
                events[index] = events[index]._replace(phase=phase)
    whole = Pass(replace(trace, events=events), 0, len(events))
    return replace(whole.trace, calls=dict(whole.count("op")), region_calls=dict(whole.count("exit")))


def relabel_devices(trace: Trace, device: torch.device) -> Trace:
    """Return a Trace with its CPU tensors labelled as on another device."""

    def change(value: Value) -> Value:
        return replace(value, device=str(device)) if isinstance(value, TensorSpec) and value.device == "cpu" else value

    changed = _change_values(trace, change)
    storages = [item._replace(device=str(device)) if item.device == "cpu" else item for item in trace.storages]
    return replace(changed, storages=storages, about={**trace.about, "device": str(device)})


@dataclass(frozen=True, slots=True)
class GroupShift:
    """Change of process groups to an equal rank's, `offset` ranks further along the pipeline axis."""

    offset: int

    def trace(self, trace: Trace) -> Trace:
        return _change_values(trace, self._group) if self.offset else trace

    def estimated(self, item: Pass) -> Pass:
        """Return a Pass with the calls of the other rank that were not run."""
        if not self.offset or not (item.added or item.gradients):
            return item
        return replace(
            item,
            added=tuple((_change_signature(call, self._group), *rest) for call, *rest in item.added),
            gradients=tuple(gradient._replace(group=self._group(gradient.group)) for gradient in item.gradients),
        )

    def _group(self, value: Value) -> Value:
        group = ProcessGroupSpec.of(value)
        if group is None or group.axis == "pp":
            return value
        return replace(group, first=group.first + self.offset).symbol()


def _change_values(trace: Trace, change: Callable[[Value], Value]) -> Trace:
    return replace(
        trace,
        signatures=tuple(_change_signature(item, change) for item in trace.signatures),
        region_signatures=tuple(_change_signature(item, change) for item in trace.region_signatures),
    )


def _change_signature(item: Any, change: Callable[[Value], Value]) -> Any:
    def change_all(value: Value) -> Value:
        return tuple(map(change_all, value)) if isinstance(value, tuple) else change(value)

    return replace(item, inputs=tuple(map(change_all, item.inputs)), outputs=tuple(map(change_all, item.outputs)))


def allreduce(gradient: TensorSpec, device: str, group: Value) -> Call:
    tensors = (replace(gradient, device=device),)
    return make_signature(torch.ops.c10d.allreduce_.default, tensors=tensors, process_group=group), "backward", 1


def send_recv(links: Iterable[StageLinks], rank: int, group: Value, microbatches: int) -> list[Call]:
    """Return the sends and receives of a pipeline rank's stages: hidden states forward, their gradients backward."""
    send, receive = torch.ops.c10d.send.default, torch.ops.c10d.recv_.default
    added: list[Call] = []
    for link in links:
        for hidden, other, forward, backward in (
            (link.received, link.source, receive, send),
            (link.sent, link.destination, send, receive),
        ):
            if hidden is not None and other != rank:
                for op, phase in ((forward, "forward"), (backward, "backward")):
                    signature = make_signature(op, tensors=(hidden,), process_group=group)
                    added.append((signature, phase, microbatches))
    return added


def total_of(recorded: Trace, step: RankStep, added: Sequence[Call]) -> Trace:
    """Return the Trace of a whole step; it has ordered events only if it equals the recording."""
    calls = step.count("op")
    added = [*step.added(), *added]
    if not added and calls == recorded.calls:
        return recorded
    signatures = list(recorded.signatures)
    indices = {signature: index for index, signature in enumerate(signatures)}
    for signature, phase, times in added:
        if signature not in indices:
            indices[signature] = len(signatures)
            signatures.append(signature)
        calls[indices[signature], 0, phase] += times
    total = replace(recorded.aggregate(), signatures=tuple(signatures), calls=dict(calls))
    return replace(total, region_calls=dict(step.count("exit")))


def make_signature(op: Any, *outputs: Value, **inputs: Value) -> Signature:
    schema = cached_schema(op)
    values = [inputs.get(name, default) for name, default in zip(schema.names, schema.defaults, strict=True)]
    return Signature(schema.name, schema.names, tuple(values), outputs, schema.text)


def local_spec(tensor: torch.Tensor) -> TensorSpec:
    """Return the spec of a tensor; for a DTensor, of its local shard."""
    from torch.distributed.tensor import DTensor

    return describe_tensor(tensor.to_local() if isinstance(tensor, DTensor) else tensor)


@dataclass(frozen=True, slots=True)
class ByRank:
    """One value for each rank.

    >>> flops = ByRank({0: 10, 1: 14})
    >>> flops.total, flops.least, flops.most
    (24, 10, 14)
    """

    by_rank: Mapping[int, int]

    @property
    def total(self) -> int:
        return sum(self.by_rank.values())

    @property
    def least(self) -> int:
        return min(self.by_rank.values())

    @property
    def most(self) -> int:
        return max(self.by_rank.values())


@dataclass(frozen=True, slots=True, repr=False)
class Ranks(Displayed):
    """The aggregated Traces of several ranks, by global rank.

    >>> import torch, fvflops
    >>> stops = fvflops.load_table("default").stops_at
    >>> trace = fvflops.record_call(torch.nn.Linear(3, 2), (torch.ones(1, 3),), stops_at=stops)
    >>> ranks = Ranks({0: trace, 1: trace})
    >>> ranks.flops(), ranks.merged().calls == {key: 2 * calls for key, calls in trace.calls.items()}
    (ByRank(by_rank={0: 6, 1: 6}), True)
    """

    _report = "fvflops.plan.trace_changes:ranks_report"

    traces: Mapping[int, Trace]

    def __repr__(self) -> str:
        calls = sum(sum(trace.calls.values()) for trace in self.traces.values())
        return short_repr(self, "", format_quantity(len(self.traces), "rank"), f"{format_quantity(calls, 'op call')}")

    def flops(self, module_name: str = "", *, table: str | FormulaTable = "default") -> ByRank:
        """Return the FLOPs of each rank in a module, 0 where a rank lacks it.

        A name in no rank's model raises KeyError, a table with a row for an op that the Traces have decomposed
        TraceError.
        """
        with_module = {rank: trace for rank, trace in self.traces.items() if module_name in trace.modules.by_name}
        if not with_module:
            next(iter(self.traces.values())).modules.canonical(module_name)
        return ByRank(
            {
                rank: _analyse(trace, table).total(module_name) if rank in with_module else 0
                for rank, trace in self.traces.items()
            }
        )

    def macs(self, *, table: str | FormulaTable = "default") -> ByRank:
        """Return the MACs of each rank."""
        return ByRank({rank: _analyse(trace, table).macs() for rank, trace in self.traces.items()})

    def communication(self) -> Mapping[int, Communication]:
        """Return the communication of each rank."""
        return {rank: read_communication(trace) for rank, trace in self.traces.items()}

    def payload(self) -> ByRank:
        """Return the payload of each rank's collectives in bytes."""
        return ByRank({rank: communication.total().payload for rank, communication in self.communication().items()})

    def merged(self) -> Trace:
        """Return the merged Trace of all ranks; different models, such as stages of a pipeline, raise TraceError."""
        return Trace.merge(self.traces.values())


@explaining_arguments
def gather(trace: Trace, *, group: Any = None, dst: int | None = None) -> Ranks | None:
    """Return the Traces of all ranks of a process group, by global rank; every rank of the group must call this.

    Traces are sent aggregated, as JSON. With `dst`, a global rank, only that rank gets the result, and the others
    get None. `group` is by default all ranks; a program without a process group raises RuntimeError. The gathering
    itself is not recorded.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("gather() needs a process group: call torch.distributed.init_process_group first")
    text = trace.aggregate().to_json()
    members = dist.get_process_group_ranks(group)
    if dst is not None and dst not in members:
        raise ValueError(f"gather(dst={dst}): dst must be one of the group's ranks, {members}")
    texts: list[Any] = [None] * len(members)
    if dst is None:
        dist.all_gather_object(texts, text, group=group)
    else:
        is_destination = dist.get_rank() == dst
        dist.gather_object(text, texts if is_destination else None, dst=dst, group=group)
        if not is_destination:
            return None
    return Ranks({rank: Trace.from_json(text) for rank, text in zip(members, texts, strict=True)})


def _analyse(trace: Trace, table: str | FormulaTable) -> FlopCountAnalysis:
    return FlopCountAnalysis.from_trace(trace, table=table, warn=False)


def ranks_report(ranks: Ranks) -> Document:
    """Return a row for each rank: its FLOPs, its MACs and the bytes that it sends."""
    columns = (
        number_column("rank", form=str),
        number_column("flops", "FLOPs"),
        number_column("macs", "MACs"),
        *COLUMNS[-3:],
    )
    flops, macs, sent = ranks.flops().by_rank, ranks.macs().by_rank, ranks.communication()
    rows = [(rank, flops[rank], macs[rank], *sent[rank].total()) for rank in ranks.traces]
    note = "Convention: default (1 FLOP per multiply-add)."
    return Document("ranks", parts=[Table("ranks", columns, rows, noun="rank", notes=[note])])
