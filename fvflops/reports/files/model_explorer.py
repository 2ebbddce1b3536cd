"""Files for Google's Model Explorer (https://github.com/google-ai-edge/model-explorer): op calls in nested modules."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from fvflops.reports.escaping import printable
from fvflops.reports.files.dot import list_calls_with_work
from fvflops.trace.calls import OpCall, OpGraph
from fvflops.trace.module_tree import modules_above
from fvflops.units import format_short


def render(graph: OpGraph, *, depth: int | None = None) -> str:
    """Return the forward pass as a graph in Model Explorer's JSON; modules are collapsible, so `depth` is ignored.

    A node is an op call, with its exact counts, its source line and the shapes of its results; views have no node. A
    module has its class and the FLOPs of all ops inside it.

    >>> from fvflops.trace import ModuleInfo, ModuleTree
    >>> call = OpCall(0, "relu", "aten::relu", "aten::relu.default", "", "forward", ("float32[8]",), ("float32[8]",),
    ...               "float32", "counted", 8, nbytes=64)
    >>> graph = json.loads(render(OpGraph([call], ModuleTree({"": ModuleInfo("", "", "ReLU")}))))["graphs"][0]
    >>> graph["nodes"][0]["label"], graph["nodes"][0]["attrs"][0]
    ('relu', {'key': 'FLOPs', 'value': '8'})
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
        "nodes": [_node(call, numbers) for call in calls],
        "groupNodeAttributes": {
            _namespace(name): {"class": printable(modules.by_name[name].class_name), "FLOPs": format_short(total)}
            for name, total in flops.items()
            if name in modules.by_name
        },
    }
    return json.dumps({"label": root, "graphs": [record]}, separators=(",", ":"))


def _node(call: OpCall, numbers: set[int]) -> dict[str, Any]:
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
