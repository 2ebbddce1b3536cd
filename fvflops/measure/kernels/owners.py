"""Find the module and the phase of each profiler event."""

from __future__ import annotations

from collections.abc import Mapping

from fvflops.trace import Trace
from fvflops.trace.kernel_events import KernelRun
from fvflops.trace.module_tree import innermost


def find_owners(
    run: KernelRun, call_of_event: Mapping[int, int], trace: Trace | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the module and the phase of each event.

    A matched op, and the autograd node that runs it, have the module and phase of the Trace. Any other event in a
    module call belongs to that module, and an autograd node to the module of the last forward op with the node's
    sequence number; a node of gradient accumulation has no sequence number, and belongs to the module of the node
    before it.
    """
    located = _locate_ops(run, call_of_event, trace)
    nodes = _locate_nodes(run, located)
    modules: list[str] = []
    phases: list[str] = []
    forward_modules: dict[tuple[int, int], str] = {}
    last_modules: dict[int, str] = {}  # thread → the module of its last node
    for event_index, event in enumerate(run.events):
        parent = event.parent
        module, phase = (modules[parent], phases[parent]) if 0 <= parent < event_index else ("", "forward")
        if event.kind == "module":
            module, phase = event.module, "recompute" if phase in ("backward", "recompute") else phase
        elif event.kind == "optimizer":
            module, phase = "", "optimizer"
        elif event.kind == "node" and (parent < 0 or run.events[parent].kind != "node"):
            phase = "backward"
            forward_module = (
                forward_modules.get((event.forward_thread, event.sequence)) if event.sequence >= 0 else None
            )
            if forward_module is None:
                forward_module = last_modules.get(event.thread, "")
            module = nodes.get(event_index, forward_module)
            last_modules[event.thread] = module
        if event_index in located:
            module, phase = located[event_index]
        if event.kind == "op" and event.sequence >= 0:
            forward_modules[event.thread, event.sequence] = module
        modules.append(module)
        phases.append(phase)
    return tuple(modules), tuple(phases)


def _locate_ops(run: KernelRun, call_of_event: Mapping[int, int], trace: Trace | None) -> dict[int, tuple[str, str]]:
    """Return the module and the phase of the events matched with an op of the Trace."""
    if trace is None or trace.events is None:
        return {}
    scopes = trace.scopes()
    located = {}
    for event_index, index in call_of_event.items():
        if run.events[event_index].kind == "op":
            event = trace.events[index]
            located[event_index] = innermost(scopes[event.stack]), event.phase
    return located


def _locate_nodes(run: KernelRun, located: Mapping[int, tuple[str, str]]) -> dict[int, str]:
    """Return the modules of the autograd nodes in which matched ops of the backward pass ran."""
    nodes: dict[int, str] = {}
    for event_index, (module, phase) in located.items():
        parent = run.events[event_index].parent
        while phase == "backward" and parent >= 0:
            if run.events[parent].kind == "node":
                nodes.setdefault(parent, module)
            parent = run.events[parent].parent
    return nodes
