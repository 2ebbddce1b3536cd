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
_KEY_TYPES = frozenset({int, type(None), str, torch.dtype, torch.layout, torch.memory_format, torch.device, complex})
_SEQUENCES = frozenset({list, tuple, torch.Size})
_INTEGER_TYPES = frozenset({int, bool})
_TRUE, _FALSE = object(), object()  # True == 1 as a key, but not as an argument


class _SpecKey:
    """The key of a tensor; one object for equal specs, since hashing a spec is slow."""

    __slots__ = ("spec",)

    def __init__(self, spec: TensorSpec) -> None:
        self.spec = spec


class _Uncacheable(Exception):
    """An argument for which there is no key."""


# A call before it runs: argument values, signature indices of equal calls by the keys of their results (None: not
# cacheable), and the storages it reads.
PendingCall = tuple[tuple[Value, ...], "dict[Any, int] | None", Sequence[int]]


class SignatureCache:
    """Signature indices by the keys of arguments and results.

    This code runs between kernels, which evict the processor's caches, so every access takes microseconds. Hence the
    key of a tensor is only its shape, dtype and device (sparse, nested and functorch tensors raise _Uncacheable), and
    that of a result tensor only its shape and dtype, as the arguments determine its device.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        # By shape, dtype and device name.
        self._spec_keys: dict[tuple[torch.Size, torch.dtype, str], _SpecKey] = {}
        self._values = ValueReader(have_values)
        self._cached: dict[str, dict[tuple[Any, ...], tuple[tuple[Value, ...], dict[Any, int]]]] = {}

    def before_call(self, schema: OpSchema, args: Sequence[Any], kwargs: Mapping[str, Any]) -> PendingCall:
        """Return a call's arguments, cached signature indices and storages read, before it runs."""
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
        entry = cached.get(call_key)
        if entry is None:
            entry = cached[call_key] = self._describe(schema, args, kwargs), {}
        return *entry, reads

    def _describe(self, schema: OpSchema, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Value, ...]:
        inputs = normalise(schema, args, kwargs)
        if not schema.value_arguments:
            return inputs
        return add_values(inputs, schema.value_arguments, self._values.read(schema.value_arguments, args, kwargs))

    def after_call(self, schema: OpSchema, pending: PendingCall, result: Any) -> tuple[int, Sequence[int]]:
        """Return the index of a call's signature and the storages of its results, after it ran."""
        inputs, indices, _ = pending
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
        index = None if indices is None else indices.get(key)
        if index is None:
            signature = Signature(schema.name, schema.names, inputs, describe_result(result), schema.text)
            index = self._recorder.intern(signature)
            if indices is None:
                return index, self._recorder.storages_of((result,), "op")
            indices[key] = index
        return index, writes

    def _key(self, values: Sequence[Any], storages: list[int], origin: str) -> list[Any]:
        """Return the keys of arguments or results, and append their tensors' storages to `storages`."""
        key: list[Any] = []
        recorder = self._recorder
        for value in values:
            kind = type(value)
            if kind in _TENSORS:
                try:
                    index = recorder.storage_of(value, origin)
                    tensor_key = value.shape, value.dtype, recorder.storages[index][1]
                except RuntimeError:
                    raise _Uncacheable from None
                storages.append(index)
                spec_key = self._spec_keys.get(tensor_key)
                if spec_key is None:
                    spec_key = self._spec_keys[tensor_key] = _SpecKey(describe_tensor(value))
                key.append(spec_key)
            elif kind in _KEY_TYPES:
                key.append(value)
            elif kind is bool:
                key.append(_TRUE if value else _FALSE)
            elif kind is float:
                key.append((value,) if value == value else "nan")
            elif kind in _SEQUENCES:
                # torch passes homogeneous lists, mostly int[] and bool[].
                all_integers = _INTEGER_TYPES.issuperset(map(type, value))
                key.append(tuple(value) if all_integers else tuple(self._key(value, storages, origin)))
            else:
                raise _Uncacheable
        return key


def have_values(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether tensors have values: not on the meta device."""
    return all(tensor.device.type != "meta" for tensor in tensors)
