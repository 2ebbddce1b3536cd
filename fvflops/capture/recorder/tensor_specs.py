"""Convert torch's tensors and op arguments to plain data: specs and signatures."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch

from fvflops.capture.recorder.value_reader import ValueArgument, find_value_arguments
from fvflops.capture.shapes.metadata import dense_spec, dtype_name
from fvflops.torch_internals import DispatchKey, OpOverload, has_kernel, has_kernel_for_key, is_wrapper_subclass
from fvflops.trace import Signature, Symbol, TensorSpec, Value
from fvflops.trace.process_group import ProcessGroupSpec

# Argument names of higher-order ops with formulas: torch has no schemas of them.
_ARGUMENT_NAMES = {
    "flex_attention": (
        *("query", "key", "value", "score_mod", "block_mask", "scale", "kernel_options"),
        *("score_mod_other_buffers", "mask_mod_other_buffers"),
    ),
    "flex_attention_backward": (
        *("query", "key", "value", "out", "logsumexp", "grad_out", "grad_logsumexp", "fw_graph", "joint_graph"),
        *("block_mask", "scale", "kernel_options", "score_mod_other_buffers", "mask_mod_other_buffers"),
    ),
}
# Objects with weight and bias of a quantized convolution: its kernel size does not follow from the output.
_PACKED_WEIGHTS = frozenset(f"__torch__.torch.classes.quantized.Conv{rank}dPackedParamsBase" for rank in (2, 3))
_SYMBOLS = {torch.dtype: "dtype", torch.device: "device", torch.layout: "layout", torch.memory_format: "memory_format"}
_COMPRESSED = frozenset({"sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc"})
_PROCESS_GROUP = "__torch__.torch.classes.c10d.ProcessGroup"
# The argument by which functional collectives name their group. Names are reused when a program creates new groups.
_GROUP_NAME = "group_name"
# The symbol of each live process group: listing its ranks takes time linear in their number.
_GROUPS: WeakKeyDictionary[Any, Symbol] = WeakKeyDictionary()
# Types of tensors without a dispatch of their own.
PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
# All signatures of the process, so that equal ones are one object: hashing one is slow.
_SIGNATURES: dict[Signature, Signature] = {}


@dataclass(frozen=True, slots=True)
class OpSchema:
    """Schema of an op overload.

    `names` and `defaults` describe its arguments, `position` maps name to index. `written`: indices of the arguments it
    mutates. `composite`: torch can decompose it. `text`: torch's schema. `group`: index of the argument that names a
    process group. `is_view`: it returns views of its arguments. `value_arguments`: arguments whose values its cost
    depends on.
    """

    name: str
    names: tuple[str, ...]
    defaults: tuple[Value, ...]
    position: Mapping[str, int]
    written: tuple[int, ...]
    composite: bool
    text: str
    group: int | None = None
    is_view: bool = False
    value_arguments: tuple[ValueArgument, ...] = ()


class ExplicitValue:
    """A function among an op's arguments, with an explicit value for the op's signature."""

    def __init__(self, function: Callable[..., Any], value: Value) -> None:
        self._function = function
        self.value = value

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)


def describe_op(op: Any, values: tuple[str, ...] = ()) -> OpSchema:
    """Return the schema of an `OpOverload` or a `HigherOrderOperator`, of whose arguments `values` are recorded."""
    if not isinstance(op, OpOverload):
        name, names = f"higher_order::{op.name()}", _ARGUMENT_NAMES.get(op.name(), ())
        position = {argument: index for index, argument in enumerate(names)}
        return OpSchema(name, names, (None,) * len(names), position, (), False, f"{name}({', '.join(names) or '...'})")
    schema = op._schema
    names = tuple(argument.name for argument in schema.arguments)
    return OpSchema(
        name=op.name(),
        names=names,
        defaults=tuple(
            describe(argument.default_value) if argument.has_default_value() else None for argument in schema.arguments
        ),
        position={name: index for index, name in enumerate(names)},
        written=tuple(
            index
            for index, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ),
        composite=(
            DispatchKey.CompositeImplicitAutograd in op.py_kernels
            or (
                # A wrapper subclass also gets prim::layout, an op of TorchScript that the dispatcher does not know.
                has_kernel(op.name()) and has_kernel_for_key(op.name(), "CompositeImplicitAutograd")
            )
        ),
        text=str(schema),
        group=names.index(_GROUP_NAME) if _GROUP_NAME in names else None,
        is_view=op.is_view,
        value_arguments=find_value_arguments(op.name(), names, values),
    )


cached_schema = cache(describe_op)


def is_composite(op: str) -> bool:
    """Return whether torch can decompose an op, by its name; False for one that this process does not know.

    >>> is_composite("aten::linear"), is_composite("aten::mm"), is_composite("mylib::scan")
    (True, False, False)
    """
    # torch's names are ASCII; it raises for names that are not UTF-8.
    return op.isascii() and bool(has_kernel(op) and has_kernel_for_key(op, "CompositeImplicitAutograd"))


def normalise(schema: OpSchema, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Value, ...]:
    """Return one value for each argument of the schema, with defaults.

    Most higher-order ops have no schema: then positional arguments come first, keyword arguments next.
    """
    if not schema.names:
        return tuple(describe(value) for value in (*args, *kwargs.values()))
    values = [describe(value) for value in args]
    values.extend(schema.defaults[len(values) :])
    for name, value in kwargs.items():
        values[schema.position[name]] = describe(value)
    if schema.group is not None:
        values[schema.group] = describe_group(values[schema.group])
    return tuple(values)


def describe_call(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Signature:
    schema = describe_op(op)
    return Signature(schema.name, schema.names, normalise(schema, args, kwargs), describe_result(result), schema.text)


def intern_signature(signature: Signature) -> Signature:
    return _SIGNATURES.setdefault(signature, signature)


def signature_count() -> int:
    return len(_SIGNATURES)


def clear_signatures() -> None:
    """Discard the interned signatures; caches of them are to be cleared too."""
    _SIGNATURES.clear()


def describe_result(result: Any) -> tuple[Value, ...]:
    """Return one value for each result of an op, () for none."""
    if result is None:
        return ()
    return tuple(describe(item) for item in result) if isinstance(result, tuple) else (describe(result),)


def describe(value: Any) -> Value:
    """Return an argument as plain data; an object of another type becomes a Symbol."""
    if isinstance(value, torch.Tensor):
        return describe_tensor(value)
    if value is None or isinstance(value, (bool, int, float, complex, str, TensorSpec)):
        return value
    if issubclass(type(value), (list, tuple)):
        return tuple(map(describe, _items_of(value)))
    if (kind := _SYMBOLS.get(type(value))) is not None:
        return Symbol(kind, str(value).removeprefix("torch."))
    if isinstance(value, torch.SymInt):
        return int(value)
    if isinstance(value, torch.ScriptObject):
        name = value._type().qualified_name()
        if name in _PACKED_WEIGHTS:
            return describe(value._get_method("unpack")())
        if name == _PROCESS_GROUP:
            return _group_symbol(torch.distributed.ProcessGroup.unbox(value))
    if torch.distributed.is_available() and isinstance(value, torch.distributed.ProcessGroup):
        return _group_symbol(value)
    return value.value if isinstance(value, ExplicitValue) else Symbol("object", type(value).__qualname__)


def describe_group(value: Value) -> Value:
    """Return the symbol of the process group with this name, or the value itself if there is none."""
    if not isinstance(value, str):
        return value
    from fvflops.torch_internals import resolve_process_group

    try:
        return _group_symbol(resolve_process_group(value))
    except (RuntimeError, ValueError):
        return value


def group_size(schema: OpSchema, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """Return the number of ranks of the process group among a call's arguments, or None."""
    for index, value in (*enumerate(args), *((schema.position.get(name), value) for name, value in kwargs.items())):
        if isinstance(value, str) and index == schema.group:
            group = ProcessGroupSpec.of(describe_group(value))
        elif isinstance(value, (torch.Tensor, list, tuple)):
            continue
        else:
            group = ProcessGroupSpec.of(describe(value))
        if group is not None:
            return group.size
    return None


def _group_symbol(group: Any) -> Symbol:
    symbol = _GROUPS.get(group)
    if symbol is None:
        try:
            ranks = torch.distributed.get_process_group_ranks(group)
        except (KeyError, ValueError):  # a group that torch made internally
            ranks = [0]
        steps = {after - before for before, after in pairwise(ranks)} or {0}
        axis = group.group_desc.removeprefix("mesh_") if group.group_desc.startswith("mesh_") else ""
        step = steps.pop() if len(steps) == 1 and len(ranks) == group.size() else None
        symbol = _GROUPS[group] = ProcessGroupSpec(group.group_name, group.size(), axis, ranks[0], step).symbol()
    return symbol


def describe_tensor(tensor: torch.Tensor) -> TensorSpec:
    """Return the spec of a tensor; a nested one's has the maximum sizes as shape and all sizes as values."""
    if tensor.layout is torch.strided and not tensor.is_nested:
        return dense_spec(tuple(map(_size, tensor.shape)), tensor.dtype, tensor.device)
    dtype, device, layout = dtype_name(tensor.dtype), str(tensor.device), str(tensor.layout).removeprefix("torch.")
    if tensor.is_nested:
        parts = [tuple(map(int, part.shape)) for part in tensor.unbind()]
        shape = (len(parts), *(max(sizes) for sizes in zip(*parts, strict=True)))
        return TensorSpec(shape, dtype, device, "nested", values=tuple(size for part in parts for size in part))
    nnz = None
    if layout == "sparse_coo" or layout in _COMPRESSED:  # not by _nnz(), which counts blocks of a blocked layout
        nnz = (tensor.values() if layout in _COMPRESSED else tensor._values()).numel()
    return TensorSpec(tuple(map(_size, tensor.shape)), dtype, device, layout, nnz=nnz)


def _size(size: Any) -> int:
    # int() would make a graph tracer specialise a symbolic size.
    return int(size.node.hint) if type(size) is torch.SymInt and size.node.has_hint() else int(size)


def inner_tensors(tensor: Any) -> list[torch.Tensor]:
    """Return the tensors inside a wrapper subclass, such as a DTensor or a quantized weight; for others the tensor."""
    if not is_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    values = [getattr(tensor, name) for name in names]
    return [inner for value in values if isinstance(value, torch.Tensor) for inner in inner_tensors(value)]


def rebuild(tensor: Any, convert: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return a wrapper subclass, such as a quantized weight, around the converted tensors inside."""
    names, context = tensor.__tensor_flatten__()
    values = {name: getattr(tensor, name) for name in names}
    inner = {name: convert(value) if isinstance(value, torch.Tensor) else value for name, value in values.items()}
    rebuilt: torch.Tensor = type(tensor).__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())
    return rebuilt


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested tuples, lists, mappings and dataclasses, in order.

    >>> values = [torch.ones(2)]
    >>> list(tensors_of([*values, values.append(values), values]))
    Traceback (most recent call last):
    ValueError: a value of type list contains itself: pass nested inputs that end
    """
    kind = type(value)
    try:
        if issubclass(kind, torch.Tensor):
            yield value
        elif issubclass(kind, (list, tuple)):
            for item in _items_of(value):
                yield from tensors_of(item)
        elif issubclass(kind, (dict, Mapping)):
            for item in dict.values(value) if issubclass(kind, dict) else value.values():
                yield from tensors_of(item)
        elif dataclasses.is_dataclass(kind):
            for field in dataclasses.fields(kind):
                yield from tensors_of(getattr(value, field.name, None))
    except RecursionError:
        if not _contains_itself(value):
            raise
        raise ValueError(f"a value of type {kind.__name__} contains itself: pass nested inputs that end") from None


def _contains_itself(value: Any) -> bool:
    pending, visited = [value], set[int]()
    while pending:
        for item in gc.get_referents(pending.pop()):
            if item is value:
                return True
            is_nested = isinstance(item, (list, tuple, Mapping)) or dataclasses.is_dataclass(type(item))
            if is_nested and id(item) not in visited:
                visited.add(id(item))
                pending.append(item)
    return False


def nodes_between(results: Any, arguments: Any = (), is_known: Callable[[Any], bool] | None = None) -> Iterator[Any]:
    """Yield the autograd nodes of results back to the nodes of arguments, and to known ones."""
    visited = {None, *(tensor.grad_fn for tensor in tensors_of(arguments))}
    pending = [tensor.grad_fn for tensor in tensors_of(results)]
    while pending:
        node: Any = pending.pop()
        if node not in visited and (is_known is None or not is_known(node)):
            visited.add(node)
            yield node
            pending += [inner for inner, _ in node.next_functions]


def _items_of(value: Any) -> Iterator[Any]:
    """Iterate over a list or tuple by its base class: `__iter__` or `__len__` of a subclass may raise."""
    return (list if issubclass(type(value), list) else tuple).__iter__(value)
