"""Report of a rank's communication: a row for each collective, group and dtype."""

from __future__ import annotations

from fvflops.plan.communication import Communication
from fvflops.plan.trace_ranks import Ranks
from fvflops.reports.document import Document, Part, Table, number_column, text_column
from fvflops.reports.escaping import list_ops, printable_short
from fvflops.reports.formats import write_document
from fvflops.units import format_thousands

_COLUMNS = (
    text_column("collective", form=printable_short),
    text_column("axis", form=printable_short),
    number_column("ranks", form=format_thousands),
    text_column("dtype", form=printable_short),
    number_column("calls", form=format_thousands),
    number_column("payload", "payload (B)", form=format_thousands),
    number_column("wire", "on the wire (B)", form=format_thousands, missing="?"),
)


def render(communication: Communication) -> str:
    """Return the communication as text.

    >>> print(render(Communication((), {"symm_mem::fused": 2})))
    Unsupported, so not in the bytes: symm_mem::fused (2 calls).
    >>> print(render(Communication(())))
    No communication.
    """
    return write_document(communication_report(communication))


def communication_parts(communication: Communication) -> list[Part]:
    """Return the table of collectives, and a note on unsupported ops."""
    rows = [(*key, *volume) for key, volume in communication.by_collective_and_group().items()]
    total = ("total", None, None, None, *communication.total())
    parts: list[Part] = [Table("communication", _COLUMNS, rows, total=total, noun="collective")]
    if communication.unsupported:
        parts.append(f"Unsupported, so not in the bytes: {list_ops(communication.unsupported)}.")
    return parts if rows or communication.unsupported else [*parts, "No communication."]


def communication_report(communication: Communication) -> Document:
    """Return the report of one rank's communication."""
    return Document("communication", parts=communication_parts(communication))


def ranks_report(ranks: Ranks) -> Document:
    """Return a row for each rank: its FLOPs, its MACs and what it sends."""
    columns = (
        number_column("rank", form=str),
        number_column("flops", "FLOPs"),
        number_column("macs", "MACs"),
        *_COLUMNS[-3:],
    )
    flops, macs, sent = ranks.flops().by_rank, ranks.macs().by_rank, ranks.communication()
    rows = [(rank, flops[rank], macs[rank], *sent[rank].total()) for rank in ranks.traces]
    note = "Convention: default (1 FLOP per multiply-add)."
    return Document("ranks", parts=[Table("ranks", columns, rows, noun="rank", notes=[note])])
