"""Cache the signature index of each op call in real execution, by its arguments and results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fvflops.capture.recorder.recorder import Recorder
from fvflops.capture.recorder.signature import OpSchema, describe_result, describe_tensor, normalise
from fvflops.capture.recorder.value_reader import ValueReader, add_values
from fvflops.trace import Signature, TensorSpec, Value

_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_PLAIN = frozenset({int, type(None), str, torch.dtype, torch.layout, torch.memory_format, torch.device, complex})
_SEQUENCES = frozenset({list, tuple, torch.Size})
_WHOLE = frozenset({int, bool})
_TRUE, _FALSE = object(), object()  # True == 1 as a key, but not as an argument


class _SpecKey:
    """A tensor's part of the key; one object for equal specs, since hashing a spec is slow."""

    __slots__ = ("spec",)

    def __init__(self, spec: TensorSpec) -> None:
        self.spec = spec


class _Uncacheable(Exception):
    """A key cannot represent an argument."""


# A call before it runs: argument values, the signature indices of such calls by their results' keys (None: not
# cacheable), and the storages it reads.
NotedCall = tuple[tuple[Value, ...], "dict[Any, int] | None", Sequence[int]]


class SignatureCache:
    """Signature indices by the keys of arguments and results.

    This code runs between kernels, which evict the processor's caches, so every access takes microseconds. Hence a
    tensor's key is its shape, dtype and device only, for which sparse, nested and functorch tensors raise; and a
    result's key is only what the arguments do not determine.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        # By shape, dtype and device name.
        self._spec_keys: dict[tuple[torch.Size, torch.dtype, str], _SpecKey] = {}
        self._values = ValueReader(have_values)
        self._cached: dict[str, dict[tuple[Any, ...], tuple[tuple[Value, ...], dict[Any, int]]]] = {}

    def note(self, schema: OpSchema, args: Sequence[Any], kwargs: Mapping[str, Any]) -> NotedCall:
        """Return a call's arguments, cached signature indices and storages read; to be called before it runs."""
        reads: list[int] = []
        try:
            key = self._key(args, reads, "outside")
            for name, value in kwargs.items():
                key += name, *self._key((value,), reads, "outside")
        except _Uncacheable:
            return self._describe(schema, args, kwargs), None, self._recorder.storages_of((*args, *kwargs.values()))
        cached = self._cached.get(schema.name)
        if cached is None:
            cached = self._cached[schema.name] = {}
        if schema.value_arguments:
            key.append(self._values.read(schema.value_arguments, args, kwargs))
        call_key = tuple(key)
        found = cached.get(call_key)
        if found is None:
            found = cached[call_key] = self._describe(schema, args, kwargs), {}
        return *found, reads

    def _describe(self, schema: OpSchema, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Value, ...]:
        inputs = normalise(schema, args, kwargs)
        if not schema.value_arguments:
            return inputs
        return add_values(inputs, schema.value_arguments, self._values.read(schema.value_arguments, args, kwargs))

    def index_after(self, schema: OpSchema, noted: NotedCall, result: Any) -> tuple[int, Sequence[int]]:
        """Return the index of a call's signature and the storages of its results, after it ran."""
        inputs, indices, _ = noted
        writes: list[int] = []
        key: Any = None
        if indices is not None:
            try:
                if type(result) is torch.Tensor:
                    writes.append(self._recorder.storage_of(result, "op"))
                    key = result.shape, result.dtype
                else:
                    key = tuple(self._key((result,), writes, "op"))
            except (RuntimeError, _Uncacheable):
                indices = None
        number = None if indices is None else indices.get(key)
        if number is None:
            signature = Signature(schema.name, schema.names, inputs, describe_result(result), schema.text)
            number = self._recorder.intern(signature)
            if indices is None:
                return number, self._recorder.storages_of((result,), "op")
            indices[key] = number
        return number, writes

    def _key(self, values: Sequence[Any], storages: list[int], origin: str) -> list[Any]:
        """Return the arguments' parts of the key, collecting their tensors' storages."""
        key: list[Any] = []
        recorder = self._recorder
        for value in values:
            kind = type(value)
            if kind in _TENSORS:
                try:
                    index = recorder.storage_of(value, origin)
                    look_key = value.shape, value.dtype, recorder.storages[index][1]
                except RuntimeError:
                    raise _Uncacheable from None
                storages.append(index)
                spec_key = self._spec_keys.get(look_key)
                if spec_key is None:
                    spec_key = self._spec_keys[look_key] = _SpecKey(describe_tensor(value))
                key.append(spec_key)
            elif kind in _PLAIN:
                key.append(value)
            elif kind is bool:
                key.append(_TRUE if value else _FALSE)
            elif kind is float:
                key.append((value,) if value == value else "nan")
            elif kind in _SEQUENCES:
                # torch passes homogeneous lists, mostly int[] and bool[].
                call_key = _WHOLE.issuperset(map(type, value))
                key.append(tuple(value) if call_key else tuple(self._key(value, storages, origin)))
            else:
                raise _Uncacheable
        return key


def have_values(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether tensors have values: not on the meta device."""
    return all(tensor.device.type != "meta" for tensor in tensors)
