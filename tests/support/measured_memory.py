"""Measure the memory that a program takes of the CPU's allocator, as torch.profiler records it, beside predictions."""

import gc
import json
import tempfile
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.checkpoint import checkpoint

from fvflops import FlopCountAnalysis, TrainingStepAnalysis, predict_memory

_STEP = "a step that is measured"


def measure_steps(step, times=1):
    """Call a function some times, and return of each call the most bytes alive that were not there before the first.

    What an earlier measurement took should be gone: the profiler would tell when it goes.
    """
    collects = gc.isenabled()
    gc.collect()
    gc.disable()  # what cycles hold would go sooner or later, by chance
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
            for _ in range(times):
                with record_function(_STEP):
                    step()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            run.export_chrome_trace(str(path))
            events = json.loads(path.read_text())["traceEvents"]
    finally:
        if collects:
            gc.enable()
    begins = sorted(event["ts"] for event in events if event.get("name") == _STEP and event["cat"] == "user_annotation")
    changes = sorted(
        (event["ts"], event["args"]["Ev Idx"], event["args"]["Bytes"]) for event in filter(_is_memory, events)
    )
    assert len(begins) == times and changes
    peaks, alive, at = [0] * times, 0, 0
    for moment, _, nbytes in changes:
        if at + 1 < times and moment >= begins[at + 1]:
            at += 1
            peaks[at] = alive
        alive += nbytes
        peaks[at] = max(peaks[at], alive)
    return peaks


def compare_forward(model, args=(), kwargs=None):
    kwargs = kwargs or {}
    timeline = predict_memory(FlopCountAnalysis(model, args, kwargs=kwargs))
    with torch.no_grad():
        (measured,) = measure_steps(lambda: model(*args, **kwargs))
    return timeline.peak - timeline.baseline, measured


def compare_steps(model, args=(), kwargs=None, *, loss=None, optimizer, checkpointed=()):
    """Return (predicted, measured) bytes of a program's first training step and of its second, less what was there.

    Calls of modules of the classes `checkpointed` are recomputed.
    """
    kwargs = kwargs or {}
    analysis = TrainingStepAnalysis(
        model, args, kwargs=kwargs, loss=loss, optimizer=optimizer, checkpoint=list(checkpointed)
    )
    first, later = predict_memory(analysis, first_step=True), predict_memory(analysis)
    held = {}

    def compute_loss():  # as a trainer's: the result is freed when it returns
        result = model(*args, **kwargs)
        return result.loss if loss is None else loss(result)

    def step():
        if not held:
            held["optimizer"] = optimizer(model.parameters())
        held["optimizer"].zero_grad()
        compute_loss().backward()
        held["optimizer"].step()

    recomputed = [module for module in model.modules() if isinstance(module, tuple(checkpointed))]
    for module in recomputed:
        module.forward = partial(checkpoint, module.forward, use_reentrant=False)
    measured = measure_steps(step, 2)
    for module in recomputed:
        del module.forward
    held.clear()
    model.zero_grad()
    return [(first.peak - first.baseline, measured[0]), (later.peak - first.baseline, measured[1])]


class Autocast(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *args, **kwargs):
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(*args, **kwargs)


def _is_memory(event):
    return event.get("name") == "[memory]" and event["args"]["Device Type"] == 0
