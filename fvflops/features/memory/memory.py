"""The prediction of memory, of whatever can be recorded."""

from __future__ import annotations

import sys

import torch
from torch import nn

from fvflops.analysis.model_analysis import ModelAnalysis, model_run, record_again, weigh_by
from fvflops.analysis.model_run import ModelRun
from fvflops.analysis.training_step import TrainingStepAnalysis
from fvflops.capture.restore.containers import ContainerSnapshot
from fvflops.capture.restore.interrupts import deferred, is_interrupt
from fvflops.capture.restore.torch_state import model_runs
from fvflops.capture.run import CostEstimate, recording_lock, suspend_outer_recordings
from fvflops.capture.session import Session
from fvflops.features.memory.compute import MemoryTimeline, read_memory
from fvflops.features.memory.workspaces import OWN_KERNELS
from fvflops.garbage_collector import gc_paused
from fvflops.trace import StopsAt, Trace

_STOPS = StopsAt(OWN_KERNELS)


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
    temporaries count; the fast path of nn.TransformerEncoder, which needs less, is not taken in a recording.

    `device` is that whose memory is told, by default the one that holds most. Its allocator hands out multiples of
    `granularity` bytes, by default 512 on CUDA, where a block is at least that (torch.cuda.max_memory_allocated counts
    so; of blocks over 1 MiB it may leave up to 1 MiB unsplit, and cuBLAS keeps a workspace, which are not told here),
    and 1 elsewhere.

    A recorded step makes the optimizer's state; with `later_step` this is there from the start, and so is the last
    step's result until the program has another, as in each step after the first. Gradients are taken to have been let
    go of (`zero_grad()`). `workspaces` adds what kernels take for themselves, where a rule tells it; ops of which none
    does stand in `unseen`. The rule for convolutions on the CPU is of contiguous tensors: not for channels_last.

    A Trace that keeps no order of its events raises TraceError, a device that the run did not use ValueError.

    >>> import torch
    >>> from fvflops import TrainingStepAnalysis
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
    >>> step = TrainingStepAnalysis(model, torch.ones(4, 8), loss=torch.sum, optimizer=torch.optim.AdamW)
    >>> dict(predict_memory(step).at_peak().by_kind)["parameter"]
    288
    """
    trace = source if isinstance(source, Trace) else _record(source)
    return read_memory(trace, device=device, granularity=granularity, later_step=later_step, workspaces=workspaces)


def _record(analysis: ModelAnalysis) -> Trace:
    """Return the trace of an analysis, of one that can be recorded again with all that composite ops do."""
    run = model_run(analysis)
    if run is None:
        return analysis.trace()
    known = len(sys.modules)
    trace = _record_again(analysis, run)
    # A rule that made torch import more of itself left cycles, in whose frames the tensors of that moment live on.
    return trace if len(sys.modules) == known else _record_again(analysis, run)


def _record_again(analysis: ModelAnalysis, run: ModelRun) -> Trace:
    if isinstance(analysis, TrainingStepAnalysis) or run.execution == "real":
        return record_again(analysis, _STOPS)
    trace = _record_without_gradients(run, weigh_by(analysis))
    return record_again(analysis, _STOPS) if trace is None else trace


def _record_without_gradients(run: ModelRun, estimate_cost: CostEstimate) -> Trace | None:
    """Return the trace of a forward pass under no_grad by shapes, or None where that cannot be had.

    Below autograd, where forward passes are counted, some composite ops choose other kernels than here: linear looks
    at whether its weight wants a gradient (should_fold in LinearAlgebra.cpp).
    """
    model = run.model
    if not isinstance(model, nn.Module):
        return None
    args, kwargs = run.arguments()
    session = Session(
        model, stops_at=_STOPS, execution="shapes", device=run.device, assume=run.assume, estimate_cost=estimate_cost
    )
    held, complete = ContainerSnapshot(), False
    with deferred():
        held.snapshot((args, kwargs), objects=True)
        try:
            with recording_lock(), suspend_outer_recordings(), gc_paused():
                session.start()
                try:
                    shapes = session.in_shapes((args, dict(kwargs)))
                    with torch.no_grad(), model_runs():
                        result = model(*shapes[0], **shapes[1])
                    complete = True
                finally:
                    try:
                        session.stop(complete=complete)
                    finally:
                        held.restore()
                del result, shapes
                session.release()
        except Exception as error:  # the other way of recording says what is wrong, or runs the model for real
            if is_interrupt(error):
                raise
            return None
    trace = session.trace()
    return None if trace.info.assumed and run.execution == "auto" else trace
