"""Run exported and traced graphs with a region for each module call that the metadata of their nodes names."""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import get_ident
from typing import Any
from weakref import WeakValueDictionary

from torch import fx

from fvflops.capture.instrument.patching import Patch, Wrapper, calling
from fvflops.capture.model.graph_modules import NodeScope, prefix_path, runs_ops, scopes_of
from fvflops.capture.model.model_index import ModelIndex
from fvflops.capture.recorder.recorder import Recorder
from fvflops.trace import Region

# Each GraphModule has a class of its own, whose forward is generated from its graph: by id of the class. A patch keeps
# its class alive, so that an id is not reused before.
_FORWARDS: WeakValueDictionary[int, Patch] = WeakValueDictionary()


# A running graph: the keys of the module calls around it, and those opened in it with their tokens; None: already open.
_Frame = tuple[list[str], list[tuple[str, int | None]]]


class GraphScopes:
    """Opens and closes the regions of module calls in graphs; each thread has its own running graphs."""

    def __init__(self, recorder: Recorder, model_index: ModelIndex) -> None:
        self._recorder = recorder
        # The body of an op is passed parameters and buffers too, which are not inputs of a module.
        self._own_tensors = {id(tensor) for tensor in model_index.tensors}
        self._frames: dict[int, list[_Frame]] = {}

    def call(
        self, forward: Callable[..., Any], is_body: bool, original: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Run a graph's instrumented forward; the body of an op, such as torch.cond, runs in the op's module calls."""
        if get_ident() != self._recorder.thread and not self._recorder.is_recording_thread():
            return original(*args, **kwargs)
        frames = self._frames.setdefault(get_ident(), [])
        frames.append(([key for key, _ in frames[-1][1]] if is_body and frames else [], []))
        try:
            return forward(*args, **kwargs)
        finally:
            frames.pop()

    def enter(self, key: str, region: int, *values: Any) -> None:
        """Open the region of a module call."""
        around, opened = self._frames[get_ident()][-1]
        depth = len(opened)
        is_open = around[depth : depth + 1] == [key] and all(token is None for _, token in opened)
        owners = self._recorder.module_of_tensor
        inputs = tuple([value for value in values if id(value) not in self._own_tensors and id(value) not in owners])
        opened.append((key, None if is_open else self._recorder.enter(region, inputs)))

    def leave(self, *values: Any) -> None:
        _, token = self._frames[get_ident()][-1][1].pop()
        if token is not None:
            self._recorder.leave(token, values)


def graph_scopes(recorder: Recorder, model_index: ModelIndex) -> list[Wrapper]:
    """Return the wrappers that run a model's graphs with regions."""
    graphs = model_index.graphs
    found: list[Wrapper] = []
    if graphs is None:
        return found
    scopes = GraphScopes(recorder, model_index)
    for position, prefix in graphs.prefixes.items():
        module: Any = model_index.modules[position]

        def region_of(path: str, prefix: str = prefix) -> int:
            full = prefix_path(prefix, path)
            return recorder.region(Region("module", graphs.aliases.get(full, full)))

        forward = _instrument(module, scopes, region_of)
        if forward is not None and "forward" not in vars(module):
            cls = type(module)
            patch = _FORWARDS.get(id(cls))
            if patch is None:
                patch = _FORWARDS[id(cls)] = Patch(cls, "forward")
            found.append((patch, calling(partial(scopes.call, forward, position in graphs.bodies))))
    return found


def _instrument(
    module: fx.GraphModule, scopes: GraphScopes, region_of: Callable[[str], int]
) -> Callable[..., Any] | None:
    """Return the forward of a graph that also enters and leaves regions, or None if its nodes name no modules."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch copies the structure of the inputs by a way that it deprecates
        graph = copy.deepcopy(module.graph)
    calls = _find_calls(list(graph.nodes))
    if not calls:
        return None
    begins, ends = (defaultdict[fx.Node, list[_Call]](list), defaultdict[fx.Node, list[_Call]](list))
    for call in calls:
        begins[call.first].append(call)
        ends[call.after].insert(0, call)  # inner calls end first
    enter, leave = (scopes.enter, scopes.leave)  # torch 2.7 and older compare functions of a graph by identity
    for node in {**begins, **ends}:
        with graph.inserting_before(node):
            for call in ends[node]:
                graph.call_function(leave, tuple(call.outputs))
            for call in begins[node]:
                graph.call_function(enter, (call.scope.key, region_of(call.scope.path), *call.inputs))
    code = graph.python_code(root_module="self")
    namespace = dict(code.globals)
    exec(compile(code.src, "<fvflops graph>", "exec"), namespace)
    forward: Callable[..., Any] = namespace["forward"]
    return forward


@dataclass(slots=True)
class _Call:
    """A module call: the nodes before which it begins and ends, its inputs and its outputs."""

    scope: NodeScope
    first: fx.Node
    start: int
    after: fx.Node
    inputs: dict[fx.Node, None] = field(default_factory=dict)
    end: int = 0
    outputs: list[fx.Node] = field(default_factory=list)


def _find_calls(nodes: Sequence[fx.Node]) -> list[_Call]:
    positions = {node: position for position, node in enumerate(nodes)}
    calls: list[_Call] = []
    opened: list[_Call] = []

    def close(depth: int, node: fx.Node, position: int) -> None:
        for call in reversed(opened[depth:]):
            call.end, call.after = position, node
        del opened[depth:]

    for position, node in enumerate(nodes):
        if node.op == "output":
            close(0, node, position)
        elif runs_ops(node):
            around = scopes_of(node)
            if node.op == "call_module" and around and around[-1].path == node.target:
                around = around[:-1]  # the module itself is called
            common = 0
            while common < min(len(opened), len(around)) and opened[common].scope.key == around[common].key:
                common += 1
            close(common, node, position)
            new = [_Call(scope, node, position, nodes[-1]) for scope in around[common:]]
            calls += new
            opened += new
        for call in opened:
            call.inputs.update(
                dict.fromkeys(
                    source
                    for source in node.all_input_nodes
                    if positions[source] < call.start and source.op != "get_attr"
                )
            )
    for call in calls:
        inside = [node for node in nodes[call.start : call.end] if node.op != "get_attr"]
        call.outputs = [node for node in inside if any(positions[user] >= call.end for user in node.users)]
    return calls
