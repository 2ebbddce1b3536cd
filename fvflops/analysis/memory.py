"""The prediction of memory, of whatever can be recorded."""

from __future__ import annotations

from fvflops.analysis.model_analysis import ModelAnalysis
from fvflops.metrics.memory import MemoryTimeline, read_memory
from fvflops.trace import StopsAt, Trace


def predict_memory(
    source: Trace | ModelAnalysis,
    *,
    device: str | None = None,
    granularity: int | None = None,
    later_step: bool = False,
    workspaces: bool = True,
) -> MemoryTimeline:
    """Return the memory in bytes that a run uses, from event to event: the peak, the op that reaches it, and what for.

    `source` is an analysis of a forward run or of a training step, which by shapes needs neither memory nor weights; a
    recording of one step; or the Trace of one. A forward run is recorded again without stopping at composite ops, whose
    temporaries count.

    `device` is that whose memory is told, by default the one that holds most. Its allocator hands out multiples of
    `granularity` bytes, by default 512 on CUDA, where a block is at least that (torch.cuda.max_memory_allocated counts
    so; of blocks over 1 MiB it may leave up to 1 MiB unsplit, and cuBLAS keeps a workspace, which are not told here),
    and 1 elsewhere. A recorded step makes the optimizer's state; with `later_step` this is there from the start, and so
    is the last step's result until the program has another, as in each step after the first. Gradients are taken to
    have been let go of (`zero_grad()`). `workspaces` adds what kernels take for themselves, where a rule tells it; ops
    of which none does stand in `unseen`.

    A Trace that keeps no order of its events raises TraceError, a device that the run did not use ValueError.

    >>> import torch
    >>> from fvflops import TrainingStepAnalysis
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
    >>> step = TrainingStepAnalysis(model, torch.ones(4, 8), loss=torch.sum, optimizer=torch.optim.AdamW)
    >>> dict(predict_memory(step).at_peak().by_kind)["parameter"]
    288
    """
    trace = source if isinstance(source, Trace) else _record(source)
    return read_memory(
        trace, device=device, granularity=granularity, later_step=later_step, workspaces=workspaces
    )


def _record(analysis: ModelAnalysis) -> Trace:
    """Return the trace of an analysis, of one that can be recorded again with all that composite ops do."""
    return analysis.trace() if analysis._loaded else analysis._record(StopsAt())
