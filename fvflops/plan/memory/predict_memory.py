"""Predict the memory of a model's run, from an analysis, a recording or a Trace."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fvflops.analysis.model_analysis import ModelAnalysis, cost_estimator, model_run, record_again
from fvflops.analysis.model_run import ModelRun
from fvflops.analysis.training_step_analysis import TrainingStepAnalysis
from fvflops.capture.errors.model_check import trace_of
from fvflops.capture.errors.model_errors import describe_error
from fvflops.capture.restore.containers import ContainerSnapshot
from fvflops.capture.restore.global_state import extreme_draws
from fvflops.capture.restore.interrupts import deferred, is_interrupt
from fvflops.capture.restore.torch_state import model_runs
from fvflops.capture.run import CostEstimate, choose_device, recording_lock, suspend_outer_recordings
from fvflops.capture.session import Session
from fvflops.capture.training_step import checkpointed_modules
from fvflops.garbage_collector import gc_paused
from fvflops.plan.memory.memory_report import MemoryPrediction, as_prediction
from fvflops.plan.memory.offload import offloaded
from fvflops.plan.memory.step_settings import (
    describe_checkpointed,
    describe_loss,
    given,
    settings_of_inputs,
    settings_of_model,
    settings_of_trace,
)
from fvflops.plan.memory.storage_lifetimes import MemoryTimeline, read_memory
from fvflops.plan.memory.workspaces import own_kernels
from fvflops.text import explaining_arguments
from fvflops.trace import StopsAt, Trace
from fvflops.units import format_bytes


@explaining_arguments
def predict_memory(
    source: Trace | ModelAnalysis,
    *,
    device: str | None = None,
    granularity: int | None = None,
    first_step: bool = False,
    workspaces: bool = True,
    offload: Collection[str] = (),
) -> MemoryPrediction:
    """Return the predicted memory of a run in bytes at each event, with its peak by op, module and kind.

    `source` is an analysis of a forward run or of a training step (shape execution needs neither memory nor weights), a
    recording of one step, or its Trace. A forward run is recorded again with composite ops decomposed, since their
    temporaries count; the fast path of nn.TransformerEncoder, which needs less, is not taken in a recording.

    `device` is the device to report, by default the one with the most bytes. Its allocator rounds to multiples of
    `granularity` bytes: by default 512 on CUDA, as torch.cuda.max_memory_allocated counts, and 1 elsewhere. Not
    included: up to 1 MiB that CUDA's allocator may leave unsplit of each block over 1 MiB, and cuBLAS' workspace.

    The optimizer's state exists before the step; with `first_step` the optimizer creates it. As in trainers, gradients
    are freed between steps (`zero_grad()`), and the model's result when its loss is computed: a loop that keeps it has
    it until the next forward pass ends, as a recording shows. `workspaces` adds kernels' workspaces, where a rule
    computes them; ops with an unknown workspace are in `unseen`. Convolutions on the CPU are assumed contiguous.

    `offload` names the parts on the host, of OFFLOADS in offload.py: the "optimizer", its "gradients", "activations".

    Of a model whose control flow follows random draws the largest of three runs is predicted: with the current draws,
    with all draws almost lowest, and with all almost highest. Its Trace's `about` has the three peaks.

    A Trace without ordered events raises TraceError, a device that the run did not use ValueError.

    >>> import torch
    >>> from fvflops import TrainingStepAnalysis
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
    >>> step = TrainingStepAnalysis(model, torch.ones(4, 8), loss=torch.sum, optimizer=torch.optim.AdamW)
    >>> dict(predict_memory(step).at_peak().by_kind)["parameter"]
    288
    """

    def read(trace: Trace) -> MemoryTimeline:
        options: Any = {"device": device, "granularity": granularity, "workspaces": workspaces}
        return offloaded(read_memory(trace, first_step=first_step, **options), offload)

    timeline = read(_record(source) if isinstance(source, ModelAnalysis) else trace_of(source))
    if isinstance(source, ModelAnalysis) and timeline.trace.info.random and model_run(source) is not None:
        timeline = _largest(source, timeline, read)
    settings = _settings_of(source, timeline.trace, first_step)
    return as_prediction(timeline, settings | ({"offload": list(offload)} if offload else {}))


def _settings_of(source: Trace | ModelAnalysis, trace: Trace, first_step: bool) -> dict[str, Any]:
    """Return the settings of a prediction; of a Trace alone only those that it has."""
    run = model_run(source) if isinstance(source, ModelAnalysis) else None
    if run is None or not isinstance(run.model, nn.Module):
        return {**given(inputs=trace.info.inputs or None), **settings_of_trace(trace, {})}
    inputs = settings_of_inputs(run.arguments())
    if not isinstance(source, TrainingStepAnalysis):
        return {"pass": "forward", **inputs, **settings_of_model(run.model), **settings_of_trace(trace, {})}
    options = source.options
    settings = {
        **inputs,
        "microbatches": options["micro_batches"],
        **settings_of_model(run.model, options["autocast"]),
        "checkpointing": describe_checkpointed(checkpointed_modules(run.model, source.checkpoint)),
        "loss": describe_loss(options["loss"]),
    }
    last, mode = "the first" if first_step else "any but the first", "train" if run.model.training else "eval"
    return {**settings, **settings_of_trace(trace, settings), "step": last, "mode": mode}


def predict_drawn_memory(analysis: ModelAnalysis, *, first_step: bool = False) -> MemoryTimeline:
    return read_memory(_record(analysis), first_step=first_step)


def _largest(analysis: ModelAnalysis, drawn: MemoryTimeline, read: Callable[[Trace], MemoryTimeline]) -> MemoryTimeline:
    """Return the memory of the run that needs most: with these draws, or with all draws lowest or highest."""
    runs, failed = {"as drawn": drawn}, []
    for name, high in (("with the lowest draws", False), ("with the highest draws", True)):
        with extreme_draws(high=high):
            try:
                runs[name] = read(_record(analysis))
            except Exception as error:  # such as for a loss that no layer contributes to
                if is_interrupt(error):
                    raise
                failed.append(f"{name} (fails: {describe_error(error)})")
    largest = max(runs.values(), key=lambda timeline: timeline.peak)
    listed = [f"{name} ({format_bytes(timeline.peak)})" for name, timeline in runs.items()]
    about = {**largest.trace.about, "peaks": ", ".join([*listed, *failed])}
    return replace(largest, trace=replace(largest.trace, about=about))


def _record(analysis: ModelAnalysis) -> Trace:
    """Return the trace of an analysis, recorded again with composite ops decomposed where it can be."""
    run = model_run(analysis)
    if run is None:
        return analysis.trace()
    parameters = run.model.parameters() if isinstance(run.model, nn.Module) else ()
    stops_at = own_kernels(choose_device(run.options["device"], [parameter.device for parameter in parameters]).type)
    if isinstance(analysis, TrainingStepAnalysis) or run.options["execution"] == "real":
        return record_again(analysis, stops_at)
    trace = _record_without_gradients(run, cost_estimator(analysis), stops_at)
    return record_again(analysis, stops_at) if trace is None else trace


def _record_without_gradients(run: ModelRun, estimate_cost: CostEstimate, stops_at: StopsAt) -> Trace | None:
    """Return the trace of a forward pass under no_grad in shape execution, or None where that fails.

    Forward passes are counted below autograd, where some composite ops choose other kernels than under no_grad: linear
    checks whether its weight requires a gradient (should_fold in LinearAlgebra.cpp).
    """
    model = run.model
    if not isinstance(model, nn.Module):
        return None
    args, kwargs = run.arguments()
    shapes: Any = {"device": run.options["device"], "assume": run.options["assume"], "estimate_cost": estimate_cost}
    session = Session(model, stops_at=stops_at, execution="shapes", **shapes)
    inputs, failed = ContainerSnapshot(), False
    with deferred():
        inputs.snapshot((args, kwargs), objects=True)
        try:
            with recording_lock(), suspend_outer_recordings(), gc_paused():
                try:
                    with session.recording():
                        shape_args, shape_kwargs = session.in_shapes((args, dict(kwargs)))
                        with torch.no_grad(), model_runs():
                            result = model(*shape_args, **shape_kwargs)
                finally:
                    inputs.restore()
                del result, shape_args, shape_kwargs
        except Exception as error:  # record_again raises it again, or falls back to real execution
            if is_interrupt(error):
                raise
            failed = True
    session.release(describe=False)  # after the except clause: the error's frames keep tensors alive
    if failed:
        return None
    trace = session.trace()
    return None if trace.info.assumed and run.options["execution"] == "auto" else trace
