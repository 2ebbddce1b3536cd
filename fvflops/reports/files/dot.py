"""Graphs in DOT, for Graphviz: modules as nodes with their FLOPs, and tensors as edges."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from fvflops.reports.calls.op_calls import list_shapes
from fvflops.reports.names import printable
from fvflops.trace import ModuleTree
from fvflops.trace.calls import OpCall, OpGraph
from fvflops.trace.module_tree import modules_above
from fvflops.units import format_percent, format_short

_LONGEST = 60
_HUE = "0.08"  # orange, the deeper the more FLOPs
_HEAD = """\
  rankdir=TB
  node [shape=box style="rounded,filled" fillcolor=white fontname="Helvetica" fontsize=10]
  edge [fontname="Helvetica" fontsize=8 color="#666666"]
  graph [fontname="Helvetica" fontsize=10 color="#999999" style=rounded labeljust=l]
"""


class _Node(NamedTuple):
    """Calls of ops that ran one after the other in one module, or one op that is shown by itself.

    `above` are the names of the modules around it, outermost first.
    """

    number: int
    name: str
    class_name: str
    above: tuple[str, ...]
    calls: Sequence[OpCall]

    @property
    def flops(self) -> int:
        """The FLOPs that are known."""
        return sum(call.flops or 0 for call in self.calls)


@dataclass(slots=True)
class _Cluster:
    """A module around nodes: its FLOPs, its nodes, and the modules in it."""

    flops: int = 0
    nodes: list[_Node] = field(default_factory=list)
    inner: dict[str, _Cluster] = field(default_factory=dict)


def render(graph: OpGraph, *, depth: int | None = None) -> str:
    """Return the forward pass as DOT text, which `dot -Tsvg` draws.

    A node is a call of a module without submodules, or of one `depth` levels below the root; an op that such a module's
    parent runs itself is a node too. It has its class, the shape of
    its result, its FLOPs and their share; the deeper its colour, the more. Modules around nodes are boxes. An edge goes
    from the node that computed a tensor, whose shape it has, to one that reads it; views are not drawn.

    >>> from fvflops.trace import ModuleInfo
    >>> call = OpCall(0, "relu", "aten::relu", "aten::relu.default", "", "forward", ("float32[8]",), ("float32[8]",),
    ...               "float32", "counted", 8, nbytes=64)
    >>> print(render(OpGraph([call], ModuleTree({"": ModuleInfo("", "", "ReLU")}))).splitlines()[-2])
      n0 [label="ReLU\\n[8]\\n8 FLOPs, 100.0%" fillcolor="0.08 0.80 1.00"]
    """
    calls, modules = graph
    nodes = list(_make_nodes(calls, modules, depth))
    top = _Cluster()
    for node in nodes:
        cluster = top
        for name in node.above:
            cluster = cluster.inner.setdefault(name, _Cluster())
            cluster.flops += node.flops
        cluster.nodes.append(node)
    head = f"digraph {_quote(modules.root.class_name or 'model')} {{\n{_HEAD}"
    whole, most = sum(node.flops for node in nodes), max((node.flops for node in nodes), default=0)
    return "\n".join([head.rstrip(), *_write(top, modules, whole, most), *_list_edges(nodes), "}"])


def list_computing(calls: Sequence[OpCall]) -> list[OpCall]:
    """Return the calls of a forward pass that compute something, or move bytes: no views."""
    return [call for call in calls if call.phase == "forward" and (call.nbytes != 0 or call.flops)]


def _make_nodes(calls: Sequence[OpCall], modules: ModuleTree, depth: int | None) -> Iterator[_Node]:
    seen = list_computing(calls)
    for number, ((name, alone), group) in enumerate(groupby(seen, lambda call: _place(call, modules, depth))):
        run = list(group)
        above = tuple(modules_above(name)[1:])
        if alone is None:
            yield _Node(number, name, modules.by_name[name].class_name, above, run)
        else:
            yield _Node(number, run[0].op.removeprefix("aten::"), "", (*above, name) if name else (), run)


def _place(call: OpCall, modules: ModuleTree, depth: int | None) -> tuple[str, int | None]:
    """Return the module that a call is shown as, and the call's number where it is shown in that by itself."""
    parts = call.module.split(".") if call.module else []
    if depth is not None and len(parts) >= depth:
        return ".".join(parts[:depth]), None
    return call.module, call.number if modules.by_name[call.module].children else None


def _write(top: _Cluster, modules: ModuleTree, whole: int, most: int) -> Iterator[str]:
    """Yield the lines of nodes and of the boxes around them."""
    # Modules may be nested deeper than Python's stack is.
    waiting: list[str | _Cluster] = [top]
    boxes = 0
    while waiting:
        cluster = waiting.pop()
        if isinstance(cluster, str):
            yield cluster
            continue
        for node in cluster.nodes:
            colour = f"{_HUE} {0.8 * node.flops / most if most else 0:.2f} 1.00"
            # A graph's reader takes this for a line break, and the two backslashes of a name for one.
            label = "\\n".join(map(_escape, _describe(node, whole)))
            yield f'  n{node.number} [label="{label}" fillcolor="{colour}"]'
        for name, inner in reversed(cluster.inner.items()):
            title = f"{_shorten(name)} ({_shorten(modules.by_name[name].class_name)})"
            label = f"{_escape(title)}\\n{_count(inner.flops, whole)}"
            boxes += 1  # what Graphviz draws as a box is named so
            waiting += ["  }", inner, f'  subgraph cluster_{boxes} {{ label="{label}"']


def _describe(node: _Node, whole: int) -> Iterator[str]:
    if node.name:
        yield _shorten(node.name)
    if node.class_name:
        yield _shorten(node.class_name)
    outputs = node.calls[-1].outputs
    if outputs:
        yield list_shapes(outputs[0])
    unknown = dict.fromkeys(_shorten(call.op) for call in node.calls if call.flops is None)
    if unknown:
        yield f"unsupported: {', '.join(unknown)}"
    if node.flops or not unknown:
        omitted = not node.flops and any(call.status == "omitted" for call in node.calls)
        yield "ignored by this convention" if omitted else _count(node.flops, whole)


def _count(flops: int, whole: int) -> str:
    return f"{format_short(flops)} FLOPs" + (f", {format_percent(flops, whole)}" if whole else "")


def _list_edges(nodes: Sequence[_Node]) -> Iterator[str]:
    makers = {call.number: (node.number, call) for node in nodes for call in node.calls}
    for node in nodes:
        edges: dict[int, OpCall] = {}
        for call in node.calls:
            for number in call.after:
                maker, made = makers.get(number, (node.number, call))
                if maker != node.number:
                    edges[maker] = made
        for maker, made in edges.items():
            shape = list_shapes(made.outputs[0] if made.outputs else "")
            yield f"  n{maker} -> n{node.number} [label={_quote(shape)}]"


def _shorten(name: str) -> str:
    shown = printable(name)
    return shown if len(shown) <= _LONGEST else shown[: _LONGEST - 1] + "…"


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("\\", "\\\\").replace('"', '\\"')


def _quote(text: str) -> str:
    return f'"{_escape(text)}"'
