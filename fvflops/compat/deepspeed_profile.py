"""Profile of a model from a Trace recorded with times: parameters, MACs, FLOPs and time of each module and phase."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from fvflops.analysis.model_counts import FlopCountAnalysis
from fvflops.counting.nested_timeline import Times, read_times
from fvflops.formulas import FormulaTable, load_table, resolve_table
from fvflops.formulas.functions.classes import name_class
from fvflops.reports import escaping
from fvflops.reports.fvcore_format import draw_tree
from fvflops.text import short_repr
from fvflops.trace import PHASES, Entry, ModuleInfo, ModuleTree, Trace, TraceError, tensors_in
from fvflops.trace.module_tree import modules_above
from fvflops.units import (
    duration_to_string,
    flops_to_string,
    format_short,
    format_thousands,
    macs_to_string,
    number_to_string,
    params_to_string,
    share_to_string,
)


class Costs(NamedTuple):
    """The costs of a module or a phase: parameters, MACs, FLOPs in a convention, and time in ns."""

    parameters: int = 0
    macs: int = 0
    flops: int = 0
    duration_ns: int = 0

    @property
    def flops_per_second(self) -> float:
        """FLOPs per second; 0 if no time was measured."""
        return self.flops * 1e9 / self.duration_ns if self.duration_ns else 0.0

    def __add__(self, other: Costs) -> Costs:  # type: ignore[override]
        return Costs(*map(sum, zip(self, other, strict=True)))


@dataclass(frozen=True, slots=True, repr=False)
class ModelProfile:
    """The profile of one model.

    `by_module` maps a module's name to the costs of its forward pass, submodules included, and `phases` each recorded
    phase ("forward", "recompute", "backward", "optimizer") to its costs; "forward" excludes the loss. `batches` has the
    batch size of each call: the first size of its first input tensor. `other_table` counts all phases but "forward".
    """

    modules: ModuleTree
    by_module: Mapping[str, Costs]
    phases: Mapping[str, Costs] = field(default_factory=dict)
    batches: tuple[int, ...] = ()
    table: str = "?"
    other_table: str = ""

    def __repr__(self) -> str:
        total = self.by_module[""]
        macs, flops = f"{format_short(total.macs)} MACs", f"{format_short(total.flops)} FLOPs"
        return short_repr(self, self.modules.root.class_name, macs, flops)

    def by_class(self) -> list[dict[str, Costs]]:
        """Return class → the sum over its modules, for each depth; depth 0 is the model."""
        levels: list[dict[str, Costs]] = []
        level = [self.modules.root]
        while level:
            sums: dict[str, Costs] = {}
            for module in level:
                sums[module.class_name] = sums.get(module.class_name, Costs()) + self.by_module[module.name]
            levels.append(sums)
            level = [child for module in level for child in children_of(module, self.modules)]
        return levels


def children_of(module: ModuleInfo, modules: ModuleTree) -> list[ModuleInfo]:
    """Return the direct submodules of a module, each once."""
    children: dict[str, ModuleInfo] = {}
    for _, path in module.children:
        child = modules.by_name.get(path) if path is not None else None
        if child is not None:
            children.setdefault(child.canonical, child)
    return list(children.values())


def read_profile(
    trace: Trace, *, table: str | FormulaTable = "deepspeed", ignored: Collection[type] = ()
) -> ModelProfile:
    """Return the profile of a Trace recorded with measure={"time"}; any other Trace raises TraceError.

    `table` counts all phases; "deepspeed" has formulas for the forward pass only, so that other phases are counted by
    "exact". `ignored` are classes: the costs of a module of exactly one of these classes, without its submodules, are
    attributed to its caller. A Trace without a module call raises TraceError.
    """
    formulas = resolve_table(table)
    times = read_times(trace)
    durations = {name: timing.total for name, timing in times.modules.get("forward", {}).items()}
    if not durations:
        raise TraceError("no module of the model was called while it was profiled: there is no forward pass to report")
    classes = {name_class(cls) for cls in ignored}
    ignored_names = {item.name for item in trace.modules.modules() if item.classes and item.classes[0] in classes}
    # Module → its costs without submodules, except the time, which includes them.
    own = {name: Costs(duration_ns=time) for name, time in durations.items() if name not in ignored_names}
    for entry in _count(trace, formulas):
        owner = next((name for name in reversed(entry.scope) if name not in ignored_names), None)
        if entry.phase == "forward" and owner is not None:
            own[owner] = own.get(owner, Costs()) + Costs(macs=entry.macs, flops=entry.value)
    modules = _drop_pseudo_modules(trace.modules)
    by_module = _add_submodules(modules, own)
    other_formulas = load_table("exact") if formulas.name == "deepspeed" else formulas
    others = _read_phases(trace, times, other_formulas)
    return ModelProfile(
        modules,
        by_module,
        {"forward": by_module[""]._replace(parameters=0), **others},
        batches=_read_batches(trace),
        table=formulas.name,
        other_table=other_formulas.name if others else "",
    )


def _add_submodules(modules: ModuleTree, own: Mapping[str, Costs]) -> dict[str, Costs]:
    """Return module name → its costs, submodules included, from the costs of canonical names.

    A module with several names has its costs under each. A shared submodule or a tied parameter counts once in a module
    that contains it several times. The time of a module that was never called is the sum over its submodules.
    """
    submodules: dict[str, set[str]] = {name: set() for name in modules.by_name}
    elements: dict[str, dict[int, int]] = {name: {} for name in modules.by_name}
    for module in modules.by_name.values():
        for name in (*modules_above(module.name), module.name):
            submodules[name].add(module.canonical)
            elements[name].update({item.identity: item.spec.numel for item in module.parameters})
    by_module: dict[str, Costs] = {}
    for name in reversed(tuple(modules.by_name)):  # children before their parents
        module = modules.by_name[name]
        inside = sum((own[submodule] for submodule in submodules[name] if submodule in own), Costs())
        duration = own.get(module.canonical, Costs()).duration_ns
        duration = duration or sum(by_module[child.name].duration_ns for child in children_of(module, modules))
        by_module[name] = inside._replace(parameters=sum(elements[name].values()), duration_ns=duration)
    return dict(reversed(by_module.items()))


def _count(trace: Trace, table: FormulaTable) -> tuple[Entry, ...]:
    return FlopCountAnalysis.from_trace(trace, table=table, warn=False).counts().entries


def _read_phases(trace: Trace, times: Times, table: FormulaTable) -> dict[str, Costs]:
    """Return the costs of each recorded phase except the forward pass."""
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
    """Return the batch size of each call of the model: its first input tensor's first size; () if a call has none."""
    exits = [event.item for event in trace.events or () if event.kind == "exit" and event.phase == "forward"]
    signatures = [trace.region_signatures[item] for item in exits]
    inputs = [item.inputs for item in signatures if trace.regions[item.region] == ("module", "")]
    sizes = [next((spec.shape[0] for spec in tensors_in(item) if spec.shape), None) for item in inputs]
    batches = [size for size in sizes if isinstance(size, int)]
    return tuple(batches) if len(batches) == len(sizes) else ()


def _drop_pseudo_modules(modules: ModuleTree) -> ModuleTree:
    pseudo_modules = modules.pseudo_modules()
    by_name = {name: module for name, module in modules.by_name.items() if name not in pseudo_modules}
    children = tuple(child for child in modules.root.children if child[1] not in pseudo_modules)
    return ModuleTree({**by_name, "": replace(modules.root, children=children)})


_WIDTH = 78
# Phase → the prefix of its lines.
_PHASES = {"forward": "fwd", "recompute": "recompute", "backward": "bwd", "optimizer": "step", "other": "other"}
# Column → the cost by which it ranks classes, and the function that formats it.
_RANKINGS: dict[str, tuple[Callable[[Costs], int], Callable[[int], str]]] = {
    "params": (lambda costs: costs.parameters, params_to_string),
    "MACs": (lambda costs: costs.macs, macs_to_string),
    "flops": (lambda costs: costs.flops, number_to_string),
    "fwd latency": (lambda costs: costs.duration_ns, lambda ns: duration_to_string(ns / 1e9)),
}


def render(
    profile: ModelProfile, *, profile_step: int = 1, module_depth: int = -1, top_modules: int = 1, detailed: bool = True
) -> str:
    """Return the profile as text: the header, the top modules, and with `detailed` the module tree with costs.

    `profile_step` is the number of the step in the header; the other arguments are as for `render_top`.
    """
    parts = [
        _title("fvflops profile"),
        _write_header(profile, profile_step),
        _title("Top modules"),
        render_top(profile, module_depth=module_depth, top_modules=top_modules),
    ]
    if detailed:
        parts += [_title("Modules"), _write_modules(profile)]
    return "\n".join([*parts, "-" * _WIDTH])


def render_top(profile: ModelProfile, *, module_depth: int = -1, top_modules: int = 1) -> str:
    """Return a text with the `top_modules` classes of most parameters, MACs, FLOPs and time at each depth.

    `module_depth` is the last depth shown, 0 being the model; -1 shows all.
    """
    title, whose = "The most expensive class", "its"
    if top_modules != 1:
        title, whose = f"The {format_thousands(top_modules)} most expensive classes", "their"
    lines = [f"{title} of modules at each depth, as the sum over {whose} modules:"]
    for depth, classes in enumerate(profile.by_class()):
        if depth > module_depth >= 0:
            break
        lines.append(f"depth {depth}:")
        for column, (measure, write) in _RANKINGS.items():
            ranked = sorted(classes.items(), key=lambda item: measure(item[1]), reverse=True)[:top_modules]
            cells = [f"{escaping.printable_short(name)}: {write(measure(costs)).strip()}" for name, costs in ranked]
            lines.append(f"    {column:<11} - {', '.join(cells)}")
    return "\n".join(lines)


def _write_header(profile: ModelProfile, step: int) -> str:
    tables = escaping.printable(profile.table)
    if profile.other_table not in ("", profile.table):
        tables += f", other phases by the table {escaping.printable(profile.other_table)}"
    name = escaping.printable_short(profile.modules.root.class_name)
    return "\n".join(
        [
            f"{name} at step {step}, counted by the table {tables}.",
            "fwd, bwd and step are the forward pass, the backward pass and the optimizer's step, iter is all of these.",
            "A MAC is a multiply-add, flops are floating-point operations, FLOPS are flops per second.",
            "",
            *(f"{label + ':':<50}{value}" for label, value in _list_sums(profile)),
        ]
    )


def _list_sums(profile: ModelProfile) -> Iterator[tuple[str, str]]:
    """Yield the label and the text of each line of the header: model, phases, and the sums over phases."""
    sizes, calls = set(profile.batches), len(profile.batches)
    batch = ", ".join(map(format_thousands, sorted(sizes))) or "unknown"
    each = f" in each of {format_thousands(calls)} calls" if calls > 1 and len(sizes) == 1 else ""
    yield "batch size", batch + each
    yield "params", params_to_string(profile.by_module[""].parameters)
    phases = {short: profile.phases[phase] for phase, short in _PHASES.items() if phase in profile.phases}
    for short, costs in phases.items():
        yield f"{short} MACs", macs_to_string(costs.macs)
        yield f"{short} flops", number_to_string(costs.flops)
        yield f"{short} latency", duration_to_string(costs.duration_ns / 1e9)
        yield f"{short} FLOPS = {short} flops / {short} latency", flops_to_string(costs.flops_per_second)
    if "bwd" not in phases:
        yield "bwd", "not recorded"
    elif "fwd" in phases:
        both = sum((phases[short] for short in ("fwd", "recompute", "bwd") if short in phases), Costs())
        yield "fwd+bwd FLOPS", flops_to_string(both.flops_per_second)
    if "step" not in phases:
        yield "step", "not recorded"
    total = sum(phases.values(), Costs())
    yield "iter latency", duration_to_string(total.duration_ns / 1e9)
    yield "FLOPS = all flops / iter latency", flops_to_string(total.flops_per_second)
    if profile.batches and total.duration_ns:
        yield "samples/second", number_to_string(sum(profile.batches) * 1e9 / total.duration_ns).strip()


def _write_modules(profile: ModelProfile) -> str:
    total = profile.by_module[""]

    def describe(module: ModuleInfo) -> list[str]:
        costs = profile.by_module[module.name]
        latency = f"{duration_to_string(costs.duration_ns / 1e9)} = "
        items = [
            f"{params_to_string(costs.parameters)} = {share_to_string(costs.parameters, total.parameters)} Params",
            f"{macs_to_string(costs.macs)} = {share_to_string(costs.macs, total.macs)} MACs",
            latency + f"{share_to_string(costs.duration_ns, total.duration_ns)} latency",
            flops_to_string(costs.flops_per_second),
            *module.extra_repr.split("\n"),
        ]
        return [", ".join(item for item in items if item)]

    return "\n".join(
        [
            "At each module: params and their share of the model's, MACs and share, fwd latency and share, fwd FLOPS.",
            "The work of a module outside its submodules, in functions, counts for the module only.",
            "",
            *draw_tree(profile.modules, describe),
        ]
    )


def _title(text: str) -> str:
    return f" {text} ".center(_WIDTH, "-")
