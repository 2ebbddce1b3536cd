"""Ways to count a model in a case, each with all of its results."""

import itertools
import json
from collections.abc import Callable
from typing import Any

import torch

from fvflops import FlopCountAnalysis, Trace, TrainingStepAnalysis, load_table, record_call, summarise
from fvflops.reports.terminal.op_coverage import op_coverage_notes


def count(model, *inputs, **options):
    """Return all that the default and the exact convention say of a forward pass."""
    return {table: describe(FlopCountAnalysis(model, inputs, table=table, **options)) for table in ("default", "exact")}


def count_function(function: Callable[..., Any], *shapes: tuple[int, ...], **options: Any) -> dict[str, Any]:
    return count(function, *(torch.rand(shape) for shape in shapes), **options)


def train(model, *inputs, optimizer=None, **options):
    return describe(TrainingStepAnalysis(model, inputs, loss=sum_all, optimizer=optimizer, **options))


def differentiate(function: Callable[..., Any], *shapes: tuple[int, ...], **options: Any) -> dict[str, Any]:
    """Record a function of tensors and the backward pass of its sum."""
    inputs = tuple(torch.rand(shape, requires_grad=True) for shape in shapes)
    trace = record_call(function, inputs, loss=sum_all, stops_at=load_table("default").stops_at, **options)
    return describe_trace(trace)


def sum_all(results):
    leaves = torch.utils._pytree.tree_leaves(results)
    total = torch.zeros(())
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            total = total + leaf.sum()
    return total


def describe(analysis):
    return {
        "total": analysis.total(),
        "operators": dict(analysis.by_operator()),
        "modules": dict(analysis.by_module()),
        "unsupported": dict(analysis.unsupported_ops()),
        "uncalled": sorted(analysis.uncalled_modules()),
        "notes": op_coverage_notes(summarise(analysis)),
        **describe_trace(analysis.trace()),
    }


def describe_trace(trace: Trace) -> dict[str, Any]:
    """Return a Trace as data, without the list of composite ops, which is the table's.

    Storages that are freed together, such as autocast's cache, are in the order of their addresses: sort them.
    """
    data = {**json.loads(trace.to_json()), "stops_at": None, "checksum": None}
    kinds, items = data["events"]["kind"], data["events"]["item"]
    start = 0
    for kind, group in itertools.groupby(kinds):
        stop = start + len(list(group))
        if kind == "free":
            items[start:stop] = sorted(items[start:stop])
        start = stop
    return {"trace": data}


def without_trace(told):
    """Return an answer without Traces: threads run at the same time, in any order."""
    if isinstance(told, dict):
        return {key: without_trace(value) for key, value in told.items() if key != "trace"}
    return told
