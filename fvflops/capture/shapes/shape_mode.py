"""The dispatch mode of shape execution, which returns shape tensors by cached outcomes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from threading import get_ident
from typing import Any

import torch

from fvflops.capture.lazy_values.lazy_expressions import Expression
from fvflops.capture.lazy_values.lazy_ops import COUNTS, base_name, is_dense
from fvflops.capture.lazy_values.run_values import LazyMemory, LazyValue, LazyValues
from fvflops.capture.real.real_mode import SubclassAwareMode, has_wrapper_subclass
from fvflops.capture.recorder.recorder import Recorder
from fvflops.capture.recorder.script_calls import is_module_call
from fvflops.capture.recorder.tensor_specs import (
    OpSchema,
    describe,
    describe_group,
    describe_tensor,
    normalise,
    tensors_of,
)
from fvflops.capture.recorder.thread_state import append_row
from fvflops.capture.recorder.value_reader import ValueReader, have_values
from fvflops.capture.restore.restore import UndoLog, written_arguments
from fvflops.capture.shapes.collectives import completed_work, is_work
from fvflops.capture.shapes.concrete_tensors import ConcreteTensors, without_values
from fvflops.capture.shapes.graph_tracing import graph_tracer, make_constants, tracer_stashed
from fvflops.capture.shapes.meta_run import substitute, unpack_result
from fvflops.capture.shapes.metadata import Metadata, as_lazy, is_available
from fvflops.capture.shapes.rules.data_dependent import tensors_read
from fvflops.capture.shapes.rules.shape_rules import ShapeRules
from fvflops.capture.shapes.shape_cache import (
    CachedResult,
    OpCache,
    Output,
    context_of,
    is_autocast,
    op_cache,
    settings_of,
)
from fvflops.capture.shapes.shape_inference import OpInference
from fvflops.capture.shapes.shape_tensor import (
    DataDependentError,
    OwnedStorage,
    ShapeTensor,
    StorageRef,
    make_shape_tensor,
    own_index,
)
from fvflops.capture.unseen.fake_tensors import is_torch_shape_inference
from fvflops.torch_internals import (
    DispatchKey,
    disable_dispatch_modes,
    disable_torch_dispatch,
    disable_torch_function,
    has_computed_kernel_for_key,
)
from fvflops.trace import Signature

# Number of elements up to which a real buffer that the run updates, such as a batch counter, is computed.
_MAX_COUNTER_NUMEL = 1 << 10

_LIFT = "aten::lift_fresh"
_PLAIN_TYPES = frozenset({int, type(None), str, torch.dtype, torch.layout, torch.memory_format, complex})
_REAL_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
_TRUE, _FALSE = object(), object()  # True == 1 as a key, but not as an argument

_SHAPE_TENSOR_ONLY = (ShapeTensor,)

# An op's outcomes, its cache, the handler of a cache miss, and the op (since its id, the plan's key, may be reused).
_Plan = tuple[dict[tuple[Any, ...], CachedResult], OpCache, Callable[..., Any] | None, Any]


class ShapeMode(SubclassAwareMode):
    """A dispatch mode that infers shapes instead of computing values, and records every op call.

    Floating-point parameters, buffers and inputs, and results that depend on them, have unknown values; results of
    constants and small integer and bool tensors are computed. Every tensor reports `device`; `devices` are the actual
    devices of the model and its inputs. `nested`: this run is inside another one with shape execution.
    """

    def __init__(
        self,
        recorder: Recorder,
        undo_log: UndoLog,
        device: torch.device,
        devices: Sequence[torch.device],
        rules: ShapeRules,
        *,
        nested: bool = False,
    ) -> None:
        super().__init__()
        self.device = device
        # Returns a context in which torch's functions accept the device, where this machine lacks it.
        self.emulate_device: Callable[[], AbstractContextManager[Any]] | None = None
        self.concrete = ConcreteTensors(recorder, device, devices)
        self._rules = rules
        self.settings = settings_of(device)
        self._lazy_values = LazyValues()
        self._inference = OpInference(device, self.settings, rules, self.concrete)
        self.recorder = recorder
        recorder.python_reads.is_real = False
        recorder.describe = self.concrete.spec_of
        recorder.values = self._inference.values
        recorder.index_of_ref = self.storage_index
        self._undo_log = undo_log
        self._plans: dict[int, _Plan] = {}
        self._indices: dict[CachedResult, int] = {}
        # The op calls inside the composite op that is being decomposed, with the storages they read and write.
        self._inner_calls: list[tuple[CachedResult, Sequence[int], Sequence[int]]] | None = None
        self.nested = nested
        # Of the last call: its outcome, and its op, or the composite op that always decomposes into it.
        self.last_outcome: CachedResult | None = None
        self.last_op: OpCache | None = None
        self._adopted: dict[int, tuple[torch.Tensor, ShapeTensor]] = {}
        # By id: storages of other runs that still record, such as another thread's, and their indices in this one.
        self._shared: dict[int, tuple[StorageRef, int]] = {}

    def close(self) -> None:
        """Break the reference cycle with the recorder, which would keep the model's tensors alive."""
        self.recorder.describe = describe_tensor
        self.recorder.values = ValueReader(have_values)
        self.recorder.index_of_ref = own_index

    def for_thread(self) -> ShapeMode:
        """Return an equal mode for another thread of the run."""
        mode = ShapeMode(
            *(self.recorder, self._undo_log, self.device, (), self._rules),
            nested=self.nested,
        )
        mode.concrete, mode._lazy_values, mode._inference, mode._plans, mode._indices, mode._shared = (
            self.concrete,
            self._lazy_values,
            self._inference,
            self._plans,
            self._indices,
            self._shared,
        )
        mode.emulate_device = self.emulate_device
        self.recorder.describe, self.recorder.values = self.concrete.spec_of, self._inference.values
        return mode

    def storage_index(self, ref: StorageRef) -> int:
        """Return a storage's index in the run; one of another run is registered as existing before this one.

        Programs carry tensors from one recorded step to the next: generated text, caches, states.
        """
        other = ref.mode.recorder
        if other is self.recorder:
            return ref.index
        if not other.recording:
            # A view of a parameter, which the model has replaced again in this run, is one of the same storage.
            key = next((key for key, index in other.storage_indices.items() if index == ref.index), None)
            ref.move_to(self, None if key is None else self.recorder.storage_indices.get(key))
            return ref.index
        if id(ref) not in self._shared:
            nbytes, device, *_ = other.storages[ref.index]
            self._shared[id(ref)] = ref, append_row(self.recorder.storages, (nbytes, device, "outside"))
        return self._shared[id(ref)][1]

    def missing_value(self, name: str) -> DataDependentError:
        """Record that an op needs an unknown value, and return the error to raise."""
        error = DataDependentError.of_op(name)
        self.recorder.fail(name, error)
        return error

    def shape_tensor_for(self, tensor: torch.Tensor) -> ShapeTensor:
        """Return a shape tensor for a real tensor, a leaf that requires grad if the tensor does."""
        _, metadata, index = self.concrete.resolve(tensor)
        shape_copy = make_shape_tensor(metadata, StorageRef(self, index), tensor.requires_grad)
        if isinstance(tensor, torch.nn.Parameter):
            shape_copy._is_param = True
        return shape_copy

    def _without_values(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a shape tensor for a tensor with known values."""
        if type(tensor) is ShapeTensor:
            return tensor
        _, metadata, index = self.concrete.resolve(tensor)
        return make_shape_tensor(without_values(metadata), StorageRef(self, index), tensor.requires_grad)

    def has_values(self, tensors: list[Any]) -> bool:
        """Return whether tensors have the values of real execution."""
        return self.concrete.have_values(tensors)

    def assume_outcome(self, op: str, what: str, *, bound: bool) -> None:
        """Record an assumption about a data-dependent op.

        Raises DataDependentError if real execution is possible instead, unless `bound`: the assumption is an upper
        bound of the op's cost.
        """
        if self._rules.exact and not bound:
            raise self.missing_value(op)
        self._rules.assumed[op] = what

    def launch(self, schema: OpSchema, kwargs: Mapping[str, Any], call_kernel: Callable[[], Any], source: str) -> None:
        """Record a kernel launch without running it; the kernel may write to all of its tensors."""
        tensors = list(tensors_of(kwargs))
        outputs = tuple(map(self.concrete.spec_of, self.recorder.uninitialised(tensors)))
        for tensor in tensors:
            self._forget_values(tensor)
        spec_kwargs = substitute(dict(kwargs), self.concrete.spec_of, self.concrete.device_for)
        storages = [
            self.storage_index(tensor.storage_ref) if type(tensor) is ShapeTensor else self.concrete.resolve(tensor)[2]
            for tensor in tensors
        ]
        signature = Signature(
            schema.name, schema.names, normalise(schema, (), spec_kwargs), outputs, schema.text, source
        )
        self.recorder.append_call(signature, storages, ())

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if self.nested:
            return self._run_nested(func, types, args, kwargs or {})
        if graph_tracer() is not None and not is_torch_shape_inference(types):
            return self._run_traced(func, types, args, kwargs or {})
        plan = self._plans.get(id(func))  # an op's hash is slow (Python), and its plan keeps it alive
        if plan is None:
            if self.recorder.scripts is not None and is_module_call(func.name()):
                return self.recorder.scripts(func.name(), args)
            plan = self._plan(func)
        outcomes, op, handle_miss, _ = plan
        self.last_op = op
        if types != _SHAPE_TENSOR_ONLY:
            if has_wrapper_subclass(types):
                return self.defer_to_subclass(func, types, args, kwargs or {})
            if is_torch_shape_inference(types):
                return func(*args, **(kwargs or {}))
        registered_tensors = self.concrete.registered
        key: list[Any] = []
        tensors: list[torch.Tensor] = []
        reads: list[int] = []
        for value in args:
            kind = type(value)
            if kind is ShapeTensor:
                key.append(value.metadata)
                tensors.append(value)
                ref = value.storage_ref
                reads.append(ref.index if ref.mode is self else self.storage_index(ref))
            elif kind in _REAL_TYPES and (registered := registered_tensors.get(id(value))) is not None:
                key.append(registered[1])
                tensors.append(value)
                reads.append(registered[2])
            elif kind in _PLAIN_TYPES:
                key.append(value)
            elif kind is bool:
                key.append(_TRUE if value else _FALSE)
            elif kind is float:
                key.append((value,) if value == value else "nan")  # 1.0 == 1 as a key, but not as an argument
            elif kind is list and value and type(value[0]) is int and not op.has_mixed_lists:
                key.append(tuple(value))
            else:
                key.append(self._key(value, tensors, reads))
        if kwargs:
            for name, value in kwargs.items():
                key.append(name)
                key.append(self._key(value, tensors, reads))
        if op.context is not None:
            key.append(op.context())
        if op.has_extra_key:
            key += self._extra_key(op.schema, key, args, kwargs or {})
        if op.writes and len(tensors) > 1 and len({*map(id, tensors)}) < len(tensors):
            ids = [*map(id, tensors)]
            key.append(("one tensor", *map(ids.index, ids)))
        outcome = outcomes.get(tuple(key))
        if outcome is None:
            if handle_miss is not None:
                return handle_miss(self, func, op, args, kwargs or {}, reads, tuple(key))
            outcome = self._infer(func, op, args, kwargs or {}, tensors, tuple(key))
        fresh = outcome.fresh
        if fresh is not None:
            recorder = self.recorder
            index = append_row(recorder.storages, outcome.row)
            result: Any = make_shape_tensor(fresh, OwnedStorage(self, recorder, index))
            self._record(outcome, reads, (index,))
            return result
        source = outcome.source
        if source is not None and type(tensor := tensors[source]) is ShapeTensor:
            self._record(outcome, reads, (reads[source],))
            return tensor if outcome.view is None else make_shape_tensor(outcome.view, tensor.storage_ref)
        if outcome.promoted is not None and outcome.promoted is not torch.get_default_dtype():
            outcome = self._infer(func, op, args, kwargs or {}, tensors, tuple(key))
        if outcome.concrete or (
            self._updates_counter(op, outcome, tensors) and not op.needs_other_ranks(args, kwargs or {})
        ):
            return self._compute(func, op, args, kwargs or {}, reads, outcome)
        make = self._make_lazy_results if outcome.lazy else self._make_results
        return make(func, op, args, kwargs or {}, tensors, reads, outcome)

    def _infer(
        self,
        func: Any,
        op: OpCache,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        tensors: list[torch.Tensor],
        key: tuple[Any, ...],
    ) -> CachedResult:
        """Infer the outcome of a call that is not cached, or cached for another default dtype."""
        begun = self._begin_op()
        try:
            outcome = self._inference.infer(func, op, args, kwargs, tensors, key)
            if op.reads_values and not outcome.concrete:
                self.recorder.python_reads.record(tensors_read(op.schema.name, args, kwargs))
            return outcome
        except Exception as error:  # record it: the model may catch it and take another branch
            self.recorder.fail(op.schema.name, error)
            raise
        finally:
            self._end_op(begun)

    def _extra_key(
        self, schema: OpSchema, key: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[Any]:
        """Return the parts of the key besides metadata: ranks of process groups, and values of tensors."""
        extra: list[Any] = []
        if schema.group is not None:
            extra += [describe_group(value) for value in key if type(value) is str]  # names of groups may be reused
        if schema.value_arguments:
            extra.append(self._inference.values.read(schema.value_arguments, args, kwargs))
        return extra

    def _updates_counter(self, op: OpCache, outcome: CachedResult, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether a call updates a counter, such as a buffer with the number of batches."""
        written = [tensors[index] for index in outcome.written if type(tensors[index]) is not ShapeTensor]
        is_small = written and not outcome.resized and all(tensor.numel() <= _MAX_COUNTER_NUMEL for tensor in written)
        return bool(is_small) and self.concrete.have_values(tensors)

    def _make_results(
        self,
        func: Any,
        op: OpCache,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        tensors: Sequence[torch.Tensor],
        reads: Sequence[int],
        outcome: CachedResult,
    ) -> Any:
        """Return the results of a call from its outcome, in the general case."""
        if outcome.resized and op.changes_view and not any(type(tensor) is ShapeTensor for tensor in tensors):
            return self._change_view(func, op, args, kwargs, reads, outcome)
        for index in outcome.written:
            if type(tensors[index]) is not ShapeTensor:
                self.concrete.invalidate(tensors[index])
        for index, resized in outcome.resized:
            self._resize(op, tensors[index], resized)
        results: list[Any] = []
        writes: list[int] = []
        real_views: list[Any] = []
        for metadata, source, same, value, row, _ in outcome.outputs:
            if metadata is None:
                results.append(completed_work(results) if is_work(value) else value)
                if isinstance(value, torch.Tensor):
                    writes.append(self.recorder.storage_of(value, "op"))
            elif source is None:
                index = append_row(self.recorder.storages, row)
                writes.append(index)
                results.append(make_shape_tensor(metadata, OwnedStorage(self, self.recorder, index)))
            else:
                tensor = tensors[source]
                writes.append(reads[source])
                if same:
                    results.append(tensor)
                elif type(tensor) is ShapeTensor:
                    results.append(make_shape_tensor(metadata, tensor.storage_ref))
                else:
                    # A view of a real tensor is a real view: it needs no memory and shares the storage.
                    real_views = real_views or self._view(func, args, kwargs, tensors, outcome)
                    results.append(real_views[len(results)])
        result = results[0] if outcome.build is None else outcome.build(results)
        self._record(outcome, reads, writes)
        return result

    def _make_lazy_results(
        self,
        func: Any,
        op: OpCache,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        tensors: Sequence[torch.Tensor],
        reads: list[int],
        outcome: CachedResult,
    ) -> Any:
        """Return the results of a call, with the values of tensors that it returns or writes to as expressions."""
        name = op.schema.name
        if base_name(name) in COUNTS and (counted := self._lazy_values.count(name, args, kwargs)) is not None:
            self._record(outcome, reads, [self.recorder.storage_of(counted, "op")])
            return counted
        outputs = outcome.outputs
        value = None
        if len(outputs) == 1 and outputs[0].metadata is not None and (outputs[0].source is None or outputs[0].same):
            metadata = outputs[0].metadata
            value = self._lazy_values.result(func, name, args, kwargs, metadata.shape, metadata.dtype)
        result = self._make_results(func, op, args, kwargs, tensors, reads, outcome)
        for index in outcome.written:
            self._forget_values(tensors[index], value)
        for item, output in zip(unpack_result(result)[0], outputs, strict=True):
            if type(item) is not ShapeTensor or output.same:
                continue
            lazy = None
            if output.source is None:
                dense = is_dense(item.metadata.shape, item.metadata.stride)
                lazy = LazyValue(LazyMemory(value, item.metadata.stride), 0) if value is not None and dense else None
            elif (base := getattr(tensors[output.source], "lazy", None)) is not None:
                lazy = LazyValue(base.memory, base.offset + output.offset)
            if lazy is not None:
                item.lazy, item.metadata = lazy, as_lazy(item.metadata)
        return result

    def _forget_values(self, tensor: torch.Tensor, value: Expression | None = None) -> None:
        """Replace the values of a tensor that the model writes to, by unknown ones unless given."""
        if type(tensor) is not ShapeTensor:
            self.concrete.invalidate(tensor)
        elif tensor.lazy is not None:
            target = tensor.metadata.shape, tensor.metadata.stride, tensor.lazy.offset
            tensor.lazy.memory.write(target, value)

    def _run_nested(self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a call hidden from the enclosing run with shape execution."""
        args, kwargs = substitute((tuple(args), dict(kwargs)), self._adopt, lambda device: device)
        self.nested = False
        try:
            with disable_dispatch_modes():
                return self.__torch_dispatch__(func, types, args, kwargs)
        finally:
            self.nested = True

    def _run_traced(self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a call through the graph tracer, which records it and calls this mode for the result."""
        tracer = graph_tracer()
        with tracer_stashed():
            make_constants(tracer, (args, kwargs))
            with self:
                return tracer.__torch_dispatch__(func, types, args, kwargs)

    def _view(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        tensors: Sequence[torch.Tensor],
        outcome: CachedResult,
    ) -> list[Any]:
        """Return the results of a view op: real views of real tensors, None for others."""
        if not any(type(tensor) is ShapeTensor for tensor in tensors):
            return unpack_result(func(*args, **kwargs))[0]
        # Ops that return views of several tensors, such as broadcast_tensors, do not change storage offsets.
        return [
            None
            if metadata is None or source is None or type(tensors[source]) is ShapeTensor
            else tensors[source].as_strided(metadata.shape, metadata.stride)
            for metadata, source, *_ in outcome.outputs
        ]

    def _change_view(
        self,
        func: Any,
        op: OpCache,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        reads: Sequence[int],
        outcome: CachedResult,
    ) -> Any:
        """Return a real tensor with the shape and strides that an op gives it; they are restored with the model."""
        if op.schema.name.startswith("aten::resize"):  # it may allocate
            self._undo_log.before(op.schema, args, kwargs, self.recorder.fresh)
        begun = self._begin_op(reads)
        try:
            result = func(*args, **kwargs)
        finally:
            self._end_op(begun, reads)
        self.concrete.refresh(args[0])
        self._record(outcome, reads, [self.recorder.storage_of(args[0], "op")])
        return result

    def _record(self, outcome: CachedResult, reads: Sequence[int], writes: Sequence[int]) -> None:
        recorder = self.recorder
        self.last_outcome = outcome
        index = self.index_of(outcome)
        if recorder.backward or recorder.has_threads or recorder.has_lines:
            recorder.add(index, reads, writes)
        else:
            recorder.events.append(("op", index, recorder.stack, "forward", 0, reads, writes))
        if self._inner_calls is not None:
            self._inner_calls.append((outcome, reads, writes))

    def index_of(self, outcome: CachedResult) -> int:
        """Return the index of an outcome's signature in the run."""
        index = self._indices.get(outcome)
        if index is None:
            assert outcome.signature is not None
            index = self.recorder.index_of(outcome.signature)
            if outcome.cacheable:
                self._indices[outcome] = index
        return index

    def _plan(self, func: Any) -> _Plan:
        op = op_cache(func, self.recorder.stops_at.values_of(func.name()))
        plan: _Plan = op.outcomes.setdefault(self.settings, {}), op, None, func
        if op.schema.composite and op.schema.name not in self.recorder.stops_at:
            self.recorder.decompose(op.schema.name)
            expansions = op.expansions.setdefault((self.settings, self.recorder.stops_at.key), {})
            plan = expansions, op, ShapeMode._decompose, func
        elif op.schema.name == _LIFT:
            plan = {}, op, ShapeMode._lift, func
        self._plans[id(func)] = plan
        return plan

    def _lift(
        self,
        func: Any,
        op: OpCache,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        reads: list[int],
        key: tuple[Any, ...],
    ) -> Any:
        """Run a call of `torch.tensor(...)` on a constant that no op has created."""
        if self.recorder.unseen is not None:
            self.recorder.unseen.accept_constants(reads)
        tensors = list(tensors_of((args, kwargs)))
        outcome = op.outcomes.setdefault(self.settings, {}).get(key)
        if outcome is None:
            outcome = self._infer(func, op, args, kwargs, tensors, key)
        run = self._compute if outcome.concrete else partial(self._make_results, tensors=tensors)
        return run(func, op, args, kwargs, reads=reads, outcome=outcome)

    def _decompose(
        self,
        func: Any,
        op: OpCache,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        reads: list[int],
        key: tuple[Any, ...],
    ) -> Any:
        """Decompose a composite op; cache the expansion if it is a single op with one new tensor."""
        self.recorder.decompose(op.schema.name)
        args, kwargs = substitute((tuple(args), dict(kwargs)), self._without_meta, self.concrete.device_for)
        inner_calls: list[tuple[CachedResult, Sequence[int], Sequence[int]]] = []
        outer_calls, self._inner_calls = self._inner_calls, inner_calls
        try:
            with self, self._device_requests(func):
                result = func.decompose(*args, **kwargs)
        finally:
            self._inner_calls = outer_calls
            if outer_calls is not None:
                outer_calls += inner_calls
        inner_op, self.last_op = self.last_op, None
        if len(inner_calls) == 1:
            outcome, inner_reads, writes = inner_calls[0]
            if outcome.signature is None:
                return result  # computed, and signed by its result
            if inner_op is None or inner_op.schema.name != outcome.signature.op:
                return result  # decomposed twice: the composite op between would be unknown where it is cached
            same_tensors = type(result) is ShapeTensor and result.storage_ref.index in writes and inner_reads == reads
            if same_tensors and outcome.fresh is not None and outcome.cacheable and self._expands_always(op, outcome):
                op.expansions[self.settings, self.recorder.stops_at.key][key] = outcome
                self.last_op = op
        return result

    def _device_requests(self, func: Any) -> AbstractContextManager[Any]:
        """Redirect requests for a missing device in a decomposition in Python, as in the model's code."""
        if self.emulate_device is None:
            return nullcontext()
        if DispatchKey.CompositeImplicitAutograd not in func.py_kernels:
            return disable_torch_function()  # a function mode would call the op itself again
        return self.emulate_device()

    def _expands_always(self, op: OpCache, outcome: CachedResult) -> bool:
        """Return whether an expansion is independent of settings that its key lacks: autocast, kernel choice."""
        assert outcome.signature is not None
        inner = outcome.signature.op
        if (context := context_of(inner)) is not None and op.context is not context:
            return False
        return not is_autocast(inner) or is_autocast(op.schema.name)

    def _without_meta(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor, or a shape tensor for a meta tensor, since a composite op may branch on the device."""
        if type(tensor) is not ShapeTensor and tensor.device.type == "meta":
            return self.shape_tensor_for(tensor)
        return tensor

    def _adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this run's shape tensor for one of the enclosing run."""
        if type(tensor) is not ShapeTensor or tensor.storage_ref.mode is self:
            return tensor
        if id(tensor) not in self._adopted:
            metadata = tensor.metadata
            storage_ref = OwnedStorage(self, self.recorder, append_row(self.recorder.storages, metadata.row))
            self._adopted[id(tensor)] = tensor, make_shape_tensor(metadata, storage_ref, tensor.requires_grad)
        return self._adopted[id(tensor)][1]

    def _key(self, value: Any, tensors: list[torch.Tensor], reads: list[int]) -> Any:
        """Return an argument's part of the cache key, collecting its tensors and storages."""
        kind = type(value)
        if kind is ShapeTensor:
            tensors.append(value)
            reads.append(self.storage_index(value.storage_ref))
            return value.metadata
        if kind in _PLAIN_TYPES:
            return value
        if kind is bool:
            return _TRUE if value else _FALSE
        if kind is float:
            return (value,) if value == value else "nan"
        if kind is torch.device:
            return self.concrete.device_for(value)
        if isinstance(value, (list, tuple)):
            return tuple([item if type(item) is int else self._key(item, tensors, reads) for item in value])
        if isinstance(value, torch.Tensor):
            _, metadata, index = self.concrete.resolve(value)
            tensors.append(value)
            reads.append(index)
            return metadata
        description = describe(value)
        return description if description is not value else (kind.__qualname__, value)

    def _compute(
        self,
        func: Any,
        op: OpCache,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        reads: list[int],
        outcome: CachedResult,
    ) -> Any:
        """Compute an op on known and small tensors."""
        if op.reads_values:
            self.recorder.python_reads.record(tensors_read(op.schema.name, args, kwargs))
        elif op.random:
            self.recorder.python_reads.has_draws = True
        self._undo_log.before(op.schema, args, kwargs, self.recorder.fresh)
        real_args, real_kwargs = substitute(
            (tuple(args), dict(kwargs)), lambda tensor: tensor, self.concrete.creation_device
        )
        begun = self._begin_op(reads)
        try:
            result = func(*real_args, **real_kwargs)
        except RuntimeError as error:
            # A kernel that this machine lacks. One that refuses its arguments raises in a real run too.
            if isinstance(error, NotImplementedError) or "not implemented for" in str(error):  # torch 2.6 only says so
                if not _is_kernel_missing(func, self.device) or outcome.written or not outcome.outputs:
                    raise
                values = substitute((tuple(args), dict(kwargs)), self._without_values, self.concrete.device_for)
                with self:
                    return func(*values[0], **values[1])
            moved = _move_to_one_device(op.schema, real_args, real_kwargs)
            if moved is None:
                raise
            result = func(*moved[0], **moved[1])
        finally:
            self._end_op(begun, reads)
        if op.changes_view:
            self.concrete.refresh(args[0])
        items, build = unpack_result(result)
        writes = [self.recorder.storage_of(item, "op") for item in items if isinstance(item, torch.Tensor)]
        signature = outcome.signature
        if signature is None:
            outputs = [
                Output(self.concrete.metadata_of(item)) if isinstance(item, torch.Tensor) else Output(None, value=item)
                for item in items
            ]
            signature = self._inference.sign(op, args, kwargs, outputs, build)
        self.recorder.add(self.recorder.index_of(signature), reads, writes)
        if self._inner_calls is not None:
            self._inner_calls.append((outcome, reads, writes))
        return result

    def _begin_op(self, reads: Sequence[int] = ()) -> bool:
        """Attribute work outside the dispatcher, and new tensors, to the op that is running, if it is the outermost.

        `reads`: the memory on which its kernel runs.
        """
        unseen_work = self.recorder.unseen
        if unseen_work is None:
            return False
        unseen_work.before_kernel(reads)
        if unseen_work.in_op:
            return False
        unseen_work.busy.add(get_ident())
        return True

    def _end_op(self, begun: bool, reads: Sequence[int] = ()) -> None:
        unseen_work = self.recorder.unseen
        if unseen_work is not None:
            unseen_work.after_kernel(reads)
            if begun:
                unseen_work.busy.discard(get_ident())

    def _resize(self, op: OpCache, tensor: torch.Tensor, metadata: Metadata) -> None:
        """Set the metadata of an argument that the op resizes."""
        if type(tensor) is not ShapeTensor:
            raise NotImplementedError(f"{op.schema.name} changes the shape of a tensor that exists outside the run")
        with disable_torch_dispatch():
            torch.Tensor.set_(tensor, make_shape_tensor(metadata, tensor.storage_ref))  # type: ignore[call-overload]
        tensor.metadata = metadata


def _is_kernel_missing(func: Any, device: torch.device) -> bool:
    """Return whether a device's kernel is missing here; on the CPU, one of the GPU whose kernels a plan chooses."""
    return not is_available(device) or (device.type == "cpu" and not has_computed_kernel_for_key(func.name(), "CPU"))


def _move_to_one_device(schema: OpSchema, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any] | None:
    """Return arguments with tensors moved to one device, None if they are on one; the run reports one for all."""
    tensors = list(tensors_of((tuple(args), dict(kwargs))))
    if len({tensor.device for tensor in tensors}) < 2:
        return None
    written = [tensor for value in written_arguments(schema, args, kwargs) for tensor in tensors_of(value)]
    target = written[0].device if written else torch.device("cpu")
    # `to` returns the tensor itself if it is there already.
    return substitute((tuple(args), dict(kwargs)), lambda tensor: tensor.to(target), lambda device: device)
