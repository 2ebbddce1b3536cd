"""Copy a TorchScript module, with ops by which its interpreter reports the calls of its submodules."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

NAMESPACE = "fvflops"
ENTER, LEAVE = f"{NAMESPACE}::enter_module", f"{NAMESPACE}::leave_module"


def is_module_call(op: str) -> bool:
    return op in (ENTER, LEAVE)


@cache
def define_ops() -> tuple[Any, Any]:
    """Return the ops before and after a module call, defined on first use.

    They take the call's path in the module that calls it with its tensors, and its results. Their alias analysis is
    conservative: otherwise TorchScript would remove ops without results.
    """
    library = torch.library.Library(NAMESPACE, "DEF")
    for op, arguments in ((ENTER, "str name, Tensor[] inputs"), (LEAVE, "Tensor[] outputs")):
        name = op.partition("::")[2]
        library.define(f"{name}({arguments}) -> ()", alias_analysis="CONSERVATIVE")
        library.impl(name, lambda *_: None, "CompositeExplicitAutograd")  # where nothing is recorded
    define_ops.library = library  # type: ignore[attr-defined]  # an op exists as long as its library
    return getattr(torch.ops, NAMESPACE).enter_module.default, getattr(torch.ops, NAMESPACE).leave_module.default


# Methods that calls of a module run: a traced module has one for each call (forward, forward1, ...).
_FORWARD = re.compile(r"forward\d*")
_QUALIFIER = re.compile(r"^__torch__\.|___torch_mangle_\d+\.")


def script_class(module: Any) -> str:
    """Return the qualified name of the class that a TorchScript module was compiled from."""
    return _QUALIFIER.sub("", module._c._type().qualified_name())


@dataclass(frozen=True, slots=True)
class ScriptCopy:
    """A TorchScript module of a model, its path, and a copy of it that reports module calls."""

    path: str
    original: Any
    copy: Any

    def share_tensors(self, replace: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor) -> None:
        """Set the copy's parameters and buffers to the module's, or to their replacements."""
        for module, part in zip(self.original.modules(), self.copy.modules(), strict=True):
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    part._c.setattr(name, replace(tensor))


def copy_scripts(names: Mapping[nn.Module, str]) -> dict[int, ScriptCopy]:
    """Return id → copy of each outermost TorchScript module that can be copied; `names` maps modules to paths."""
    paths = {name for module, name in names.items() if isinstance(module, torch.jit.ScriptModule)}
    copies: dict[int, ScriptCopy] = {}
    for module, path in names.items():
        is_outermost = path in paths and (not path or path.rpartition(".")[0] not in paths)
        if is_outermost and (copy := _copy_script(module)) is not None:
            script = copies[id(module)] = ScriptCopy(path, module, copy)
            script.share_tensors()
    return copies


def _copy_script(module: Any) -> nn.Module | None:
    """Return a copy of a TorchScript module that reports module calls.

    None for a module that cannot be saved, such as one frozen for inference, or that has tensors of other classes, on
    which torch's writer crashes: all its ops then belong to the module itself.
    """
    if not {*map(type, (*module.parameters(), *module.buffers()))} <= {torch.Tensor, nn.Parameter}:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.jit is deprecated
            copy: Any = torch.jit.load(io.BytesIO(module._c.save_to_buffer()))
    except RuntimeError:
        return None
    if [name for name, _ in module.named_modules()] != [name for name, _ in copy.named_modules()]:
        return None
    instrumented: set[tuple[str, str]] = set()
    for part in copy.modules():
        for method in part._c._method_names():
            key = part._c._type().qualified_name(), method
            if key not in instrumented:  # modules of one type share their graphs
                instrumented.add(key)
                graph = part._c._get_method(method).graph
                _instrument(graph, graph, next(iter(graph.inputs())).debugName())
    return copy


def _instrument(graph: Any, block: Any, self_name: str) -> None:
    """Insert ops around the calls of submodules in a block of a graph."""
    for node in list(block.nodes()):
        for inner in node.blocks():
            _instrument(graph, inner, self_name)
        if node.kind() != "prim::CallMethod" or not _FORWARD.fullmatch(node.s("name")):
            continue
        path = _read_path(node.inputsAt(0), self_name)
        if not path:  # another method of the module itself, or a module chosen at run time
            continue
        enter, leave = define_ops()
        with graph.insert_point_guard(node):
            name = graph.insertConstant(".".join(path))
        inputs = _make_list(graph, list(node.inputs())[1:], enter)
        inputs.insertBefore(node)
        before = graph.create(ENTER, 0)
        before.addInput(name)
        before.addInput(inputs.output())
        before.insertBefore(node)
        outputs = _make_list(graph, list(node.outputs()), leave)
        outputs.insertAfter(node)
        after = graph.create(LEAVE, 0)
        after.addInput(outputs.output())
        after.insertAfter(outputs)


def _read_path(value: Any, self_name: str) -> list[str] | None:
    """Return the attribute path from the module to a value, None for a value that is not an attribute."""
    names: list[str] = []
    while value.debugName() != self_name:
        node = value.node()
        if node.kind() != "prim::GetAttr":
            return None
        names.insert(0, node.s("name"))
        value = node.inputsAt(0)
    return names


def _make_list(graph: Any, values: list[Any], op: Any) -> Any:
    node = graph.create("prim::ListConstruct", 1)
    for value in values:
        if value.type().kind() == "TensorType":
            node.addInput(value)
    node.output().setType(op._schema.arguments[-1].type)
    return node
