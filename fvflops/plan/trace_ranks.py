"""Traces of a distributed run, one for each rank, and their totals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from fvflops.analysis.model_counts import FlopCountAnalysis
from fvflops.formulas import FormulaTable
from fvflops.plan.communication import COLUMNS, Communication, read_communication
from fvflops.reports.display import Displayed
from fvflops.reports.document import Document, Table, number_column
from fvflops.text import short_repr
from fvflops.trace import Trace
from fvflops.units import format_quantity


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

    _report = "fvflops.plan.trace_ranks:ranks_report"

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
