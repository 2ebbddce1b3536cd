"""Compute the profile of a model from a Trace recorded with times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace

from fvflops.analysis.model_counts import FlopCountAnalysis
from fvflops.counting.timing import Times, read_times
from fvflops.features.deepspeed.model import Costs, ModelProfile
from fvflops.formulas import FormulaTable, load_table, resolve_table
from fvflops.formulas.functions.classes import name_class
from fvflops.trace import PHASES, Entry, ModuleTree, TensorSpec, Trace, TraceError, tensors_in

# Table → the table for the phases other than forward: DeepSpeed assumes that the backward pass costs twice the forward
# pass, and has no formula for its ops.
_OTHER_PHASES = {"deepspeed": "exact"}


def read_profile(
    trace: Trace, *, table: str | FormulaTable = "deepspeed", ignored: Collection[type] = ()
) -> ModelProfile:
    """Return the profile of a Trace recorded with measure={"time"}; another raises TraceError.

    `table` counts all phases; "deepspeed", which has no formulas for other phases than forward, counts these by
    "exact". `ignored` are classes: the costs of a module of exactly one of these classes, without its submodules, are
    attributed to its caller. A Trace without a module call raises TraceError.

    >>> import torch
    >>> from fvflops import record
    >>> model = torch.nn.Linear(3, 2)
    >>> with record(model, measure={"time"}) as run:
    ...     y = model(torch.ones(4, 3))
    >>> read_profile(run.trace(), table="default").phases["forward"].macs
    24
    """
    formulas = resolve_table(table)
    times = read_times(trace)
    durations = {name: timing.total for name, timing in times.modules.get("forward", {}).items()}
    if not durations:
        raise TraceError("no module of the model was called while it was profiled: there is no forward pass to report")
    ignored_names = _name_ignored(trace.modules, ignored)
    macs: Counter[str] = Counter()
    flops: Counter[str] = Counter()
    for entry in _count(trace, formulas):
        owner = next((name for name in reversed(entry.scope) if name not in ignored_names), None)
        if entry.phase == "forward" and owner is not None:
            macs[owner] += entry.macs
            flops[owner] += entry.value
    profile = ModelProfile(
        _drop_pseudo_modules(trace.modules),
        macs,
        flops,
        {name: duration for name, duration in durations.items() if name not in ignored_names},
        batches=_read_batches(trace),
        about={"table": formulas.name},
    )
    forward = replace(profile.by_module()[""], parameters=0)
    other_formulas = load_table(_OTHER_PHASES[formulas.name]) if formulas.name in _OTHER_PHASES else formulas
    others = _read_phases(trace, times, other_formulas)
    about = {**profile.about, "backward_table": other_formulas.name} if others else profile.about
    return replace(profile, phases={"forward": forward, **others}, about=about)


def _name_ignored(modules: ModuleTree, ignored: Collection[type]) -> frozenset[str]:
    names = {name_class(cls) for cls in ignored}
    return frozenset(module.name for module in modules.modules() if module.classes and module.classes[0] in names)


def _count(trace: Trace, table: FormulaTable) -> tuple[Entry, ...]:
    return FlopCountAnalysis.from_trace(trace, table=table, warn=False).counts().entries


def _read_phases(trace: Trace, times: Times, table: FormulaTable) -> dict[str, Costs]:
    """Return the costs of each recorded phase but the forward pass."""
    recorded = {phase for *_, phase in trace.calls}
    phases = {
        phase: Costs(duration_ns=sum(timing.total for timing in times.operators.get(phase, {}).values()))
        for phase in PHASES
        if phase != "forward" and phase in recorded
    }
    if phases:
        for entry in _count(trace, table):
            if entry.phase in phases:
                phases[entry.phase] += Costs(macs=entry.macs, flops=entry.value)
    return phases


def _read_batches(trace: Trace) -> tuple[int, ...]:
    """Return the first size of the first input tensor of each call of the model, () if a call has none."""
    sizes = []
    for event in trace.events or ():
        if event.kind == "exit" and event.phase == "forward":
            signature = trace.region_signatures[event.item]
            if trace.regions[signature.region] == ("module", ""):
                shapes = [item.shape for item in tensors_in(signature.inputs) if isinstance(item, TensorSpec)]
                sizes.append(next((shape[0] for shape in shapes if shape), None))
    batches = [size for size in sizes if isinstance(size, int)]
    return tuple(batches) if len(batches) == len(sizes) else ()


def _drop_pseudo_modules(modules: ModuleTree) -> ModuleTree:
    pseudo_modules = modules.pseudo_modules()
    by_name = {name: module for name, module in modules.by_name.items() if name not in pseudo_modules}
    children = tuple(child for child in modules.root.children if child[1] not in pseudo_modules)
    return ModuleTree({**by_name, "": replace(modules.root, children=children)})
