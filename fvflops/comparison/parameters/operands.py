"""Packed weights of layers that state no sizes: their elements are those of the operand that a product was given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fvflops.trace import ModuleInfo, ModuleTree, ParameterInfo, TensorSpec, Trace, tensors_in

_CODES = frozenset({"int8", "uint8", "int16", "uint16", "int32", "uint32"})
_PRODUCTS = frozenset(f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "matmul", "linear"))
# Bits for each element of a packed weight.
_LEAST, _MOST = 0.5, 8


def with_operands(modules: ModuleTree, trace: Trace) -> ModuleTree:
    """Return a tree in which integers that a module unpacks, and multiplies its input by, are packed weights.

    Such an operand is computed from tensors of the module alone, of which none of floating-point numbers has as many
    elements, and the largest of integers has up to 8 bits for each.
    """
    found = _find_operands(modules, trace)
    if not found:
        return modules
    return ModuleTree({name: _with_weight(module, found) for name, module in modules.by_name.items()})


def _with_weight(module: ModuleInfo, found: Mapping[str, ParameterInfo]) -> ModuleInfo:
    weights = [found[item.name] for item in (*module.parameters, *module.buffers) if item.name in found]
    if not weights:
        return module
    rest = [tuple(item for item in items if item.name not in found) for items in (module.parameters, module.buffers)]
    return replace(module, parameters=(*rest[0], *weights), buffers=rest[1])


def _find_operands(modules: ModuleTree, trace: Trace) -> dict[str, ParameterInfo]:
    """Return the name of a tensor → its packed weight."""
    owned = {item.name: (module.name, item) for module in modules.modules() for item in _tensors_of(module)}
    if not any(item.spec.dtype in _CODES and item.stored is None for _, item in owned.values()):
        return {}
    # Storage → the tensors of one module that it is computed from.
    sources: dict[int, frozenset[str]] = {
        index: frozenset({row.name}) for index, row in enumerate(trace.storages) if row.name in owned
    }
    found: dict[str, ParameterInfo] = {}
    for event in trace.events or ():
        if event.kind != "op" or event.phase != "forward":
            continue
        signature = trace.signatures[event.item]
        origins = [sources.get(index) for index in event.reads]
        if signature.packet in _PRODUCTS:
            specs = list(tensors_in(signature.inputs))
            for origin, spec in zip(origins, specs, strict=False) if len(specs) == len(origins) else ():
                weight = None if origin is None else _packed_weight([owned[name][1] for name in origin], spec)
                if weight is not None and None in origins:
                    found[weight.name] = weight
        names = frozenset(name for origin in origins if origin is not None for name in origin)
        is_own = bool(names) and None not in origins and len({owned[name][0] for name in names}) == 1
        for index in event.writes:
            if is_own:
                sources[index] = names
            elif index in sources and index not in event.reads:
                del sources[index]
    return found


def _tensors_of(module: ModuleInfo) -> tuple[ParameterInfo, ...]:
    return (*module.parameters, *module.buffers)


def _packed_weight(tensors: list[ParameterInfo], operand: TensorSpec) -> ParameterInfo | None:
    codes = [item for item in tensors if item.spec.dtype in _CODES and item.stored is None]
    others = [item for item in tensors if item not in codes]
    if operand.ndim < 2 or not codes or any(item.spec.numel >= operand.numel for item in others):
        return None
    largest = max(codes, key=lambda item: item.spec.nbytes)
    nbytes = largest.spec.nbytes
    bits = 8 * nbytes / operand.numel
    if not _LEAST <= bits <= _MOST:
        return None
    dtype = largest.spec.dtype if largest.spec.numel == operand.numel else f"int{max(1, round(bits))}"
    return replace(largest, spec=TensorSpec(operand.shape, dtype, operand.device), stored=nbytes)
