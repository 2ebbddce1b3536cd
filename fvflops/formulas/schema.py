"""Schemas of torch's ops, for checking tables; torch is imported on first use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from fvflops.formulas.language.call import operands_of
from fvflops.text import nearest
from fvflops.trace.calls import packet_of

# Namespaces whose ops torch defines on import: no op is added to them later.
KNOWN_NAMESPACES = ("aten", "prims", "quantized")
# Namespaces that a table may use before a library registers ops in them.
_OTHER_NAMESPACES = ("c10d", "higher_order", "prim", "torchaudio", "torchvision")


@dataclass(frozen=True, slots=True)
class Overload:
    """One overload of an op: its full name, its argument names, its tensor arguments, its schema, and whether torch
    can decompose it."""

    name: str
    arguments: tuple[str, ...]
    operands: tuple[str, ...]
    schema: str
    composite: bool


def overloads_of(op: str) -> tuple[Overload, ...]:
    """Return the overloads of an op, or the one that `op` names; () where none is registered.

    >>> [overload.arguments for overload in overloads_of("aten::mm")][0]
    ('self', 'mat2')
    """
    from fvflops.torch_internals import schemas_of_packet

    packet = packet_of(op)
    if packet.startswith("prims::") and not schemas_of_packet(packet):
        # torch's compiler defines some on import, which takes as long as importing torch.
        from fvflops.torch_internals import inductor_prims  # noqa: F401
    overloads = []
    for schema in schemas_of_packet(packet):
        name = f"{packet}.{schema.overload_name}" if schema.overload_name else packet
        if op in (packet, name):
            text = str(schema)
            arguments = tuple(argument.name for argument in schema.arguments)
            overloads.append(Overload(name, arguments, operands_of(text), text, is_composite(name)))
    return tuple(overloads)


def suggest_op(op: str) -> str:
    """Return the op or overload name closest to one that does not exist.

    >>> suggest_op("aten::lineer")
    'aten::linear'
    >>> suggest_op("aten::relu.default")
    'aten::relu'
    """
    overload_names = [overload.name for overload in overloads_of(packet_of(op))]
    if packet_of(op) in overload_names and op.endswith(".default"):  # torch's notation for the overload without a name
        return packet_of(op)
    if overload_names:
        return nearest(op, overload_names, cutoff=0)
    return nearest(op, _all_ops(), cutoff=0)


def suggest_namespace(op: str) -> str:
    """Return the namespace closest to an op's; "" if the op's namespace exists, or none is close.

    >>> suggest_namespace("Aten::mm"), suggest_namespace("aten::mm"), suggest_namespace("mylib::scan")
    ('aten', '', '')
    """
    namespace = op.partition("::")[0]
    near = _nearest_namespace(namespace)
    # Checked again: a library loaded in the meantime may have added its namespace.
    return "" if near and namespace in _namespaces() else near


@lru_cache(maxsize=4096)
def _nearest_namespace(namespace: str) -> str:
    known = _namespaces()
    if namespace in known:
        return ""
    return nearest(namespace.lower(), sorted(known), cutoff=0.85)


def _namespaces() -> set[str]:
    from fvflops.torch_internals import all_op_names

    return {name.partition("::")[0] for name in all_op_names()}.union(_OTHER_NAMESPACES)


@lru_cache(maxsize=1)
def _all_ops() -> Sequence[str]:
    from fvflops.torch_internals import all_schemas

    return sorted({schema.name for schema in all_schemas()})


def is_composite(name: str) -> bool:
    """Return whether an op is CompositeImplicitAutograd: implemented by other ops for all devices.

    >>> is_composite("aten::linear"), is_composite("aten::addmm"), is_composite("aten::no_such_op")
    (True, False, False)
    """
    from fvflops.torch_internals import has_kernel_for_key

    try:
        return bool(has_kernel_for_key(name, "CompositeImplicitAutograd"))
    except RuntimeError:  # an op that this torch lacks, or a TorchScript op without a dispatcher entry
        return False


def schemas_of(op: str) -> Mapping[str, str]:
    return {overload.name: overload.schema for overload in overloads_of(op)}
