"""ONNX models, converted to PyTorch modules by onnx2torch.

onnx2torch (extra `onnx`) has converters for the ops up to opset 17; models of later opsets are first converted to it by
the version converter of onnx. The modules get the module names that PyTorch's exporters wrote into the file.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import chain, count
from operator import attrgetter
from typing import Any

from torch import fx, nn

from fvflops.capture.model.input_specs import InputSpec
from fvflops.sources.loaded_model import BuiltModel
from fvflops.sources.options import SourceOptions
from fvflops.text import describe_import_error

_NEWEST_OPSET = 17  # the newest that most converters of onnx2torch support
_DOMAIN = "fvflops"  # of ops that are converted here
_NAMED = ("input", "output", "initializer", "value_info")  # parts of a graph that have names, or are names
_QUOTES = frozenset("\"'\\`")
# Keys of a node's metadata: the names and the classes of the modules around it, as PyTorch's exporter writes them.
_SCOPES, _CLASSES = "pkg.torch.onnx.name_scopes", "pkg.torch.onnx.class_hierarchy"


def build(path: str, options: SourceOptions) -> BuiltModel:
    """Return the module of an ONNX model; without the extra `onnx`, or for an unknown op, raise ValueError."""
    onnx, onnx2torch = _import_libraries(path)
    try:
        model = onnx.load(path)
    except Exception as error:
        raise ValueError(f"{path} is not an ONNX model: {type(error).__name__}: {_first_line(error)}") from error
    try:
        scopes = {_key(node.name): _read_scopes(node) for node in model.graph.node if node.name}
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError(f"{path} has names of modules that cannot be read: {_first_line(error)}") from error
    _check_names(path, model, scopes.values())
    try:
        are_usable = all(item.name.isidentifier() for item in model.graph.input)
        converted = onnx2torch.convert(_lower(model, onnx), save_input_names=are_usable)
    except Exception as error:  # the converters of onnx2torch raise any kind
        remedy = f"export it with opset_version={_NEWEST_OPSET} or lower, or count the PyTorch model"
        raise ValueError(f"{path}: onnx2torch cannot convert it: {_first_line(error)}; {remedy}") from error
    module = _name_modules(converted, scopes)
    if options.device is not None:
        module.to(options.device)
    return BuiltModel(module, _read_inputs(model, onnx))


def _import_libraries(path: str) -> tuple[Any, Any]:
    try:
        import onnx
        import onnx.inliner
        import onnx.version_converter
        import onnx2torch
    except ModuleNotFoundError as error:
        remedy = 'install it with pip install "fvflops[onnx]"'
        raise ValueError(f"{path} is an ONNX model, which needs {error.name}: {remedy}") from error
    except (ImportError, RuntimeError) as error:  # torchvision built for another torch
        reason = describe_import_error(error)
        raise ValueError(f"{path} is an ONNX model, and onnx2torch cannot be imported: {reason}") from error
    _add_converters()
    return onnx, onnx2torch


def _lower(model: Any, onnx: Any) -> Any:
    """Return a model of an opset that onnx2torch supports."""
    model = onnx.inliner.inline_local_functions(model)
    opsets = {opset.domain: opset for opset in model.opset_import}
    if "" not in opsets or opsets[""].version <= _NEWEST_OPSET:
        return model
    model = onnx.shape_inference.infer_shapes(model)  # while all ops are known
    shapes = {item.name: onnx.numpy_helper.to_array(item) for item in model.graph.initializer if item.data_type == 7}
    for node in model.graph.node:
        if node.op_type == "Gelu" and not node.domain:  # no earlier version exists
            node.domain = _DOMAIN
        if node.op_type == "Reshape" and node.input[1] in shapes and 0 not in shapes[node.input[1]]:
            kept = [item for item in node.attribute if item.name != "allowzero"]  # it concerns sizes of 0 only
            del node.attribute[:]
            node.attribute.extend(kept)
    if any(node.domain == _DOMAIN for node in model.graph.node):
        model.opset_import.append(onnx.helper.make_opsetid(_DOMAIN, 1))
    return onnx.version_converter.convert_version(model, _NEWEST_OPSET)


@cache
def _add_converters() -> None:
    from onnx2torch.node_converters.registry import add_converter
    from onnx2torch.utils.common import OperationConverterResult, onnx_mapping_from_node

    def convert_gelu(node: Any, graph: Any) -> Any:
        approximate = node.attributes.get("approximate", "none")
        return OperationConverterResult(nn.GELU(approximate=approximate), onnx_mapping_from_node(node))

    add_converter(operation_type="Gelu", version=1, domain=_DOMAIN)(convert_gelu)


def _check_names(path: str, model: Any, scopes: Iterable[Sequence[tuple[str, str]]]) -> None:
    """Raise ValueError for a name with a quote or a line break: torch.fx writes names into Python code unescaped."""
    names = [name for stack in scopes for name, _ in stack]
    pending = [model.graph, *model.functions]
    while pending:
        graph = pending.pop()
        names += [getattr(item, "name", item) for key in _NAMED for item in getattr(graph, key, ())]
        for node in graph.node:
            names += [node.name, node.op_type, node.domain, *node.input, *node.output]
            names += [item.name for item in node.attribute]
            pending += [inner for item in node.attribute for inner in (item.g, *item.graphs) if inner.node]
    for name in names:
        if not name.isprintable() or not _QUOTES.isdisjoint(name):
            raise ValueError(f"{path} has a name with a quote or a line break, {name!r:.100}: rename it")


def _read_scopes(node: Any) -> list[tuple[str, str]]:
    """Return (path, class name) of the modules around a node, as PyTorch's exporters wrote them; "" is unknown."""
    metadata = {item.key: item.value for item in node.metadata_props}
    if _SCOPES in metadata:
        names = ast.literal_eval(metadata[_SCOPES])
        classes = ast.literal_eval(metadata.get(_CLASSES, "[]"))
        # The first is the model, the last is the op.
        return [(name, kind) for name, kind in zip(names[:-1], classes, strict=False) if name]
    parts = node.name.strip("/").split("/")[:-1] if node.name.startswith("/") else []
    # The tracing exporter writes paths in full or relative to the enclosing module: "/layer1/layer1.0/conv1/Conv".
    paths: list[str] = []
    for part in parts:
        outer = paths[-1] if paths else ""
        paths.append(part if not outer or part.startswith(f"{outer}.") else f"{outer}.{part}")
    return [(path, "") for path in paths]


def _key(name: str) -> str:
    """Return the name of an ONNX node in the form that it has in onnx2torch's graphs and in the file alike.

    >>> _key("/layer1/layer1.0/Relu"), _key("fvflops//8/Gelu")
    ('layer1/layer1/0/Relu', '8/Gelu')
    """
    return name.replace(".", "/").removeprefix(f"{_DOMAIN}/").lstrip("/")


def _name_modules(converted: fx.GraphModule, scopes: dict[str, list[tuple[str, str]]]) -> fx.GraphModule:
    """Return a module of the same graph, with each op named as a child of its enclosing module."""
    contents: dict[str, Any] = {}
    taken: set[str] = {path for stack in scopes.values() for path, _ in stack}
    graph = converted.graph
    for node in graph.nodes:
        if node.op == "get_attr":
            contents[node.target] = attrgetter(node.target)(converted)
        if node.op != "call_module":
            continue
        stack = scopes.get(_key(node.target), [])
        name = _choose_name(stack[-1][0] if stack else "", node.target, taken)
        taken.add(name)
        contents[name] = converted.get_submodule(node.target)
        if all(kind for _, kind in stack):
            node.meta["nn_module_stack"] = {path: (path, kind) for path, kind in stack}
        node.target = name
    return fx.GraphModule(contents, graph, class_name="OnnxModel")


def _choose_name(outer: str, node_name: str, taken: set[str]) -> str:
    own = re.sub(r"\W", "_", node_name.rpartition("/")[2]) or "op"
    free = f"{outer}.{own}" if outer else own
    names = chain([free], (f"{free}_{number}" for number in count(1)))
    return next(name for name in names if name not in taken)


def _read_inputs(model: Any, onnx: Any) -> tuple[InputSpec, ...]:
    """Return the inputs of a model, with a batch of 1 if its size is dynamic; () if another size is dynamic."""
    initializers = {item.name for item in model.graph.initializer}
    specs = []
    for item in (item for item in model.graph.input if item.name not in initializers):
        kind = item.type.tensor_type
        sizes = [size.dim_value for size in kind.shape.dim]
        if sizes and sizes[0] == 0:
            sizes[0] = 1
        if 0 in sizes:
            return ()
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type).name
        specs.append(InputSpec(None, tuple(sizes), dtype))
    return tuple(specs)


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:200]
