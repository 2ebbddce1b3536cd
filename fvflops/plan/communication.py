"""Communication of one rank: payload and bytes on the wire by collective, group, module and phase."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import NamedTuple, TypeVar

from fvflops.capture.errors.model_check import trace_of
from fvflops.reports.display import Displayed
from fvflops.reports.document import Document, Part, Table, number_column, text_column
from fvflops.reports.escaping import list_ops, printable_short
from fvflops.text import explaining_arguments, short_repr, shown_by_fields
from fvflops.trace import Signature, Trace, Value, tensors_in
from fvflops.trace.module_tree import innermost, modules_above
from fvflops.trace.process_group import ProcessGroupSpec
from fvflops.units import format_bytes, format_quantity, format_thousands

Key = TypeVar("Key")


class Volume(NamedTuple):
    """Calls, their payload in bytes, and the bytes on the wire.

    `wire` is the bytes that one rank sends, and receives, with ring algorithms; None if the group's size is unknown.
    """

    calls: int = 0
    payload: int = 0
    wire: int | None = 0

    def plus(self, other: Volume) -> Volume:
        wire = None if self.wire is None or other.wire is None else self.wire + other.wire
        return Volume(self.calls + other.calls, self.payload + other.payload, wire)


@shown_by_fields
class Transfer(NamedTuple):
    """All calls of one collective with one size of payload, in one scope and phase.

    `collective` is "all_reduce", "all_gather" and so on, `op` the op that ran; `dtype` is the payload's, "" for a
    barrier.
    """

    collective: str
    op: str
    group: ProcessGroupSpec | None
    dtype: str
    scope: tuple[str, ...]
    phase: str
    volume: Volume


class CollectiveKey(NamedTuple):
    """Key of a report's row: a collective on groups of one mesh axis (or name) and size, with one dtype."""

    collective: str
    axis: str
    size: int | None
    dtype: str


@dataclass(frozen=True, slots=True, repr=False)
class Communication(Displayed):
    """The transfers of one rank, and their sums; `unsupported` maps each unsupported communication op to its calls.

    >>> op, group = "c10d::allreduce_", ProcessGroupSpec("0", 2)
    >>> transfer = Transfer("all_reduce", op, group, "float32", ("", "fc"), "backward", Volume(1, 8, 8))
    >>> Communication((transfer, transfer)).by_collective_and_group()
    {CollectiveKey(collective='all_reduce', axis='0', size=2, dtype='float32'): Volume(calls=2, payload=16, wire=16)}
    """

    _report = "fvflops.plan.communication:communication_report"

    transfers: tuple[Transfer, ...]
    unsupported: Mapping[str, int] = field(default_factory=Counter)

    def __repr__(self) -> str:
        total = self.total()
        wire = "" if total.wire is None else f"{format_bytes(total.wire)} on the wire"
        return short_repr(
            self, "", format_quantity(total.calls, "call"), f"payload {format_bytes(total.payload)}", wire
        )

    def total(self) -> Volume:
        """Return the sum over all transfers."""
        return reduce(Volume.plus, (transfer.volume for transfer in self.transfers), Volume())

    def by_collective_and_group(self) -> dict[CollectiveKey, Volume]:
        """Return (collective, axis, size of the group, dtype) → volume."""
        return self._by(lambda transfer: [_key_of(transfer)])

    def by_collective(self) -> dict[str, Volume]:
        """Return collective → volume."""
        return self._by(lambda transfer: [transfer.collective])

    def by_axis(self) -> dict[str, Volume]:
        """Return mesh axis, or name of a process group that is not a mesh axis → volume."""
        return self._by(lambda transfer: [_key_of(transfer).axis])

    def by_phase(self) -> dict[str, Volume]:
        """Return phase → volume."""
        return self._by(lambda transfer: [transfer.phase])

    def by_module(self) -> dict[str, Volume]:
        """Return module name → volume, submodules included."""
        return self._by(lambda transfer: [*modules_above(owner := innermost(transfer.scope)), owner])

    def _by(self, keys_of: Callable[[Transfer], Iterable[Key]]) -> dict[Key, Volume]:
        sums: dict[Key, Volume] = {}
        for transfer in self.transfers:
            for key in keys_of(transfer):
                sums[key] = sums.get(key, Volume()).plus(transfer.volume)
        return sums


def _key_of(transfer: Transfer) -> CollectiveKey:
    group = transfer.group
    if group is None:
        return CollectiveKey(transfer.collective, "", None, transfer.dtype)
    return CollectiveKey(transfer.collective, group.axis or group.name, group.size, transfer.dtype)


# Bytes that one rank of n sends (or, for a receive, receives) for a payload of s bytes with ring algorithms, rounded up
# to an integer. Payload and factor as in NVIDIA's nccl-tests, doc/PERFORMANCE.md ("bus bandwidth"); the ring
# all-reduce as in Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations"
# (2009).
_WIRE: Mapping[str, Callable[[int, int], int]] = {
    "all_reduce": lambda s, n: -(-2 * (n - 1) * s // n),
    **dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all"), lambda s, n: -(-(n - 1) * s // n)),
    **dict.fromkeys(("broadcast", "reduce", "gather", "scatter"), lambda s, n: s if n > 1 else 0),
    **dict.fromkeys(("send", "receive"), lambda s, n: s),
    "barrier": lambda s, n: 0,
}

# Op → (the collective, the argument that is its payload; "" for the result).
_OPS: Mapping[str, tuple[str, str]] = {
    "c10d::allreduce_": ("all_reduce", "tensors"),
    "c10d::allreduce_coalesced_": ("all_reduce", "tensors"),
    "c10d::allgather_": ("all_gather", "output_tensors"),
    "c10d::_allgather_base_": ("all_gather", "output_tensor"),
    "c10d::allgather_coalesced_": ("all_gather", "output_lists"),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", "outputs"),
    "c10d::reduce_scatter_": ("reduce_scatter", "input_tensors"),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", "input_tensor"),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", "inputs"),
    "c10d::alltoall_": ("all_to_all", "input_tensors"),
    "c10d::alltoall_base_": ("all_to_all", "input"),
    "c10d::broadcast_": ("broadcast", "tensors"),
    "c10d::reduce_": ("reduce", "tensors"),
    "c10d::gather_": ("gather", "input_tensors"),
    "c10d::scatter_": ("scatter", "output_tensors"),
    "c10d::send": ("send", "tensors"),
    "c10d::recv_": ("receive", "tensors"),
    "c10d::recv_any_source_": ("receive", "tensors"),
    "c10d::barrier": ("barrier", "device_ids"),
    "c10d::monitored_barrier_": ("barrier", "device_ids"),
    "_c10d_functional::all_reduce": ("all_reduce", "input"),
    "_c10d_functional::all_reduce_": ("all_reduce", "input"),
    "_c10d_functional::all_reduce_coalesced": ("all_reduce", "inputs"),
    "_c10d_functional::all_reduce_coalesced_": ("all_reduce", "inputs"),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", ""),
    "_c10d_functional::all_gather_into_tensor_out": ("all_gather", "out"),
    "_c10d_functional::all_gather_into_tensor_coalesced": ("all_gather", ""),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", "input"),
    "_c10d_functional::reduce_scatter_tensor_out": ("reduce_scatter", "input"),
    "_c10d_functional::reduce_scatter_tensor_coalesced": ("reduce_scatter", "inputs"),
    "_c10d_functional::all_to_all_single": ("all_to_all", "input"),
    "_c10d_functional::broadcast": ("broadcast", "input"),
    "_c10d_functional::broadcast_": ("broadcast", "input"),
    "_c10d_functional::isend": ("send", "tensor"),
    "_c10d_functional::irecv": ("receive", "tensor"),
    "_c10d_functional_autograd::all_gather_into_tensor": ("all_gather", ""),
    "_c10d_functional_autograd::reduce_scatter_tensor": ("reduce_scatter", "input"),
    "_c10d_functional_autograd::all_to_all_single": ("all_to_all", "input"),
    "_dtensor::shard_dim_alltoall": ("all_to_all", "input"),
}
# Ops of the same namespaces without traffic.
_NO_TRAFFIC = (
    *("_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd"),
    *("_dtensor::mesh_get_process_group", "c10d::check_for_nan"),
)
NAMESPACES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem"})


class CollectiveCall(NamedTuple):
    """One call of a collective: its payload and its bytes on the wire, None for a group of unknown size."""

    collective: str
    group: ProcessGroupSpec | None
    dtype: str
    payload: int
    wire: int | None


@explaining_arguments
def read_communication(trace: Trace) -> Communication:
    """Return the communication of a rank's Trace.

    Payloads are in bytes, as NVIDIA's nccl-tests define them: the gathered tensor of an all-gather, the input of one
    rank of a reduce-scatter. With ring algorithms one rank of n sends 2(n-1)/n of the payload for an all-reduce, and
    (n-1)/n for an all-gather, a reduce-scatter and an all-to-all. Broadcast, reduce, gather and scatter count the
    payload once, and 0 for a group of one rank; send and receive count it once, and a barrier 0. Unsupported ops of
    torch's communication namespaces are in `unsupported`.

    >>> from fvflops.trace import ModuleInfo, ModuleTree, TensorSpec
    >>> inputs = (TensorSpec((6,)),), ProcessGroupSpec("0", 4).symbol()
    >>> op = Signature("c10d::allreduce_", ("tensors", "process_group"), inputs, ())
    >>> tree = ModuleTree({"": ModuleInfo("", "", "Net")})
    >>> read_communication(Trace(tree, (), ((),), (op,), (), {(0, 0, "backward"): 2}, {})).total()
    Volume(calls=2, payload=48, wire=72)
    """
    trace = trace_of(trace)
    scopes = trace.scopes()
    unsupported: Counter[str] = Counter()
    cache: dict[int, CollectiveCall | None] = {}  # by index of signature
    transfers = []
    for (index, stack, phase), calls in trace.calls.items():
        signature = trace.signatures[index]
        packet = signature.packet
        if not is_communication(packet):
            continue
        if index not in cache:
            cache[index] = collective_of(signature)
        traffic = cache[index]
        if traffic is None:
            unsupported[packet] += calls
            continue
        collective, group, dtype, payload, wire = traffic
        volume = Volume(calls, payload * calls, None if wire is None else wire * calls)
        transfers.append(Transfer(collective, packet, group, dtype, scopes[stack], phase, volume))
    return Communication(tuple(transfers), unsupported)


def is_communication(packet: str) -> bool:
    """Return whether an op is one of torch's communication, with traffic."""
    return packet.partition("::")[0] in NAMESPACES and packet not in _NO_TRAFFIC


def collective_of(signature: Signature) -> CollectiveCall | None:
    """Return the collective that an op call is, None for any other op, and for one without a rule."""
    if signature.packet not in _OPS:
        return None
    collective, argument = _OPS[signature.packet]
    payload: Value = signature.inputs[signature.names.index(argument)] if argument else signature.outputs
    tensors = list(tensors_in(payload))
    nbytes = sum(tensor.nbytes for tensor in tensors)
    group = next((group for group in map(ProcessGroupSpec.of, signature.inputs) if group is not None), None)
    dtypes = ", ".join(sorted({tensor.dtype for tensor in tensors}))
    wire = None if group is None else _WIRE[collective](nbytes, group.size)
    return CollectiveCall(collective, group, dtypes, nbytes, wire)


COLUMNS = (
    text_column("collective", form=printable_short),
    text_column("axis", form=printable_short),
    number_column("ranks", form=format_thousands),
    text_column("dtype", form=printable_short),
    number_column("calls", form=format_thousands),
    number_column("payload", "payload (B)", form=format_thousands),
    number_column("wire", "on the wire (B)", form=format_thousands, missing="?"),
)


def communication_parts(communication: Communication) -> list[Part]:
    """Return the table of collectives, and a note on unsupported ops.

    >>> communication_parts(Communication((), {"symm_mem::fused": 2}))[1:]
    ['Unsupported, so not in the bytes: symm_mem::fused (2 calls).']
    """
    rows = [(*key, *volume) for key, volume in communication.by_collective_and_group().items()]
    total = ("total", None, None, None, *communication.total())
    parts: list[Part] = [Table("communication", COLUMNS, rows, total=total, noun="collective")]
    if communication.unsupported:
        parts.append(f"Unsupported, so not in the bytes: {list_ops(communication.unsupported)}.")
    return parts if rows or communication.unsupported else [*parts, "No communication."]


def communication_report(communication: Communication) -> Document:
    return Document("communication", parts=communication_parts(communication))
