"""Graphs of a model: DOT for Graphviz, and files for Google's Model Explorer."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

from fvflops.reports.call_tables import list_shapes
from fvflops.reports.escaping import printable
from fvflops.trace import ModuleTree
from fvflops.trace.calls import OpCall, OpGraph
from fvflops.trace.module_tree import modules_above
from fvflops.units import format_percent, format_short

_MAX_LENGTH = 60  # characters of a name
_HEAD = """\
  rankdir=TB
  node [shape=box style="rounded,filled" fillcolor=white fontname="Helvetica" fontsize=10]
  edge [fontname="Helvetica" fontsize=8 color="#666666"]
  graph [fontname="Helvetica" fontsize=10 color="#999999" style=rounded labeljust=l]
"""


class _Node(NamedTuple):
    """Consecutive op calls of one module, or an op call of a module with submodules; `ancestors` from the outermost."""

    number: int
    name: str
    class_name: str
    ancestors: tuple[str, ...]
    calls: Sequence[OpCall]

    @property
    def flops(self) -> int:
        return sum(call.flops or 0 for call in self.calls)


@dataclass(slots=True)
class _Cluster:
    """A module drawn as a box: its FLOPs, its nodes, and the boxes inside it."""

    flops: int = 0
    nodes: list[_Node] = field(default_factory=list)
    inner: dict[str, _Cluster] = field(default_factory=dict)


def write_dot(graph: OpGraph, *, depth: int | None = None) -> str:
    """Return the forward pass as DOT text, which `dot -Tsvg` draws.

    A node is a call of a module without submodules, or of one `depth` levels below the root, or an op that a module
    with submodules calls itself. Its label has the class, the shape of the result, the FLOPs and their share; the
    saturation of its colour grows with the FLOPs, relative to the largest node. Enclosing modules are boxes. An edge is
    a tensor, labelled with its shape, from the node that computed it to one that reads it; views are not drawn.
    """
    calls, modules = graph
    nodes = list(_make_nodes(calls, modules, depth))
    root = _Cluster()
    for node in nodes:
        cluster = root
        for name in node.ancestors:
            cluster = cluster.inner.setdefault(name, _Cluster())
            cluster.flops += node.flops
        cluster.nodes.append(node)
    header = f"digraph {_quote(_shorten(modules.root.class_name or 'model'))} {{\n{_HEAD}"
    total, largest = sum(node.flops for node in nodes), max((node.flops for node in nodes), default=0)
    return "\n".join([header.rstrip(), *_write(root, modules, total, largest), *_list_edges(nodes), "}"])


def list_calls_with_work(calls: Sequence[OpCall]) -> list[OpCall]:
    """Return the op calls of the forward pass that compute something or move bytes, which excludes views."""
    return [call for call in calls if call.phase == "forward" and (call.nbytes != 0 or call.flops)]


def _make_nodes(calls: Sequence[OpCall], modules: ModuleTree, depth: int | None) -> Iterator[_Node]:
    groups = groupby(list_calls_with_work(calls), lambda call: _node_key(call, modules, depth))
    for number, ((name, call_number), group) in enumerate(groups):
        node_calls = list(group)
        ancestors = tuple(above for above in modules_above(name)[1:] if above in modules.by_name)
        if call_number is None:
            yield _Node(number, name, modules.by_name[name].class_name, ancestors, node_calls)
        else:
            op = node_calls[0].op.removeprefix("aten::")
            yield _Node(number, op, "", (*ancestors, name) if name else (), node_calls)


def _node_key(call: OpCall, modules: ModuleTree, depth: int | None) -> tuple[str, int | None]:
    """Return the module whose node or box contains a call, and the call's number if it is a node by itself."""
    parts = call.module.split(".") if call.module else []
    if depth is not None and len(parts) >= depth:
        return ".".join(parts[:depth]), None
    return call.module, call.number if modules.by_name[call.module].children else None


def _write(root: _Cluster, modules: ModuleTree, total: int, largest: int) -> Iterator[str]:
    # Modules may be nested deeper than Python's recursion limit.
    pending: list[str | _Cluster] = [root]
    boxes = 0
    while pending:
        cluster = pending.pop()
        if isinstance(cluster, str):
            yield cluster
            continue
        for node in cluster.nodes:
            # The saturation of orange shows the FLOPs relative to the largest node.
            colour = f"0.08 {0.8 * node.flops / largest if largest else 0:.2f} 1.00"
            # In DOT \n is a line break, and \\ a backslash.
            label = "\\n".join(map(_escape, _describe(node, total)))
            yield f'  n{node.number} [label="{label}" fillcolor="{colour}"]'
        for name, inner in reversed(cluster.inner.items()):
            title = f"{_shorten(name)} ({_shorten(modules.by_name[name].class_name)})"
            label = f"{_escape(title)}\\n{_format_flops(inner.flops, total)}"
            boxes += 1  # Graphviz draws a subgraph as a box if its name begins with "cluster"
            pending += ["  }", inner, f'  subgraph cluster_{boxes} {{ label="{label}"']


def _describe(node: _Node, total: int) -> Iterator[str]:
    yield from map(_shorten, filter(None, (node.name, node.class_name)))
    if outputs := node.calls[-1].outputs:
        yield list_shapes(outputs[0])
    unsupported = dict.fromkeys(_shorten(call.op) for call in node.calls if call.flops is None)
    if unsupported:
        yield f"unsupported: {', '.join(unsupported)}"
    if node.flops or not unsupported:
        ignored = not node.flops and any(call.status == "ignored" for call in node.calls)
        yield "ignored by this convention" if ignored else _format_flops(node.flops, total)


def _format_flops(flops: int, total: int) -> str:
    return f"{format_short(flops)} FLOPs" + (f", {format_percent(flops, total)}" if total else "")


def _list_edges(nodes: Sequence[_Node]) -> Iterator[str]:
    producers = {call.number: (node.number, call) for node in nodes for call in node.calls}
    for node in nodes:
        edges: dict[int, OpCall] = {}
        for call in node.calls:
            for number in call.after:
                source, producer = producers.get(number, (node.number, call))
                if source != node.number:
                    edges[source] = producer
        for source, producer in edges.items():
            shape = list_shapes(producer.outputs[0] if producer.outputs else "")
            yield f"  n{source} -> n{node.number} [label={_quote(shape)}]"


def _shorten(name: str) -> str:
    shown = printable(name)
    return shown if len(shown) <= _MAX_LENGTH else shown[: _MAX_LENGTH - 1] + "…"


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("\\", "\\\\").replace('"', '\\"')


def _quote(text: str) -> str:
    return f'"{_escape(text)}"'


def write_model_explorer(graph: OpGraph, *, depth: int | None = None) -> str:
    """Return the forward pass as a graph in Model Explorer's JSON; modules are collapsible, so `depth` is ignored.

    A node is an op call, with its exact counts, its source line and the shapes of its results; views have no node. A
    module has its class and the FLOPs of all ops inside it.
    """
    modules = graph.modules
    calls = list_calls_with_work(graph.calls)
    numbers = {call.number for call in calls}
    flops: Counter[str] = Counter()
    for call in calls:
        for name in (*modules_above(call.module), call.module):
            flops[name] += call.flops or 0
    root = printable(modules.root.class_name) or "model"
    record = {
        "id": root,
        "nodes": [_write_node(call, numbers) for call in calls],
        "groupNodeAttributes": {
            _namespace(name): {"class": printable(modules.by_name[name].class_name), "FLOPs": format_short(total)}
            for name, total in flops.items()
            if name in modules.by_name
        },
    }
    return json.dumps({"label": root, "graphs": [record]}, separators=(",", ":"))


def _write_node(call: OpCall, numbers: set[int]) -> dict[str, Any]:
    attrs = {
        "module": printable(call.module),
        "FLOPs": "unsupported" if call.flops is None else str(call.flops),
        "MACs": call.macs,
        "activations": call.activations,
        "bytes": call.nbytes,
        "status": call.status,
        "parameters": ", ".join(map(printable, call.parameters)),
        "line": printable(call.line),
    }
    return {
        "id": str(call.number),
        "label": printable(call.op.removeprefix("aten::")),
        "namespace": _namespace(call.module),
        "attrs": [{"key": key, "value": str(value)} for key, value in attrs.items() if value not in (None, "")],
        "incomingEdges": [
            {"sourceNodeId": str(number), "sourceNodeOutputId": "0", "targetNodeInputId": str(index)}
            for index, number in enumerate(call.after)
            if number in numbers
        ],
        "outputsMetadata": [
            {"id": str(index), "attrs": [{"key": "tensor_shape", "value": text}]}
            for index, text in enumerate(call.outputs)
        ],
    }


def _namespace(name: str) -> str:
    """Return a module's name in Model Explorer's format, with slashes for dots; slashes in names are replaced."""
    return "/".join(printable(part).replace("/", "∕") for part in name.split(".")) if name else ""
