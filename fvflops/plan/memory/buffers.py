"""Find the communication buffers of a run, and the modules whose parameters or gradients they hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fvflops.trace import Trace
from fvflops.trace.module_tree import modules_above

# Namespaces of collectives.
_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor"})
# Ops by which FSDP2 copies shards to the buffer of an all-gather, and from there to the gathered parameters.
_COPY_IN, _COPY_OUT = "fsdp::all_gather_copy_in", "fsdp::split_with_sizes_copy"
# The op by which FSDP2 copies gradients to the buffer of a reduce-scatter, and the reduce-scatter.
_COPY_GRADIENTS, _REDUCE = "fsdp::chunk_cat", "c10d::_reduce_scatter_base_"


@dataclass(frozen=True, slots=True)
class Buffers:
    """Storages that a run communicates: `sent` ones, which collectives read or write, and `gathered` ones of FSDP2.

    `sources` is a buffer of FSDP2 → the storages that are copied or reduced to it. `streams` is storage → the CUDA
    stream that allocates it, other than the default: FSDP2 gathers parameters to, and reduces gradients to, memory of
    streams of their own, and copies in the default one (_fsdp_collectives.py: foreach_all_gather and foreach_reduce).
    """

    sent: set[int] = field(default_factory=set)
    gathered: set[int] = field(default_factory=set)
    sources: dict[int, Sequence[int]] = field(default_factory=dict)
    streams: dict[int, str] = field(default_factory=dict)

    def module_of(self, storage: int, modules: Mapping[int, str], *, otherwise: str) -> str:
        """Return the innermost module that contains the modules of all sources of a buffer of FSDP2."""
        names = [modules[source] for source in self.sources.get(storage, ()) if source in modules]
        paths = [(*modules_above(name), name) for name in names]
        common = [level[0] for level in zip(*paths, strict=False) if len(set(level)) == 1]
        return common[-1] if common else otherwise


def find_buffers(trace: Trace) -> Buffers:
    """Return the communication buffers of a trace with ordered events."""
    buffers = Buffers()
    ops = [signature.op for signature in trace.signatures]
    collectives = [op.partition("::")[0] in _COLLECTIVES for op in ops]
    for event in trace.events or ():
        if event.kind != "op":
            continue
        op = ops[event.item]
        if collectives[event.item]:
            buffers.sent.update(event.reads, event.writes)
        if op == _COPY_IN:
            *shards, target = event.reads
            buffers.gathered.update(event.reads)
            buffers.sources[target], buffers.streams[target] = shards, "all-gather"
        elif op == _COPY_OUT:
            source, *targets = event.reads
            buffers.gathered.update(event.reads)
            buffers.sources.update(dict.fromkeys(targets, (source,)))
        elif op == _COPY_GRADIENTS:
            *gradients, target = event.reads
            buffers.sources[target] = gradients
        elif op == _REDUCE:
            target, source = event.reads
            buffers.sources[target], buffers.streams[target] = (source,), "reduce-scatter"
    return buffers
