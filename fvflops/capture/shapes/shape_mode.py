"""The dispatch mode of shape execution, which returns shape tensors by cached outcomes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from typing import Any

import torch

from fvflops.capture.model.script_copy import is_module_call
from fvflops.capture.real_mode import has_wrapper_subclass
from fvflops.capture.recorder.recorder import Recorder
from fvflops.capture.recorder.run_position import append_row
from fvflops.capture.recorder.tensor_specs import (
    OpSchema,
    describe,
    describe_group,
    describe_tensor,
    normalise,
    tensors_of,
)
from fvflops.capture.recorder.value_reader import ValueReader, have_values
from fvflops.capture.restore.restore import UndoLog
from fvflops.capture.shapes.concrete_tensors import ConcreteTensors
from fvflops.capture.shapes.rules.shape_rules import ShapeRules
from fvflops.capture.shapes.shape_cache import (
    CachedResult,
    OpCache,
    ShapeCall,
    context_of,
    is_autocast,
    op_cache,
    substitute,
)
from fvflops.capture.shapes.shape_results import ShapeResults
from fvflops.capture.shapes.shape_tensor import OwnedStorage, ShapeTensor, make_shape_tensor, stored_index
from fvflops.capture.unseen.fake_tensors import is_torch_shape_inference
from fvflops.torch_internals import (
    DispatchKey,
    DispatchModeKey,
    TorchDispatchMode,
    disable_dispatch_modes,
    disable_torch_function,
    dispatch_mode_stack,
    get_dispatch_mode,
    set_dispatch_mode,
    unset_dispatch_mode,
)
from fvflops.trace import Signature

_LIFT = "aten::lift_fresh"
_PROXY_KEY = DispatchModeKey.PROXY
_PLAIN_TYPES = frozenset({int, type(None), str, torch.dtype, torch.layout, torch.memory_format, complex})
_REAL_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
_TRUE, _FALSE = object(), object()  # True == 1 as a key, but not as an argument

_SHAPE_TENSOR_ONLY = (ShapeTensor,)

# An op's outcomes, its cache, the handler of a cache miss, and the op (since its id, the plan's key, may be reused).
_Plan = tuple[dict[tuple[Any, ...], CachedResult], OpCache, Callable[[Any, ShapeCall], Any] | None, Any]


class ShapeMode(ShapeResults):
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
        super().__init__(recorder, undo_log, ConcreteTensors(recorder, device, devices), rules)
        # Returns a context in which torch's functions accept the device, where this machine lacks it.
        self.emulate_device: Callable[[], AbstractContextManager[Any]] | None = None
        recorder.python_reads.is_real = False
        recorder.describe = self.concrete.spec_of
        recorder.values = self._inference.values
        recorder.index_of_ref = self.storage_index
        self._plans: dict[int, _Plan] = {}
        self.nested = nested
        # The op of the last call, or the composite op that always decomposes into it.
        self.last_op: OpCache | None = None
        self._adopted: dict[int, tuple[torch.Tensor, ShapeTensor]] = {}

    def close(self) -> None:
        """Break the reference cycle with the recorder, which would keep the model's tensors alive."""
        self.recorder.describe = describe_tensor
        self.recorder.values = ValueReader(have_values)
        self.recorder.index_of_ref = stored_index

    def for_thread(self) -> ShapeMode:
        """Return an equal mode for another thread of the run."""
        mode = copy(self)
        TorchDispatchMode.__init__(mode)  # torch's state of the thread
        mode._inner_calls, mode.last_outcome, mode.last_op, mode._adopted = None, None, None, {}
        return mode

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
        self.recorder.append_call(signature, storages)

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
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
        kwargs = kwargs or {}
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
            elif kind in _REAL_TYPES and (registered := self.concrete.registered.get(id(value))) is not None:
                key.append(registered[1])
                tensors.append(value)
                reads.append(registered[2])
            elif kind in _PLAIN_TYPES:
                key.append(value)
            elif kind is list and value and type(value[0]) is int and not op.has_mixed_lists:
                key.append(tuple(value))
            else:
                key.append(self._key(value, tensors, reads))
        for name, value in kwargs.items():
            key += name, self._key(value, tensors, reads)
        if op.has_extra_key:
            key += self._extra_key(op, key, args, kwargs)
        if op.writes and len(tensors) > 1 and len({*(ids := [*map(id, tensors)])}) < len(tensors):
            key.append(("one tensor", *map(ids.index, ids)))
        outcome = outcomes.get(tuple(key))
        if outcome is None:
            call = ShapeCall(func, op, args, kwargs, tensors, reads, tuple(key))
            if handle_miss is not None:
                return handle_miss(self, call)
            outcome = self._infer(call)
        if (fresh := outcome.fresh) is not None:
            index = append_row(self.recorder.storages, (*outcome.row,))
            result = make_shape_tensor(fresh, OwnedStorage(self, self.recorder, index))
            self._record(outcome, reads, (index,))
            return result
        if (source := outcome.source) is not None and type(tensor := tensors[source]) is ShapeTensor:
            self._record(outcome, reads, (reads[source],))
            return tensor if outcome.view is None else make_shape_tensor(outcome.view, tensor.storage_ref)
        return self._results(ShapeCall(func, op, args, kwargs, tensors, reads, tuple(key)), outcome)

    def _extra_key(self, op: OpCache, key: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return the parts of the key besides metadata: settings, ranks of process groups, and values of tensors."""
        extra = [] if op.context is None else [op.context()]
        if op.schema.group is not None:
            extra += [describe_group(value) for value in key if type(value) is str]  # names of groups may be reused
        if op.schema.value_arguments:
            extra.append(self._inference.values.read(op.schema.value_arguments, args, kwargs))
        return extra

    def _run_nested(self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
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
        with _tracer_stashed():
            _make_constants(tracer, (args, kwargs))
            with self:
                return tracer.__torch_dispatch__(func, types, args, kwargs)

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

    def _lift(self, call: ShapeCall) -> Any:
        """Run a call of `torch.tensor(...)` on a constant that no op has created."""
        if self.recorder.unseen is not None:
            self.recorder.unseen.accept_constants(call.reads)
        outcome = call.op.outcomes.setdefault(self.settings, {}).get(call.key)
        if outcome is None:
            outcome = self._infer(call)
        return self._compute(call, outcome) if outcome.concrete else self._make_results(call, outcome)

    def _decompose(self, call: ShapeCall) -> Any:
        """Decompose a composite op; cache the expansion if it is a single op with one new tensor."""
        op, reads = call.op, call.reads
        self.recorder.decompose(op.schema.name)
        args, kwargs = call.with_replaced(self._without_meta, self.concrete.device_for)
        inner_calls: list[tuple[CachedResult, Sequence[int], Sequence[int]]] = []
        outer_calls, self._inner_calls = self._inner_calls, inner_calls
        try:
            with self, self._device_requests(call.func):
                result = call.func.decompose(*args, **kwargs)
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
                op.expansions[self.settings, self.recorder.stops_at.key][call.key] = outcome
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
        if type(tensor) is not ShapeTensor or tensor.storage_ref.mode is self:
            return tensor
        if id(tensor) not in self._adopted:
            metadata = tensor.metadata
            storage_ref = OwnedStorage(self, self.recorder, append_row(self.recorder.storages, (*metadata.row,)))
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
            return (value,) if value == value else "nan"  # 1.0 == 1 as a key, but not as an argument
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


def in_shape_run() -> bool:
    return any(isinstance(mode, ShapeMode) for mode in dispatch_mode_stack())


def graph_tracer() -> Any:
    """Return the dispatch mode that traces a graph in this thread, or None; torch calls it after all other modes."""
    return get_dispatch_mode(_PROXY_KEY)


@contextmanager
def _tracer_stashed() -> Iterator[None]:
    tracer: Any = unset_dispatch_mode(_PROXY_KEY)
    try:
        yield
    finally:
        set_dispatch_mode(tracer)


def _make_constants(mode: Any, values: Any) -> None:
    """Add shape tensors that existed before tracing to the graph as constants, as torch does with its own tensors."""
    from torch.fx.experimental.proxy_tensor import has_proxy_slot, track_tensor_tree

    tracer = mode.tracer
    for tensor in tensors_of(values):
        if type(tensor) is ShapeTensor and not has_proxy_slot(tensor, tracer):
            name = tracer.get_fresh_qualname("_tensor_constant")
            setattr(tracer.root, name, tensor)
            node = tracer.create_proxy("get_attr", name, (), {})
            track_tensor_tree(tensor, node, constant=None, tracer=tracer)
