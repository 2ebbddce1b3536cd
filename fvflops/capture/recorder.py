"""The recorder: it takes down what runs, interns it, and makes the Trace."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fvflops.capture.signature import (
    OpSchema,
    describe_op,
    describe_result,
    describe_tensor,
    normalise,
    tensors_of,
)
from fvflops.trace import Event, ModuleTree, Region, RegionSignature, Signature, StopsAt, Storage, Trace, Value

_NO_TENSORS: tuple[Value, ...] = ()


class Recorder:
    """The growing record of one run: interned regions, stacks, signatures and storages, and the events in order.

    `fresh` maps the storages that the run itself made to their ids; what is not in it existed before.
    """

    def __init__(self, stops_at: StopsAt) -> None:
        self.stops_at = stops_at
        self.thread = threading.get_ident()
        self.recording = True
        self.stack = 0
        self.fresh: dict[int, int] = {}
        self._known: dict[int, int] = {}
        self._watches: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._storages: list[Storage] = []
        self._schemas: dict[Any, OpSchema] = {}
        self._regions: dict[Region, int] = {}
        self._stacks: dict[tuple[int, ...], int] = {(): 0}
        self._paths: list[tuple[int, ...]] = [()]
        self._signatures: dict[Signature, int] = {}
        self._region_signatures: dict[RegionSignature, int] = {}
        self._open: list[tuple[int, int, tuple[Value, ...]]] = []
        self._events: list[Event] = []
        self._calls: Counter[tuple[int, int, str]] = Counter()
        self._region_calls: Counter[tuple[int, int, str]] = Counter()
        self._decomposed: set[str] = set()
        self._active: set[int] = set()

    def schema(self, op: Any) -> OpSchema:
        """Return what is known of an op."""
        schema = self._schemas.get(op)
        if schema is None:
            schema = self._schemas[op] = describe_op(op)
        return schema

    def own_thread(self) -> bool:
        """Return whether this is the thread that is being recorded."""
        return self.recording and threading.get_ident() == self.thread

    def enter(self, kind: str, name: str, values: Any) -> int:
        """Push a region and return the token that `leave` wants back; `values` are its arguments."""
        region = self._regions.setdefault(Region(kind, name), len(self._regions))
        token = len(self._open)
        if kind == "function":
            self._active.add(self.stack)
        self._open.append((region, self.stack, _specs(values)))
        path = (*self._paths[self.stack], region)
        self._events.append(Event("enter", region, self.stack, _phase(), self._thread_number()))
        self.stack = self._stacks.setdefault(path, len(self._stacks))
        if self.stack == len(self._paths):
            self._paths.append(path)
        return token

    def leave(self, token: int, values: Any, *, raised: bool = False) -> None:
        """Pop a region, and whatever was left open inside it; `values` are its results."""
        region, outer, inputs = self._open[token]
        del self._open[token:]
        signature = RegionSignature(region, inputs, _NO_TENSORS if raised else _specs(values))
        index = self._region_signatures.setdefault(signature, len(self._region_signatures))
        self.stack = outer
        phase = _phase()
        self._region_calls[index, outer, phase] += 1
        self._events.append(Event("exit", index, outer, phase, self._thread_number(), raised=raised))

    def innermost(self) -> int:
        """Return the token of the region that was entered last."""
        return len(self._open) - 1

    def decompose(self, schema: OpSchema) -> None:
        """Note that a composite op is looked into."""
        self._decomposed.add(schema.name)
        self._active.add(self.stack)

    def call(self, schema: OpSchema, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Take down one op call, after it ran."""
        signature = Signature(
            schema.name, schema.names, normalise(schema, args, kwargs), describe_result(result), schema.text
        )
        reads = self._storages_of((*args, *kwargs.values()), "outside")
        self._add(signature, reads, self._storages_of((result,), "op"))

    def call_unseen(self, op: str) -> None:
        """Take down one call of an op that runs where no dispatch mode sees it; all that is known of it is its name."""
        self._add(Signature(op, (), (), (), f"{op}(...)"), (), ())

    def _add(self, signature: Signature, reads: tuple[int, ...], writes: tuple[int, ...]) -> None:
        index = self._signatures.setdefault(signature, len(self._signatures))
        phase = _phase()
        self._calls[index, self.stack, phase] += 1
        self._active.add(self.stack)
        self._events.append(Event("op", index, self.stack, phase, self._thread_number(), reads, writes))

    def know(self, tensor: torch.Tensor, origin: str, name: str) -> None:
        """Name the storage of a tensor that exists before the run."""
        if _has_storage(tensor):
            self._storage(tensor.untyped_storage(), origin, name)

    def trace(self, modules: ModuleTree, about: Mapping[str, str], *, complete: bool = True) -> Trace:
        """Return what was taken down, and take nothing more."""
        self.recording = False
        self._watches.clear()
        return Trace(
            modules=modules,
            regions=tuple(self._regions),
            stacks=tuple(self._stacks),
            signatures=tuple(self._signatures),
            region_signatures=tuple(self._region_signatures),
            calls=dict(self._calls),
            region_calls=dict(self._region_calls),
            events=tuple(self._events),
            storages=tuple(self._storages),
            stops_at=self.stops_at,
            decomposed=frozenset(self._decomposed),
            active=frozenset(self._active),
            about=dict(about),
            complete=complete,
        )

    def _thread_number(self) -> int:
        return 0 if threading.get_ident() == self.thread else 1

    def _storages_of(self, values: Any, origin: str) -> tuple[int, ...]:
        ids: dict[int, None] = {}
        for value in values:
            if isinstance(value, torch.Tensor):
                if _has_storage(value):
                    ids[self._storage(value.untyped_storage(), origin, "")] = None
            elif isinstance(value, (list, tuple, dict)):
                ids.update(dict.fromkeys(self._storages_of(tensors_of(value), origin)))
        return tuple(ids)

    def _storage(self, storage: torch.UntypedStorage, origin: str, name: str) -> int:
        key = storage._cdata
        index = self._known.get(key)
        if index is not None:
            return index
        index = self._known[key] = len(self._storages)
        self._storages.append(Storage(storage.nbytes(), str(storage.device), origin, name))
        if origin == "op":
            self.fresh[key] = index
        self._watches[index] = weakref.ref(storage, lambda _: self._freed(key, index))
        return index

    def _freed(self, key: int, index: int) -> None:
        if self.recording:
            del self._known[key]
            self.fresh.pop(key, None)
            self._watches.pop(index, None)
            self._events.append(Event("free", index, self.stack, _phase(), self._thread_number()))


def _has_storage(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def _specs(values: Any) -> tuple[Value, ...]:
    return tuple(describe_tensor(tensor) for tensor in tensors_of(values))


def _phase() -> str:
    return "forward" if torch._C._current_autograd_node() is None else "backward"
