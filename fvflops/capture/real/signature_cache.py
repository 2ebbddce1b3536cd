"""The calls of a real run: the number of each one's signature, found without making the signature a second time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fvflops.capture.recorder.recorder import Recorder
from fvflops.capture.recorder.signature import OpSchema, describe_result, describe_tensor, normalise
from fvflops.capture.recorder.value_reader import ValueReader, state_values
from fvflops.trace import Signature, TensorSpec, Value

_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_PLAIN = frozenset({int, type(None), str, torch.dtype, torch.layout, torch.memory_format, torch.device, complex})
_SEQUENCES = frozenset({list, tuple, torch.Size})
_WHOLE = frozenset({int, bool})
_TRUE, _FALSE = object(), object()  # True and 1 are equal as keys, and not to an op


class _SpecKey:
    """What a tensor looks like; one object for all that look alike, since to hash a spec takes long."""

    __slots__ = ("spec",)

    def __init__(self, spec: TensorSpec) -> None:
        self.spec = spec


class _Uncacheable(Exception):
    """An argument whose looks are not told by a key."""


# What is known of a call before it is made: the values of its arguments, the numbers of the signatures that calls with
# such arguments had, by their results' looks (None: the looks tell too little), and the storages that it reads.
Noted = tuple[tuple[Value, ...], "dict[Any, int] | None", Sequence[int]]


class SignatureCache:
    """The calls that were met in a run, by their arguments' looks and then by their results'.

    All of it runs between two kernels, which leave nothing in the processor's caches: each thing that is looked at
    costs microseconds. So a tensor is asked for its shape, dtype and storage only, which a sparse or a nested one, or
    one of torch.func's, refuses to tell; and a result for what the arguments do not decide.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        # By shape, dtype and the device's name.
        self._looks: dict[tuple[torch.Size, torch.dtype, str], _SpecKey] = {}
        self._values = ValueReader(have_values)
        self._met: dict[str, dict[tuple[Any, ...], tuple[tuple[Value, ...], dict[Any, int]]]] = {}

    def note(self, schema: OpSchema, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Noted:
        """Return what is to be known of a call before it is made, which may change its arguments."""
        reads: list[int] = []
        try:
            key = self._key(args, reads, "outside")
            for name, value in kwargs.items():
                key += name, *self._key((value,), reads, "outside")
        except _Uncacheable:
            return self._describe(schema, args, kwargs), None, self._recorder.storages_of((*args, *kwargs.values()))
        met = self._met.get(schema.name)
        if met is None:
            met = self._met[schema.name] = {}
        if schema.valued:
            key.append(self._values.read(schema.valued, args, kwargs))
        whole = tuple(key)
        found = met.get(whole)
        if found is None:
            found = met[whole] = self._describe(schema, args, kwargs), {}
        return *found, reads

    def _describe(self, schema: OpSchema, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Value, ...]:
        inputs = normalise(schema, args, kwargs)
        if not schema.valued:
            return inputs
        return state_values(inputs, schema.valued, self._values.read(schema.valued, args, kwargs))

    def spec_key(self, schema: OpSchema, noted: Noted, result: Any) -> tuple[int, Sequence[int]]:
        """Return the number of a call's signature, after it was made, and the storages of its results."""
        inputs, numbers, _ = noted
        writes: list[int] = []
        key: Any = None
        if numbers is not None:
            try:
                if type(result) is torch.Tensor:
                    writes.append(self._recorder.storage_of(result, "op"))
                    key = result.shape, result.dtype
                else:
                    key = tuple(self._key((result,), writes, "op"))
            except (RuntimeError, _Uncacheable):
                numbers = None
        number = None if numbers is None else numbers.get(key)
        if number is None:
            signature = Signature(schema.name, schema.names, inputs, describe_result(result), schema.text)
            number = self._recorder.number_of(signature)
            if numbers is None:
                return number, self._recorder.storages_of((result,), "op")
            numbers[key] = number
        return number, writes

    def _key(self, values: Sequence[Any], storages: list[int], origin: str) -> list[Any]:
        """Return what stands for arguments in a call's key, and note the storages of the tensors among them."""
        key: list[Any] = []
        recorder = self._recorder
        for value in values:
            kind = type(value)
            if kind in _TENSORS:
                try:
                    index = recorder.storage_of(value, origin)
                    place = value.shape, value.dtype, recorder.storages[index][1]
                except RuntimeError:
                    raise _Uncacheable from None
                storages.append(index)
                look = self._looks.get(place)
                if look is None:
                    look = self._looks[place] = _SpecKey(describe_tensor(value))
                key.append(look)
            elif kind in _PLAIN:
                key.append(value)
            elif kind is bool:
                key.append(_TRUE if value else _FALSE)
            elif kind is float:
                key.append((value,) if value == value else "nan")
            elif kind in _SEQUENCES:
                # torch gives lists of one type only, int[] and bool[] most.
                whole = _WHOLE.issuperset(map(type, value))
                key.append(tuple(value) if whole else tuple(self._key(value, storages, origin)))
            else:
                raise _Uncacheable
        return key


def have_values(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether tensors hold their numbers: those on the meta device do not."""
    return all(tensor.device.type != "meta" for tensor in tensors)
