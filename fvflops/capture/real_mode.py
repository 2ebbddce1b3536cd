"""The dispatch mode of real execution: it records every op, and decomposes composite ops not in `stops_at`.

The signature of a call is found by its arguments and results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from threading import get_ident
from typing import Any

import torch

from fvflops.capture.model.script_copy import is_module_call
from fvflops.capture.recorder.recorder import Recorder
from fvflops.capture.recorder.tensor_specs import (
    PLAIN_TENSORS,
    OpSchema,
    cached_schema,
    describe_result,
    describe_tensor,
    intern_signature,
    normalise,
    tensors_of,
)
from fvflops.capture.recorder.value_reader import ValueReader, add_values, have_values
from fvflops.capture.restore import interrupts
from fvflops.capture.restore.restore import UndoLog, writes_to_arguments
from fvflops.capture.shapes.rules.data_dependent import reads_values, tensors_read
from fvflops.capture.shapes.shape_tensor import ShapeTensor
from fvflops.capture.unseen.fake_tensors import is_torch_shape_inference
from fvflops.capture.unseen.op_kinds import COPIES, SET_STORAGE, UNINITIALISED
from fvflops.capture.unseen.unseen_work import UnseenWork
from fvflops.torch_internals import (
    DispatchModeKey,
    OpOverload,
    TorchDispatchMode,
    disable_dispatch_modes,
    get_dispatch_mode,
    is_wrapper_subclass_type,
)
from fvflops.trace import Signature, Value

# Queries by torch of a FakeTensor or a wrapper subclass, not ops of the model.
_QUERIES = frozenset({"prim::device", "prim::layout"})
_LIFT = torch.ops.aten.lift_fresh.default
_FAKE = DispatchModeKey.FAKE

_KEY_TYPES = frozenset({int, type(None), str, torch.dtype, torch.layout, torch.memory_format, torch.device, complex})
_SEQUENCES = frozenset({list, tuple, torch.Size})
_INTEGER_TYPES = frozenset({int, bool})
_TRUE, _FALSE = object(), object()  # True == 1 as a key, but not as an argument

# A call before it runs: argument values, signatures of equal calls by their results (None: not cacheable), and the
# storages it reads, as indices and as objects (None: not cacheable).
PendingCall = tuple[
    tuple[Value, ...], "dict[Any, Signature] | None", Sequence[int], "Sequence[torch.UntypedStorage] | None"
]


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


def has_wrapper_subclass(types: Sequence[type]) -> bool:
    """Return whether a wrapper subclass (DTensor, a quantized weight) has to handle a call."""
    return any(cls is not ShapeTensor and is_wrapper_subclass_type(cls) for cls in types)


class SubclassAwareMode(TorchDispatchMode):
    """A dispatch mode that defers to wrapper subclasses, and records the ops inside them."""

    supports_higher_order_operators = True
    recorder: Recorder

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would wrap the handler for torch.compile, at 1 µs per call, although recordings run eagerly.
        return False

    def defer_to_subclass(
        self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Return NotImplemented, so that torch calls the wrapper subclass; but decompose a DTensor's composite op.

        DTensor has no sharding rule for composite ops and would run their parts at the global shape.
        """
        if cached_schema(func).composite and any(cls.__name__ == "DTensor" for cls in types):
            with self:
                return func.decompose(*args, **kwargs)
        return NotImplemented


class RecordingMode(SubclassAwareMode):
    """A dispatch mode that records all op calls, and saves storages that they overwrite in an undo log, if given."""

    def __init__(self, recorder: Recorder, unseen_work: UnseenWork, undo_log: UndoLog | None = None) -> None:
        super().__init__()
        self.recorder = recorder
        self._unseen_work = unseen_work
        self._undo_log = undo_log
        self._calls = SignatureCache(recorder)
        # By id: ops whose calls are recorded without further checks.
        self._direct: dict[int, OpCalls] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if kwargs is None:
            kwargs = {}
        recorder = self.recorder
        op = self._direct.get(id(func)) or self._add_direct(func)
        if op is None or types or not recorder.ready or get_dispatch_mode(_FAKE) is not None:
            return self._dispatch(func, types, args, kwargs)
        unseen_work, calls = self._unseen_work, self._calls
        if self._undo_log is not None:
            self._undo_log.before(op.schema, args, kwargs, recorder.fresh)
        pending = calls.before_call(op, args, kwargs)
        _, _, reads, storages = pending
        if not op.is_view:
            unseen_work.before(op.schema, args, kwargs, reads, storages)
        thread = get_ident()
        unseen_work.busy.add(thread)
        try:
            result = op.call(*args, **kwargs)
        finally:
            unseen_work.busy.discard(thread)
        writes, new_storages = calls.record(op, pending, result)
        if op.is_special or storages is None or new_storages is None:
            unseen_work.after(op.schema, args, kwargs, reads, result, writes)
        elif op.writes_to_arguments:
            unseen_work.store((*reads, *writes), (*storages, *new_storages))
        elif not op.is_view:
            unseen_work.store(writes, new_storages)
        return result

    def _add_direct(self, func: Any) -> OpCalls | None:
        """Return an op whose calls are recorded without further checks, or None for another."""
        op = op_calls(func, self.recorder.stops_at.values_of(func.name()))
        is_decomposed = op.schema.composite and op.schema.name not in self.recorder.stops_at
        is_marker = op.schema.name in _QUERIES or is_module_call(op.schema.name)
        if is_decomposed or is_marker or func is _LIFT or op.reads_values:
            return None
        self._direct[id(func)] = op
        return op

    def _dispatch(self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Record a call that needs more: measured, paused, on subclasses, or of an op that is decomposed or a query."""
        recorder, unseen_work = self.recorder, self._unseen_work
        probe = recorder.probe
        entered_ns = 0 if probe is None else probe.clock()
        if types:
            # torch also dispatches by type a plain result that autograd saves, such as softmax's.
            if not PLAIN_TENSORS.issuperset(types):
                unseen_work.record_subclass()
            if has_wrapper_subclass(types):
                return self.defer_to_subclass(func, types, args, kwargs)
        if recorder.paused or not recorder.recording or is_torch_shape_inference(types):
            return func(*args, **kwargs)
        op = op_calls(func, recorder.stops_at.values_of(func.name()))
        schema = op.schema
        if recorder.scripts is not None and is_module_call(schema.name):
            return recorder.scripts(schema.name, args)
        if schema.name in _QUERIES:
            return func(*args, **kwargs)
        decomposes = schema.composite and schema.name not in recorder.stops_at
        # Sparse and nested tensors have other kernels than the composite one.
        if decomposes and all(x.layout is torch.strided and not x.is_nested for x in tensors_of((args, kwargs))):
            recorder.decompose(schema.name)
            with self:
                if probe is not None:
                    probe.overhead_ns += probe.clock() - entered_ns + probe.dispatch_ns
                return func.decompose(*args, **kwargs)
        if op.reads_values:
            recorder.python_reads.record(tensors_read(schema.name, args, kwargs))
        if self._undo_log is not None:
            self._undo_log.before(schema, args, kwargs, recorder.fresh)
        # torch.tensor(...) calls aten::lift_fresh on a constant that no op has created: no unseen work, unless it may
        # contain data exported before.
        unseen_work.is_lifting = func is _LIFT
        pending = self._calls.before_call(op, args, kwargs)
        _, _, reads, storages = pending
        unseen_work.before(schema, args, kwargs, reads, storages)
        unseen_work.is_lifting = False
        unseen_work.busy.add(get_ident())
        start = None if probe is None else probe.begin()
        if probe is not None and start is not None:
            start.ns = probe.clock()
        try:
            result = op.call(*args, **kwargs)
            ended_ns = 0 if probe is None else probe.clock()
        finally:
            unseen_work.busy.discard(get_ident())
        duration = None if probe is None or start is None else probe.end(start, ended_ns)
        measure = tuple if probe is None or start is None else partial(probe.columns, start, duration)
        writes, _ = self._calls.record(op, pending, result, measure)
        unseen_work.after(schema, args, kwargs, reads, result, writes)
        if probe is not None and start is not None:
            probe.sample()
            probe.overhead_ns += start.ns - entered_ns + probe.clock() - ended_ns + probe.dispatch_ns
        return result

    def for_thread(self) -> RecordingMode:
        return RecordingMode(self.recorder, self._unseen_work, self._undo_log)

    def has_values(self, tensors: list[Any]) -> bool:
        return have_values(tensors)

    def assume_outcome(self, op: str, what: str, *, bound: bool) -> None:
        raise RuntimeError(f"{op}: nothing can be assumed in real execution, but {what} was")

    def launch(self, schema: OpSchema, kwargs: Mapping[str, Any], call_kernel: Callable[[], Any], source: str) -> Any:
        """Record a launch of a kernel, which may write to all of its tensors, and run it."""
        if self._undo_log is not None:
            self._undo_log.before(schema, (), kwargs, self.recorder.fresh)
        inputs = normalise(schema, (), kwargs)
        outputs = tuple(map(describe_tensor, self.recorder.uninitialised(tensors_of(kwargs))))
        with interrupts.deferred(), disable_dispatch_modes():
            result = call_kernel()
        signature = Signature(schema.name, schema.names, inputs, outputs, schema.text, source)
        self.recorder.append_call(signature, self.recorder.storages_of(kwargs.values()))
        self._unseen_work.record_write(kwargs)
        return result


class _Uncacheable(Exception):
    """An argument for which there is no key."""


class SignatureCache:
    """Signatures by the keys of arguments and results.

    This code runs between kernels, which evict the processor's caches, so every access takes microseconds. Hence the
    key of a tensor is only its shape, dtype and device (sparse, nested and functorch tensors raise _Uncacheable); the
    key of a single result is only its shape and dtype, as the arguments determine its device.
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
        try:
            self._add_keys(key, args, reads, storages, "outside")
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
        storage_indices, rows = self._storage_indices, self._recorder.storages
        for value in values:
            kind = type(value)
            if kind in PLAIN_TENSORS:
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
