"""The process-wide cache of op calls in real execution, so that a recording need not describe them again."""

from __future__ import annotations

from typing import Any

from fvflops.capture.recorder.tensor_specs import OpSchema, cached_schema
from fvflops.capture.restore.restore import writes_to_arguments
from fvflops.capture.shapes.rules.data_dependent import reads_values
from fvflops.capture.unseen.op_kinds import COPIES, SET_STORAGE, UNINITIALISED
from fvflops.torch_internals import OpOverload
from fvflops.trace import Signature, Value

# Keys of arguments → their values for a signature, and the signatures of the calls by the keys of the results.
CachedCalls = dict[tuple[Any, ...], tuple[tuple[Value, ...], dict[Any, Signature]]]


class OpCalls:
    """An op: its schema, the function to call and its earlier calls.

    `reads_values`: its result, or the size of it, depends on values. `writes_to_arguments`: it may. `is_special`: its
    results have more to record than their contents. `func` is kept alive, as its id is a key.
    """

    __slots__ = ("call", "calls", "func", "is_special", "is_view", "reads_values", "schema", "writes_to_arguments")

    def __init__(self, func: Any, values: tuple[str, ...]) -> None:
        self.func = func
        self.schema: OpSchema = cached_schema(func, values)
        # For most ops torch's C++ function, without a Python frame.
        self.call = func._op if type(func) is OpOverload else func
        self.calls: CachedCalls = {}
        self.is_view = self.schema.is_view
        self.reads_values = reads_values(self.schema.name)
        name = self.schema.name
        self.is_special = name in UNINITIALISED or name in COPIES or name.startswith(SET_STORAGE)
        self.writes_to_arguments = writes_to_arguments(self.schema)


# By id, since the hash of an op is slow (Python), and the arguments whose values are recorded.
_OPS: dict[tuple[int, tuple[str, ...]], OpCalls] = {}


def op_calls(func: Any, values: tuple[str, ...]) -> OpCalls:
    """Return the cached calls of an op; none if it names a process group, since names are reused for other groups."""
    op = _OPS.get((id(func), values))
    if op is None:
        op = OpCalls(func, values)
        if op.schema.group is None:
            _OPS[id(func), values] = op
    return op


def clear_calls() -> None:
    _OPS.clear()
