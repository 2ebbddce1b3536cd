"""The calls of a real run: the number of each one's signature, found without making the signature a second time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fvflops.capture.recorder import Recorder
from fvflops.capture.signature import OpSchema, describe_result, describe_tensor, normalise
from fvflops.trace import Signature, TensorSpec, Value

_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_PLAIN = frozenset({int, type(None), str, torch.dtype, torch.layout, torch.memory_format, torch.device, complex})
_SEQUENCES = frozenset({list, tuple, torch.Size})
_TRUE, _FALSE = object(), object()  # True and 1 are equal as keys, and not to an op

_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


class _Look:
    """What a tensor looks like; one object for all that look alike, since to hash a spec takes long."""

    __slots__ = ("spec",)

    def __init__(self, spec: TensorSpec) -> None:
        self.spec = spec


class _Unusual(Exception):
    """An argument whose looks are not told by a key."""


class Noted:
    """One call before it is made: what is known of calls with the same arguments, and the storages that it reads."""

    __slots__ = ("inputs", "numbers", "reads")

    def __init__(self, inputs: tuple[Value, ...], numbers: dict[Any, int] | None, reads: Sequence[int]) -> None:
        self.inputs = inputs
        self.numbers = numbers
        self.reads = reads


class RealCalls:
    """The calls that were met in a run, by their arguments' looks and then by their results'."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._looks: dict[tuple[torch.Size, torch.dtype, torch.device], _Look] = {}
        self._met: dict[str, dict[tuple[Any, ...], tuple[tuple[Value, ...], dict[Any, int]]]] = {}

    def note(self, schema: OpSchema, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Noted:
        """Return what is to be known of a call before it is made, which may change its arguments."""
        reads: list[int] = []
        try:
            key = self._key(args, reads, "outside")
            for name, value in kwargs.items():
                key += name, *self._key((value,), reads, "outside")
        except _Unusual:
            tensors = self._recorder.storages_of((*args, *kwargs.values()))
            return Noted(normalise(schema, args, kwargs), None, tensors)
        met = self._met.get(schema.name)
        if met is None:
            met = self._met[schema.name] = {}
        whole = tuple(key)
        found = met.get(whole)
        if found is None:
            found = met[whole] = normalise(schema, args, kwargs), {}
        return Noted(*found, reads)

    def look(self, schema: OpSchema, noted: Noted, result: Any) -> tuple[int, Sequence[int]]:
        """Return the number of a call's signature, after it was made, and the storages of its results."""
        writes: list[int] = []
        numbers = noted.numbers
        if numbers is not None:
            try:
                key = tuple(self._key((result,), writes, "op"))
            except _Unusual:
                numbers = None
        number = None if numbers is None else numbers.get(key)
        if number is None:
            signature = Signature(schema.name, schema.names, noted.inputs, describe_result(result), schema.text)
            number = self._recorder.number_of(signature)
            if numbers is None:
                writes = list(self._recorder.storages_of((result,), "op"))
            else:
                numbers[key] = number
        return number, writes

    def _key(self, values: Sequence[Any], storages: list[int], origin: str) -> list[Any]:
        """Return what stands for arguments in a call's key, and note the storages of the tensors among them."""
        key: list[Any] = []
        for value in values:
            kind = type(value)
            if kind in _TENSORS:
                if value.layout is not torch.strided or value.is_nested or _is_wrapped(value):
                    raise _Unusual
                place = value.shape, value.dtype, value.device
                look = self._looks.get(place)
                if look is None:
                    look = self._looks[place] = _Look(describe_tensor(value))
                key.append(look)
                storages.append(self._recorder.storage_of(value, origin))
            elif kind in _PLAIN:
                key.append(value)
            elif kind is bool:
                key.append(_TRUE if value else _FALSE)
            elif kind is float:
                key.append((value,) if value == value else "nan")
            elif kind in _SEQUENCES:
                key.append(tuple(self._key(value, storages, origin)))
            else:
                raise _Unusual
        return key
