"""Report of a profile: totals of the run, the most expensive classes at each depth, the module tree with costs."""

from __future__ import annotations

from collections.abc import Callable

from fvflops.compat.deepspeed.module_profile import Costs, ModelProfile
from fvflops.reports import escaping
from fvflops.reports.fvcore_tree import draw_tree
from fvflops.trace import ModuleInfo
from fvflops.units import (
    duration_to_string,
    flops_to_string,
    format_thousands,
    macs_to_string,
    number_to_string,
    params_to_string,
    share_to_string,
)

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

    `profile_step` is the number of the step for the header; the other arguments are those of `render_top`.
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
    """Return as text the `top_modules` classes with the most parameters, MACs, FLOPs and time at each depth.

    `module_depth` is the last depth shown, 0 being the model; -1 shows all.

    >>> from fvflops.trace import ModuleTree
    >>> tree = ModuleTree({"": ModuleInfo("", "", "Net")})
    >>> print(render_top(ModelProfile(tree, macs={"": 6}, flops={"": 12}, durations={"": 5000})))
    The most expensive class of modules at each depth, as the sum over its modules:
    depth 0:
        params      - Net: 0
        MACs        - Net: 6 MACs
        flops       - Net: 12
        fwd latency - Net: 5 us
    """
    title = (
        "The most expensive class"
        if top_modules == 1
        else f"The {format_thousands(top_modules)} most expensive classes"
    )
    lines = [f"{title} of modules at each depth, as the sum over {'its' if top_modules == 1 else 'their'} modules:"]
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
    table, other = profile.about.get("table", "?"), profile.about.get("backward_table")
    tables = escaping.printable(table)
    if other not in (None, table):
        tables += f", other phases by the table {escaping.printable(other)}"
    title = (
        f"{escaping.printable_short(profile.modules.root.class_name)} at step {step}, counted by the table {tables}."
    )
    rows = _model_rows(profile)
    for phase, short in _PHASES.items():
        if phase in profile.phases:
            rows += _phase_rows(short, profile.phases[phase])
    rows += _iteration_rows(profile)
    return "\n".join(
        [
            title,
            "fwd, bwd and step are the forward pass, the backward pass and the optimizer's step, iter is all of these.",
            "A MAC is a multiply-add, flops are floating-point operations, FLOPS are flops per second.",
            "",
            *(f"{label + ':':<50}{value}" for label, value in rows),
        ]
    )


def _model_rows(profile: ModelProfile) -> list[tuple[str, str]]:
    sizes = set(profile.batches)
    batch = ", ".join(map(format_thousands, sorted(sizes))) or "unknown"
    calls = f" in each of {format_thousands(len(profile.batches))} calls" if len(profile.batches) > 1 else ""
    return [
        ("batch size", batch + (calls if len(sizes) == 1 else "")),
        ("params", params_to_string(profile.by_module()[""].parameters)),
    ]


def _phase_rows(short: str, costs: Costs) -> list[tuple[str, str]]:
    return [
        (f"{short} MACs", macs_to_string(costs.macs)),
        (f"{short} flops", number_to_string(costs.flops)),
        (f"{short} latency", duration_to_string(costs.duration_ns / 1e9)),
        (f"{short} FLOPS = {short} flops / {short} latency", flops_to_string(costs.flops_per_second)),
    ]


def _iteration_rows(profile: ModelProfile) -> list[tuple[str, str]]:
    phases = {short: profile.phases[phase] for phase, short in _PHASES.items() if phase in profile.phases}
    rows = []
    if "bwd" not in phases:
        rows.append(("bwd", "not recorded"))
    elif "fwd" in phases:
        both = sum((phases[short] for short in ("fwd", "recompute", "bwd") if short in phases), Costs())
        rows.append(("fwd+bwd FLOPS", flops_to_string(both.flops_per_second)))
    if "step" not in phases:
        rows.append(("step", "not recorded"))
    total = sum(phases.values(), Costs())
    rows.append(("iter latency", duration_to_string(total.duration_ns / 1e9)))
    rows.append(("FLOPS = all flops / iter latency", flops_to_string(total.flops_per_second)))
    if profile.batches and total.duration_ns:
        rows.append(("samples/second", number_to_string(sum(profile.batches) * 1e9 / total.duration_ns).strip()))
    return rows


def _write_modules(profile: ModelProfile) -> str:
    costs = profile.by_module()
    total = costs[""]

    def describe(module: ModuleInfo) -> list[str]:
        items = [*_format_costs(costs[module.name], total), *module.extra_repr.split("\n")]
        return [", ".join(item for item in items if item)]

    return "\n".join(
        [
            "At each module: params and their share of the model's, MACs and share, fwd latency and share, fwd FLOPS.",
            "The work of a module outside its submodules, in functions, counts for the module only.",
            "",
            *draw_tree(profile.modules, describe),
        ]
    )


def _format_costs(costs: Costs, total: Costs) -> list[str]:
    seconds = costs.duration_ns / 1e9
    return [
        f"{params_to_string(costs.parameters)} = {share_to_string(costs.parameters, total.parameters)} Params",
        f"{macs_to_string(costs.macs)} = {share_to_string(costs.macs, total.macs)} MACs",
        f"{duration_to_string(seconds)} = {share_to_string(costs.duration_ns, total.duration_ns)} latency",
        flops_to_string(costs.flops_per_second),
    ]


def _title(text: str) -> str:
    return f" {text} ".center(_WIDTH, "-")
