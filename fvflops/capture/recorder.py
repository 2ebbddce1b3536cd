"""The recorder: it takes down what runs, interns it, and makes the Trace."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fvflops.capture.signature import describe_result, describe_tensor, known_schema, normalise, tensors_of
from fvflops.trace import Event, ModuleTree, Region, RegionSignature, Signature, StopsAt, Storage, Trace, Value
from fvflops.trace.rows import Rows

_NO_TENSORS: tuple[Value, ...] = ()


class Recorder:
    """The growing record of one run: interned regions, stacks, signatures and storages, and the events in order.

    `fresh` maps the storages that the run itself made to their ids; what is not in it existed before. `stack` is the
    stack that is open now. `backward` says that ops can run inside a backward pass.
    """

    def __init__(self, stops_at: StopsAt, *, backward: bool = True) -> None:
        self.stops_at = stops_at
        self.thread = threading.get_ident()
        self.recording = True
        self.stack = 0
        self.fresh: dict[int, int] = {}
        self._backward = backward
        self._known: dict[int, int] = {}
        self._watches: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._storages: list[tuple[Any, ...]] = []
        self._regions: dict[Region, int] = {}
        self._inner: dict[tuple[int, int], int] = {}
        self._paths: list[tuple[int, ...]] = [()]
        self._signatures: dict[Signature, int] = {}
        self._numbers: dict[int, int] = {}
        self._region_numbers: dict[tuple[Any, ...], int] = {}
        self._region_signatures: list[RegionSignature] = []
        self._open: list[tuple[int, int, tuple[Value, ...]]] = []
        self._events: list[tuple[Any, ...]] = []
        self._decomposed: set[str] = set()
        self._active: set[int] = set()
        self._raised: tuple[BaseException | None, int] = (None, 0)

    def own_thread(self) -> bool:
        """Return whether this is the thread that is being recorded."""
        return self.recording and threading.get_ident() == self.thread

    def region(self, kind: str, name: str) -> int:
        """Return the number of a region."""
        return self._regions.setdefault(Region(kind, name), len(self._regions))

    def enter(self, region: int, values: Any) -> int:
        """Push a region and return the token that `leave` wants back; `values` are its arguments."""
        stack = self.stack
        token = len(self._open)
        self._open.append((region, stack, specs_of(values)))
        self._events.append(("enter", region, stack, self._phase(), self._thread_number()))
        inner = self._inner.get((stack, region))
        if inner is None:
            inner = self._inner[stack, region] = len(self._paths)
            self._paths.append((*self._paths[stack], region))
        self.stack = inner
        return token

    def leave(self, token: int, values: Any, error: BaseException | None = None, kwargs: Any = None) -> None:
        """Pop a region, and whatever was left open inside it; `values` are its results, `error` what it raised.

        `kwargs` are those of its arguments that `enter` was not told.
        """
        region, outer, inputs = self._open[token]
        if kwargs:
            inputs += specs_of(kwargs)
        del self._open[token:]
        if error is not None and error is not self._raised[0]:
            self._raised = error, self.stack
        outputs = _NO_TENSORS if error is not None else specs_of(values)
        # Specs of equal tensors are one object, which the first signature with it keeps alive.
        key = (region, *map(id, inputs), None, *map(id, outputs))
        number = self._region_numbers.get(key)
        if number is None:
            number = self._region_numbers[key] = len(self._region_signatures)
            self._region_signatures.append(RegionSignature(region, inputs, outputs))
        self.stack = outer
        self._events.append(
            ("exit", number, outer, self._phase(), self._thread_number(), (), (), error is not None)
        )

    def innermost(self) -> int:
        """Return the token of the region that was entered last."""
        return len(self._open) - 1

    def where(self, error: BaseException | None = None) -> str:
        """Return the name of the module that an error came from, or that runs now."""
        stack = self._raised[1] if error is not None and error is self._raised[0] else self.stack
        regions = list(self._regions)
        names = [regions[region].name for region in self._paths[stack] if regions[region].kind == "module"]
        return names[-1] if names else ""

    def activate(self) -> None:
        """Note that something ran under the present stack that is no op."""
        self._active.add(self.stack)

    def decompose(self, name: str) -> None:
        """Note that a composite op is looked into."""
        self._decomposed.add(name)
        self._active.add(self.stack)

    def call(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Take down one op call, after it ran."""
        schema = known_schema(op)
        signature = Signature(
            schema.name, schema.names, normalise(schema, args, kwargs), describe_result(result), schema.text
        )
        reads = self._storages_of((*args, *kwargs.values()), "outside")
        self.add(self._intern(signature), reads, self._storages_of((result,), "op"))

    def call_unseen(self, op: str) -> None:
        """Take down one call of an op that runs where no dispatch mode sees it; all that is known of it is its name."""
        self.add(self._intern(Signature(op, (), (), (), f"{op}(...)")), (), ())

    def add(self, number: int, reads: tuple[int, ...], writes: tuple[int, ...]) -> None:
        """Take down one call of the signature with a number, and the storages that it reads and makes."""
        self._events.append(("op", number, self.stack, self._phase(), self._thread_number(), reads, writes))

    def number(self, signature: Signature) -> int:
        """Return the number of a signature that is kept alive elsewhere."""
        number = self._numbers.get(id(signature))
        if number is None:
            number = self._numbers[id(signature)] = self._intern(signature)
        return number

    def _intern(self, signature: Signature) -> int:
        return self._signatures.setdefault(signature, len(self._signatures))

    def know(self, tensor: torch.Tensor, origin: str, name: str) -> None:
        """Name the storage of a tensor that exists before the run, and throughout it."""
        if _has_storage(tensor):
            self._storage(tensor.untyped_storage(), origin, name, watch=False)

    def storage_of(self, tensor: torch.Tensor, origin: str) -> int:
        """Return the number of a tensor's storage; it is taken down as coming from `origin` if it is new."""
        return self._storage(tensor.untyped_storage(), origin, "")

    def new_storage(self, nbytes: int, device: str) -> int:
        """Return the number of a new storage, which an op made; `freed` says when it is gone."""
        self._storages.append((nbytes, device, "op"))
        return len(self._storages) - 1

    def freed(self, index: int) -> None:
        """Take down that nothing refers to a storage any more."""
        if self.recording:
            self._events.append(("free", index, self.stack, self._phase(), self._thread_number()))

    def trace(self, modules: ModuleTree, about: Mapping[str, str], *, complete: bool = True) -> Trace:
        """Return what was taken down, and take nothing more."""
        self.recording = False
        self._watches.clear()
        calls: Counter[tuple[int, int, str]] = Counter()
        region_calls: Counter[tuple[int, int, str]] = Counter()
        calls.update([event[1:4] for event in self._events if event[0] == "op"])
        region_calls.update([event[1:4] for event in self._events if event[0] == "exit"])
        self._active.update([stack for _, stack, _ in calls])
        return Trace(
            modules=modules,
            regions=tuple(self._regions),
            stacks=tuple(self._paths),
            signatures=tuple(self._signatures),
            region_signatures=tuple(self._region_signatures),
            calls=dict(calls),
            region_calls=dict(region_calls),
            events=Rows(Event, self._events),
            storages=Rows(Storage, self._storages),
            stops_at=self.stops_at,
            decomposed=frozenset(self._decomposed),
            active=frozenset(self._active),
            about=dict(about),
            complete=complete,
        )

    def _phase(self) -> str:
        return "backward" if self._backward and torch._C._current_autograd_node() is not None else "forward"

    def _thread_number(self) -> int:
        return 0 if threading.get_ident() == self.thread else 1

    def _storages_of(self, values: Any, origin: str) -> tuple[int, ...]:
        ids: dict[int, None] = {}
        for value in values:
            if isinstance(value, torch.Tensor):
                if _has_storage(value):
                    ids[self.storage_of(value, origin)] = None
            elif isinstance(value, (list, tuple, dict)):
                ids.update(dict.fromkeys(self._storages_of(tensors_of(value), origin)))
        return tuple(ids)

    def _storage(self, storage: torch.UntypedStorage, origin: str, name: str, *, watch: bool = True) -> int:
        key = storage._cdata
        index = self._known.get(key)
        if index is not None:
            return index
        index = self._known[key] = len(self._storages)
        self._storages.append((storage.nbytes(), str(storage.device), origin, name))
        if origin == "op":
            self.fresh[key] = index
        if watch:
            self._watches[index] = weakref.ref(storage, lambda _: self._gone(key, index))
        return index

    def _gone(self, key: int, index: int) -> None:
        if self.recording:
            del self._known[key]
            self.fresh.pop(key, None)
            self._watches.pop(index, None)
            self.freed(index)


def _has_storage(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def specs_of(values: Any) -> tuple[Value, ...]:
    """Return the specs of the tensors in nested values, in order."""
    return tuple([describe_tensor(tensor) for tensor in tensors_of(values)])
