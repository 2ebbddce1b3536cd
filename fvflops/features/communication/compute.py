"""Read the payload and the bytes on the wire of each collective and point-to-point op of a Trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

from fvflops.features.communication.model import Communication, Transfer, Volume
from fvflops.trace import Signature, TensorSpec, Trace, Value, tensors_in
from fvflops.trace.process_group import ProcessGroupSpec

# Bytes that one rank of n sends (or, for a receive, receives) for a payload of s bytes with ring algorithms, rounded up
# to an integer. Payload and factor are those of NVIDIA's nccl-tests, doc/PERFORMANCE.md ("bus bandwidth"); the ring
# all-reduce is that of Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations"
# (2009).
_WIRE: Mapping[str, Callable[[int, int], int]] = {
    "all_reduce": lambda s, n: -(-2 * (n - 1) * s // n),
    "all_gather": lambda s, n: -(-(n - 1) * s // n),
    "reduce_scatter": lambda s, n: -(-(n - 1) * s // n),
    "all_to_all": lambda s, n: -(-(n - 1) * s // n),
    "broadcast": lambda s, n: s if n > 1 else 0,
    "reduce": lambda s, n: s if n > 1 else 0,
    "gather": lambda s, n: s if n > 1 else 0,
    "scatter": lambda s, n: s if n > 1 else 0,
    "send": lambda s, n: s,
    "receive": lambda s, n: s,
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
_NO_TRAFFIC = frozenset(
    {
        "_c10d_functional::wait_tensor",
        "_c10d_functional::_wrap_tensor_autograd",
        "_dtensor::mesh_get_process_group",
        "c10d::check_for_nan",
    }
)
_NAMESPACES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem"})


class CollectiveCall(NamedTuple):
    """One call of a collective: its payload and its bytes on the wire, None for a group of unknown size."""

    collective: str
    group: ProcessGroupSpec | None
    dtype: str
    payload: int
    wire: int | None


def read_communication(trace: Trace) -> Communication:
    """Return the communication of a rank's Trace.

    Payloads are in bytes, as NVIDIA's nccl-tests define them: of an all-gather the gathered tensor, of a reduce-scatter
    the input of one rank. With ring algorithms one rank of n sends 2(n-1)/n of the payload for an all-reduce, and
    (n-1)/n for an all-gather, a reduce-scatter and an all-to-all. Broadcast, reduce, gather and scatter count the
    payload once, but 0 for a group of one rank; send and receive count it once, and a barrier 0. Unsupported ops of
    torch's communication namespaces are in `unsupported`.

    >>> from fvflops.trace import ModuleInfo, ModuleTree
    >>> inputs = (TensorSpec((6,)),), ProcessGroupSpec("0", 4).symbol()
    >>> op = Signature("c10d::allreduce_", ("tensors", "process_group"), inputs, ())
    >>> tree = ModuleTree({"": ModuleInfo("", "", "Net")})
    >>> read_communication(Trace(tree, (), ((),), (op,), (), {(0, 0, "backward"): 2}, {})).total()
    Volume(calls=2, payload=48, wire=72)
    """
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
        wire = None if traffic.wire is None else traffic.wire * calls
        volume = Volume(calls, traffic.payload * calls, wire)
        transfers.append(
            Transfer(traffic.collective, packet, traffic.group, traffic.dtype, scopes[stack], phase, volume)
        )
    return Communication(tuple(transfers), unsupported)


def is_communication(packet: str) -> bool:
    """Return whether an op is one of torch's communication, with traffic.

    >>> is_communication("c10d::allreduce_"), is_communication("_c10d_functional::wait_tensor")
    (True, False)
    """
    return packet.partition("::")[0] in _NAMESPACES and packet not in _NO_TRAFFIC


def collective_of(signature: Signature) -> CollectiveCall | None:
    """Return the collective that an op call is, None for any other op, and for one without a rule."""
    if signature.packet not in _OPS:
        return None
    collective, argument = _OPS[signature.packet]
    payload: Value = signature.inputs[signature.names.index(argument)] if argument else signature.outputs
    tensors = list(tensors_in(payload))
    nbytes = sum(tensor.nbytes for tensor in tensors)
    group = next((group for group in map(ProcessGroupSpec.of, signature.inputs) if group is not None), None)
    wire = None if group is None else _WIRE[collective](nbytes, group.size)
    return CollectiveCall(collective, group, _dtypes(tensors), nbytes, wire)


def _dtypes(tensors: list[TensorSpec]) -> str:
    return ", ".join(sorted({tensor.dtype for tensor in tensors}))
