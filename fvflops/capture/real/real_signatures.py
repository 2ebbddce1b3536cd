"""Find the signature of each op call in real execution, by its arguments and results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from fvflops.capture.recorder.op_call_cache import OpCalls
from fvflops.capture.recorder.recorder import Recorder
from fvflops.capture.recorder.tensor_specs import OpSchema, describe_result, intern_signature, normalise
from fvflops.capture.recorder.value_reader import ValueReader, add_values, have_values
from fvflops.trace import Signature, Value

_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_KEY_TYPES = frozenset({int, type(None), str, torch.dtype, torch.layout, torch.memory_format, torch.device, complex})
_SEQUENCES = frozenset({list, tuple, torch.Size})
_INTEGER_TYPES = frozenset({int, bool})
_TRUE, _FALSE = object(), object()  # True == 1 as a key, but not as an argument

# A call before it runs: argument values, signatures of equal calls by their results (None: not cacheable), and the
# storages it reads, as indices and as objects (None: not cacheable).
PendingCall = tuple[
    tuple[Value, ...], "dict[Any, Signature] | None", Sequence[int], "Sequence[torch.UntypedStorage] | None"
]


class _Uncacheable(Exception):
    """An argument for which there is no key."""


class SignatureCache:
    """Signatures by the keys of arguments and results.

    This code runs between kernels, which evict the processor's caches, so every access takes microseconds. Hence the
    key of a tensor is only its shape, dtype and device (sparse, nested and functorch tensors raise _Uncacheable), and
    that of a single result only its shape and dtype, as the arguments determine its device.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._storage_indices = recorder.storage_indices
        self._values = ValueReader(have_values)

    def before_call(self, op: OpCalls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> PendingCall:
        """Return a call before it runs."""
        reads: list[int] = []
        storages: list[torch.UntypedStorage] = []
        key: list[Any] = []
        storage_indices, rows = self._storage_indices, self._recorder.storages
        try:
            # As in _add_keys, without a call for each tensor.
            for value in args:
                if type(value) in _TENSORS:
                    storage = value.untyped_storage()
                    index = storage_indices.get(id(storage))
                    if index is None:
                        index = self._recorder.storage_of(value, "outside")
                    reads.append(index)
                    storages.append(storage)
                    key += value.shape, value.dtype, rows[index][1]
                elif type(value) is int or value is None:
                    key.append(value)
                else:
                    self._add_keys(key, (value,), reads, storages, "outside")
            if kwargs:
                key += kwargs
                self._add_keys(key, kwargs.values(), reads, storages, "outside")
        except (_Uncacheable, RuntimeError):
            reads = list(self._recorder.storages_of((*args, *kwargs.values())))
            return self._describe(op.schema, args, kwargs), None, reads, None
        if op.schema.value_arguments:
            key.append(self._values.read(op.schema.value_arguments, args, kwargs))
        call_key = tuple(key)
        entry = op.calls.get(call_key)
        if entry is None:
            entry = op.calls[call_key] = self._describe(op.schema, args, kwargs), {}
        return entry[0], entry[1], reads, storages

    def _describe(self, schema: OpSchema, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Value, ...]:
        inputs = normalise(schema, args, kwargs)
        if not schema.value_arguments:
            return inputs
        return add_values(inputs, schema.value_arguments, self._values.read(schema.value_arguments, args, kwargs))

    def record(
        self, op: OpCalls, pending: PendingCall, result: Any, measure: Callable[[], tuple[Any, ...]] = tuple
    ) -> tuple[Sequence[int], Sequence[torch.UntypedStorage] | None]:
        """Record a call after it ran; return the storages of its results, as indices and as objects.

        `measure` returns the event's columns from `start_ns` on, once the results' memory is known.
        """
        recorder = self._recorder
        inputs, signatures, reads, _ = pending
        try:
            if signatures is None:
                raise _Uncacheable
            key: Any
            writes: Sequence[int]
            if type(result) is torch.Tensor:
                storage = result.untyped_storage()
                index = self._storage_indices.get(id(storage))
                writes = (recorder.add_storage(storage, "op") if index is None else index,)
                storages, key = [storage], (result.shape, result.dtype)
            else:
                keys: list[Any] = []
                indices: list[int] = []
                storages = []
                self._add_keys(keys, (result,), indices, storages, "op")
                writes, key = indices, tuple(keys)
        except (_Uncacheable, RuntimeError):
            writes = recorder.storages_of((result,), "op")
            recorder.add(recorder.intern(_signature(op.schema, inputs, result)), reads, writes, measure())
            return writes, None
        signature = signatures.get(key)
        if signature is None:
            signature = signatures[key] = intern_signature(_signature(op.schema, inputs, result))
        recorder.add(recorder.index_of(signature), reads, writes, measure())
        return writes, storages

    def _add_keys(
        self,
        key: list[Any],
        values: Iterable[Any],
        indices: list[int],
        storages: list[torch.UntypedStorage],
        origin: str,
    ) -> None:
        """Append the keys of arguments or results, and the storages of their tensors."""
        storage_indices, rows = self._storage_indices, self._recorder.storages
        for value in values:
            kind = type(value)
            if kind in _TENSORS:
                storage = value.untyped_storage()  # raises RuntimeError for sparse and functorch tensors
                index = storage_indices.get(id(storage))
                if index is None:
                    index = self._recorder.storage_of(value, origin)
                indices.append(index)
                storages.append(storage)
                key += value.shape, value.dtype, rows[index][1]
            elif kind in _KEY_TYPES:
                key.append(value)
            elif kind is bool:
                key.append(_TRUE if value else _FALSE)
            elif kind is float:
                key.append((value,) if value == value else "nan")
            elif kind in _SEQUENCES:
                if _INTEGER_TYPES.issuperset(map(type, value)):
                    key.append(tuple(value))  # torch passes homogeneous lists, mostly int[] and bool[]
                else:
                    key.append(len(value))
                    self._add_keys(key, value, indices, storages, origin)
            else:
                raise _Uncacheable


def _signature(schema: OpSchema, inputs: tuple[Value, ...], result: Any) -> Signature:
    return Signature(schema.name, schema.names, inputs, describe_result(result), schema.text)
