"""Open a region when a module of the model is called, and close it when it returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.overrides import BaseTorchFunctionMode

from fvflops.capture.instrument.leaf_calls import find_leaf_calls
from fvflops.capture.instrument.patching import Patch, wrapped
from fvflops.capture.model.model_index import ModelIndex
from fvflops.capture.model.script_copy import ENTER, ScriptCopy
from fvflops.capture.recorder.recorder import Recorder
from fvflops.capture.restore.forks import undone
from fvflops.capture.restore.torch_state import function_mode_removed
from fvflops.torch_internals import TorchDispatchMode, function_mode_stack, module_call
from fvflops.trace import Region, Signature

# Without gradients and torch function modes, their forward takes a fused path, in which no submodules are called and no
# matrix products dispatched. A no-op mode prevents that and, unlike torch.backends.mha's switch, is not global.
_FUSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)

CALLS = Patch(*module_call)
_COMPILES = Patch(nn.Module, "compile")


class _Unfused(BaseTorchFunctionMode):
    """A function mode without effect, except that torch does not take its fused path."""

    def __exit__(self, *error: Any) -> None:
        # A signal may have interrupted torch's handling of the mode stack.
        stack = function_mode_stack()
        if stack and stack[-1] is self:
            super().__exit__(*error)


@contextmanager
def compiled_calls_replaced(modules: Iterable[nn.Module], replace: Callable[[nn.Module, Any], Any]) -> Iterator[None]:
    """Replace the calls that `module.compile()` bound to the unwrapped method, while the context lasts."""
    compiled = [(module, call) for module in modules if (call := module._compiled_call_impl) is not None]

    def restore() -> None:
        for module, call in compiled:
            module._compiled_call_impl = call

    with undone(restore):
        for module, call in compiled:
            module._compiled_call_impl = replace(module, call)
        yield


class ScriptCalls:
    """The open module calls of TorchScript modules, in each thread."""

    def __init__(self, recorder: Recorder, canonical: Callable[[str], str]) -> None:
        self._recorder = recorder
        self._canonical = canonical
        self._opened: dict[int, list[tuple[str, int]]] = {}

    def run(self, path: str, script: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a TorchScript module, whose region is open, under its path."""
        thread = get_ident()
        outer, self._opened[thread] = self._opened.get(thread, []), [(path, -1)]
        try:
            return script(*args, **kwargs)
        finally:
            self._opened[thread] = outer

    def dispatch(self, op: str, args: Any) -> None:
        """Open or close the region of a module call."""
        opened = self._opened.get(get_ident())
        if not opened:
            return
        if op == ENTER:
            name, inputs = args
            outer = opened[-1][0]
            path = f"{outer}.{name}" if outer else name
            region = self._recorder.region(Region("module", self._canonical(path)))
            opened.append((path, self._recorder.enter(region, tuple(inputs))))
        else:
            self._recorder.leave(opened.pop()[1], tuple(args[0]))


@contextmanager
def module_scopes(
    recorder: Recorder,
    model_index: ModelIndex,
    mode: TorchDispatchMode | None = None,
    scripts: Mapping[int, ScriptCopy] | None = None,
) -> Iterator[None]:
    """Record calls of a model's modules as regions while the context lasts.

    TorchScript calls its submodules inside its interpreter: modules of `scripts` run as copies that report the calls
    (`copy_scripts`). Assignments in the code of a copy do not reach the model.

    Wraps the method that every module call goes through: torch's global hooks cost three times as much per call, have
    no keyword arguments before the call, and do not run after exceptions such as KeyboardInterrupt.
    """
    unfused = _Unfused()
    copies, tree = scripts or {}, model_index.tree
    calls = ScriptCalls(recorder, lambda path: tree.canonical(path) if path in tree.by_name else path)
    if copies:
        recorder.scripts = calls.dispatch
    # `module.compile()` is deferred until the context ends: it would bind the wrapped method.
    compile_calls: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = []

    def defer_compile(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda module, *args, **kwargs: compile_calls.append((module, args, kwargs))

    deferred = _COMPILES, defer_compile
    try:
        with (
            wrapped([(CALLS, partial(_around, recorder, model_index, mode, unfused, copies, calls)), deferred]),
            function_mode_removed(unfused),
            compiled_calls_replaced(model_index.modules, lambda module, call: None),
        ):
            yield
    finally:
        for module, args, kwargs in compile_calls:
            module.compile(*args, **kwargs)


def _around(
    recorder: Recorder,
    model_index: ModelIndex,
    mode: TorchDispatchMode | None,
    unfused: _Unfused,
    copies: Mapping[int, ScriptCopy],
    script_calls: ScriptCalls,
    original: Callable[..., Any],
) -> Callable[..., Any]:
    scripts = {name: module for module, name in model_index.names.items() if isinstance(module, torch.jit.ScriptModule)}
    hidden_ops = {id(module): ops for module in scripts.values() if (ops := _hidden_ops(module))}
    outermost = recorder.unseen
    unseen_work = outermost if outermost is not None and outermost.is_real else None
    with_fused_path = {id(module) for module in model_index.modules if isinstance(module, _FUSED)}
    thread, enter, leave = recorder.thread, recorder.enter, recorder.leave
    leaf_calls = find_leaf_calls(recorder, mode, model_index, original)
    regions = _regions(recorder, model_index)
    for name in scripts.keys() - {""}:
        if name.rpartition(".")[0] in scripts:
            del regions[id(scripts[name])]

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        region = regions.get(id(module))
        if region is None or (get_ident() != thread and not recorder.is_recording_thread()):
            return original(module, *args, **kwargs)
        if unseen_work is not None:
            unseen_work.enter(args[0] if len(args) == 1 and not kwargs else (args, kwargs))
        leaf = leaf_calls.find(module, args[0]) if leaf_calls is not None and len(args) == 1 and not kwargs else None
        if leaf_calls is not None and leaf is not None:
            if (replayed := leaf_calls.replay(leaf, region, args[0])) is not None:
                return replayed
            metadata, first_event = args[0].metadata, len(recorder.events)
        token = enter(region, (args, kwargs) if kwargs else args)
        try:
            if id(module) in with_fused_path:
                with unfused:
                    result = original(module, *args, **kwargs)
            elif id(module) in copies:
                script = copies[id(module)]
                result = script_calls.run(script.path, script.copy, *args, **kwargs)
            else:
                result = original(module, *args, **kwargs)
        except BaseException as error:
            leave(token, None, error)
            raise
        for op in hidden_ops.get(id(module), ()):
            recorder.append_call(Signature(op, (), (), (), f"{op}(...)"))
        if unseen_work is not None:
            unseen_work.leave(result, getattr(module, "forward", None))
        if token == 0 and outermost is not None and get_ident() == thread and not recorder.paused:
            outermost.finish(result, getattr(module, "forward", None))
        if recorder.has_threads:
            recorder.assign_graph(result, (args, kwargs))
        leave(token, result)
        if leaf is not None and leaf_calls is not None:
            leaf_calls.cache(leaf, args[0], metadata, recorder.events[first_event:], result)
        return result

    return call


def _regions(recorder: Recorder, model_index: ModelIndex) -> dict[int, int]:
    """Return id → region of each module, except modules that tracing added to a graph."""
    graphs, pairs = model_index.graphs, zip(model_index.modules, model_index.regions, strict=True)
    kept = [pair for pair in pairs if graphs is None or not graphs.is_hidden(pair[1].name)]
    return {id(module): recorder.region(region) for module, region in kept}


def _hidden_ops(module: torch.jit.ScriptModule) -> list[str]:
    """Return the ops that `torch.jit.optimize_for_inference` hides from dispatch.

    The body of a loop counts once: the graph does not contain the trip count.
    """

    def kinds(block: Any) -> Iterator[str]:
        for node in block.nodes():
            if node.kind().startswith("prim::mkldnn_"):
                yield node.kind()
            for inner in node.blocks():
                yield from kinds(inner)

    # A module that is never called, such as a ModuleList, has no graph.
    graph = getattr(module, "inlined_graph", None) if hasattr(module, "forward") else None
    return [] if graph is None else list(kinds(graph))
