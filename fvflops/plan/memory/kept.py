"""What keeps the activations of a run: the ops of the backward pass that read them."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from fvflops.plan.memory.storage_lifetimes import MemoryTimeline
from fvflops.text import record_repr
from fvflops.trace.module_tree import innermost

_BACKWARD = ("backward", "recompute")


class KeptActivations(NamedTuple):
    """The bytes of activations that an op of the backward pass is the first to read, and the number of their storages.

    `module` owns the op; with `op` "" no op reads them, and it is their own: what the program holds, such as a result.
    """

    module: str
    op: str
    nbytes: int
    storages: int

    def __repr__(self) -> str:
        return record_repr(self)


def kept_activations(timeline: MemoryTimeline, event: int | None = None) -> list[KeptActivations]:
    """Return what keeps the activations that are allocated at an event, by default at the peak; the most bytes first.

    >>> import torch
    >>> from fvflops import TrainingStepAnalysis, predict_memory
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8))
    >>> memory = predict_memory(TrainingStepAnalysis(model, torch.ones(64, 8), loss=torch.sum))
    >>> for kept in kept_activations(memory)[:2]:
    ...     print(kept)
    KeptActivations(module='1', op='aten::gelu_backward', nbytes=2048, storages=1)
    KeptActivations(module='2', op='aten::mm', nbytes=2048, storages=1)
    """
    trace = timeline.trace
    scopes = trace.scopes()
    readers: dict[int, tuple[str, str]] = {}
    for row in trace.events or ():
        if row.kind == "op" and row.phase in _BACKWARD:
            for storage in row.reads:
                readers.setdefault(storage, (innermost(scopes[row.stack]), trace.signatures[row.item].op))
    at = timeline.at_peak().event if event is None else event
    nbytes: Counter[tuple[str, str]] = Counter()
    storages: Counter[tuple[str, str]] = Counter()
    for block in timeline.blocks:
        if block.kind == "activation" and block.begin <= at and (block.end is None or at < block.end):
            key = ("", "") if block.storage is None else readers.get(block.storage, (block.module, ""))
            nbytes[key] += block.nbytes
            storages[key] += 1
    return [KeptActivations(*key, total, storages[key]) for key, total in nbytes.most_common()]
