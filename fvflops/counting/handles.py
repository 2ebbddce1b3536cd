"""Cost model of handles: Python functions that a program set for ops and modules, asked before a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

from fvflops.counting.count import CostModel, RegionCost
from fvflops.formulas import Call, OpCost
from fvflops.formulas.rows import default_label
from fvflops.formulas.table import attributes_of, find_class
from fvflops.trace import ModuleInfo, Region, RegionSignature, Signature, Status, StopsAt

Handle = Callable[[Call], "int | Counter[str]"]

_FUNCTION = "prim::PythonOp."


class HandleCostModel:
    """Asks a handle where one is set for the op, and `inner` elsewhere; a handle that is None makes the op free.

    A name without an overload stands for all overloads; `aten::_convolution`, the name that traced graphs have, stands
    for `aten::convolution`. `modules` holds the handles of module classes by their names, as in a table.
    """

    def __init__(
        self, inner: CostModel, handles: Mapping[str, Handle | None], modules: Mapping[str, Handle | None] | None = None
    ) -> None:
        self._inner = inner
        self._handles = dict(handles)
        self._modules = dict(modules or {})

    @property
    def stops_at(self) -> StopsAt:
        """The composite ops that a handle or the inner cost model has something to say about."""
        return self._inner.stops_at.including(self._handles)

    @property
    def counts_modules(self) -> bool:
        """Whether a handle or the inner cost model has something to say about a module."""
        return bool(self._modules) or self._inner.counts_modules

    def op_cost(self, signature: Signature) -> tuple[OpCost, ...]:
        """Return what the handle says of one call, or what the inner cost model says."""
        for name in (signature.op, signature.packet, _traced_name(signature.packet)):
            if name in self._handles:
                return _cost(self._handles[name], name, Call.of(signature))
        return self._inner.op_cost(signature)

    def region_cost(self, region: Region, module: ModuleInfo | None, signature: RegionSignature) -> RegionCost | None:
        """Return what the handle says of one call of a module or a function, or what the inner cost model says."""
        if module is not None:
            name = find_class(self._modules, module.classes)
            if name is not None:
                call = Call.of_region(name, signature.inputs, signature.outputs, attributes_of(module))
                return RegionCost(_cost(self._modules[name], name, call))
        elif (name := _FUNCTION + region.name) in self._handles:
            call = Call.of_region(name, signature.inputs, signature.outputs)
            return RegionCost(_cost(self._handles[name], name, call))
        return self._inner.region_cost(region, module, signature)


def _traced_name(packet: str) -> str:
    return "aten::_convolution" if packet == "aten::convolution" else packet


def _cost(handle: Handle | None, name: str, call: Call) -> tuple[OpCost, ...]:
    label = name.partition("::")[2] or default_label(name)
    if handle is None:
        return (OpCost(label, Status.FREE),)
    result = handle(call)
    sums = result if isinstance(result, Mapping) else {label: result}
    return tuple(OpCost(key, Status.COUNTED, _number(value, name)) for key, value in sums.items()) or (
        OpCost(label, Status.COUNTED),
    )


def _number(value: Any, name: str) -> int:
    """Return a handle's number; one that can overflow, or is none, raises ValueError."""
    narrow = getattr(getattr(value, "dtype", None), "itemsize", 8) < 8
    if not isinstance(value, Real) or narrow:
        raise ValueError(
            f"the handle of {name} returned {value!r} of type {type(value).__name__}: "
            "return a Python int, or a Counter of them"
        )
    return value  # type: ignore[return-value]
