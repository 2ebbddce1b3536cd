"""The process-wide cache of op calls in real execution, so that a recording need not describe them again."""

from __future__ import annotations

from typing import Any

from fvflops.capture.recorder.signature import OpSchema, cached_schema
from fvflops.torch_internals import OpOverload
from fvflops.trace import Signature, Value

# Keys of arguments → their values for a signature, and the signatures of the calls by the keys of the results.
CachedCalls = dict[tuple[Any, ...], tuple[tuple[Value, ...], dict[Any, Signature]]]


class OpCalls:
    """An op: its schema, the function to call and its earlier calls; `func` is kept alive, as its id is a key."""

    __slots__ = ("call", "calls", "func", "schema")

    def __init__(self, func: Any) -> None:
        self.func = func
        self.schema: OpSchema = cached_schema(func)
        # For most ops torch's C++ function, without a Python frame.
        self.call = func._op if type(func) is OpOverload else func
        self.calls: CachedCalls = {}


_OPS: dict[int, OpCalls] = {}  # by id: the hash of an op is slow (Python)


def op_calls(func: Any) -> OpCalls:
    """Return the cached calls of an op; none if it names a process group, since names are reused for other groups."""
    op = _OPS.get(id(func))
    if op is None:
        op = OpCalls(func)
        if op.schema.group is None:
            _OPS[id(func)] = op
    return op


def clear_calls() -> None:
    """Clear the cache."""
    _OPS.clear()
