"""The dispatch mode of a shape run: ops are answered from the memo, with tensors that have no numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fvflops.capture.real.real_mode import SubclassAwareMode, has_wrapper_subclass
from fvflops.capture.recorder.recorder import Recorder
from fvflops.capture.recorder.signature import (
    OpSchema,
    describe,
    describe_group,
    describe_tensor,
    normalise,
    tensors_of,
)
from fvflops.capture.restore.restore import UndoLog, written_arguments
from fvflops.capture.shapes.collectives import completed_work, is_work
from fvflops.capture.shapes.concrete_tensors import ConcreteTensors
from fvflops.capture.shapes.graph_tracing import graph_tracer, make_constants, tracer_stashed
from fvflops.capture.shapes.meta_run import substitute, take_apart
from fvflops.capture.shapes.metadata import Metadata
from fvflops.capture.shapes.rules import ShapeRules
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
from fvflops.capture.shapes.shape_tensor import DataDependentError, OwnedStorage, ShapeTensor, StorageRef, make
from fvflops.capture.unseen.fake_tensors import is_reasoning
from fvflops.torch_internals import disable_dispatch_modes, disable_torch_dispatch
from fvflops.trace import Signature

# A buffer of up to this many elements that is changed by known numbers is a counter, and keeps counting.
_COUNTER = 1 << 10

_PLAIN = frozenset({int, type(None), str, torch.dtype, torch.layout, torch.memory_format, complex})
_REAL = frozenset({torch.Tensor, torch.nn.Parameter})
_TRUE, _FALSE = object(), object()  # True and 1 are equal as keys, and not to an op

_OURS = (ShapeTensor,)

# An op's outcomes, what is known of it, what to do instead of looking there, and the op.
_Plan = tuple[dict[tuple[Any, ...], CachedResult], OpCache, Callable[..., Any] | None, Any]


class ShapeMode(SubclassAwareMode):
    """A dispatch mode that computes shapes instead of numbers, and hands every op call to a recorder.

    Parameters, buffers and inputs of floating point count as unknown, and so does what comes of them; what is made of
    small integer and bool tensors and constants alone is computed. Every tensor answers for `device`, where `homes` are
    the real devices of the model and its inputs. `nested` says that another shape run goes on around this one.
    """

    def __init__(
        self,
        recorder: Recorder,
        undo_log: UndoLog,
        device: torch.device,
        homes: Sequence[torch.device],
        rules: ShapeRules,
        *,
        nested: bool = False,
    ) -> None:
        super().__init__()
        self.device = device
        self.reals = ConcreteTensors(recorder, device, homes)
        self._rules = rules
        self._settings = settings_of(device)
        self._learner = OpInference(device, self._settings, rules, self.reals)
        self.recorder = recorder
        recorder.describe = self.reals.spec_of
        self._undo_log = undo_log
        self._plans: dict[int, _Plan] = {}
        self._numbers: dict[int, int] = {}
        # The ops seen inside the composite op that is being looked into, and the storages they read and write.
        self._inside: list[tuple[CachedResult, Sequence[int], Sequence[int]]] | None = None
        self._nested = nested
        self._adopted: dict[int, tuple[torch.Tensor, ShapeTensor]] = {}

    def close(self) -> None:
        """Let go of the recorder, which holds this mode: a cycle would keep the model's tensors alive for a while."""
        self.recorder.describe = describe_tensor

    def for_thread(self) -> ShapeMode:
        """Return a mode that does the same in another thread of the run."""
        mode = ShapeMode(
            *(self.recorder, self._undo_log, self.device, (), self._rules),
            nested=self._nested,
        )
        mode.reals, mode._learner, mode._plans, mode._numbers = self.reals, self._learner, self._plans, self._numbers
        self.recorder.describe = self.reals.spec_of
        return mode

    def needs_value(self, name: str) -> DataDependentError:
        """Return the error of an op that asks for a number which is not there."""
        error = DataDependentError.of_op(name)
        self.recorder.fail(name, error)
        return error

    def stand_in(self, tensor: torch.Tensor) -> ShapeTensor:
        """Return a shape tensor for a tensor that exists before the run: a leaf that wants a gradient where it does."""
        _, metadata, index = self.reals.resolve(tensor)
        twin = make(metadata, StorageRef(self, index), tensor.requires_grad)
        if isinstance(tensor, torch.nn.Parameter):
            twin._is_param = True
        return twin

    def has_values(self, tensors: list[Any]) -> bool:
        """Return whether tensors hold the numbers that a real run sees."""
        return self.reals.have_values(tensors)

    def assume_outcome(self, op: str, what: str, *, bound: bool) -> None:
        """Note what an op was taken to do for want of a number.

        Where a real run would tell it raises DataDependentError. `bound` says that the op does no more than that, and
        is noted in any case.
        """
        if self._rules.exact and not bound:
            raise self.needs_value(op)
        self._rules.supposed[op] = what

    def launch(self, schema: OpSchema, kwargs: Mapping[str, Any], run: Callable[[], Any], source: str) -> None:
        """Record a launch of a kernel, which may write to all of its tensors, without making it."""
        tensors = list(tensors_of(kwargs))
        outputs = tuple(map(self.reals.spec_of, self.recorder.uninitialised(tensors)))
        for tensor in tensors:
            if type(tensor) is not ShapeTensor:
                self.reals.invalidate(tensor)
        plain = substitute(dict(kwargs), self.reals.spec_of, self.reals.device_for)
        homes = [
            tensor.home.index if type(tensor) is ShapeTensor else self.reals.resolve(tensor)[2] for tensor in tensors
        ]
        signature = Signature(schema.name, schema.names, normalise(schema, (), plain), outputs, schema.text, source)
        self.recorder.append_call(signature, homes, ())

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if self._nested:
            return self._answer_apart(func, types, args, kwargs or {})
        if graph_tracer() is not None and not is_reasoning(types):
            return self._answer_traced(func, types, args, kwargs or {})
        plan = self._plans.get(id(func))  # an op hashes itself in Python, and lives as long as its plan
        if plan is None:
            plan = self._plan(func)
        outcomes, op, special, _ = plan
        if types != _OURS:
            if has_wrapper_subclass(types):
                return self.defer_to_subclass(func, types, args, kwargs or {})
            if is_reasoning(types):
                return func(*args, **(kwargs or {}))
        known = self.reals.seen
        key: list[Any] = []
        tensors: list[torch.Tensor] = []
        reads: list[int] = []
        for value in args:
            kind = type(value)
            if kind is ShapeTensor:
                key.append(value.metadata)
                tensors.append(value)
                reads.append(value.home.index)
            elif kind in _REAL and (seen := known.get(id(value))) is not None:
                key.append(seen[1])
                tensors.append(value)
                reads.append(seen[2])
            elif kind in _PLAIN:
                key.append(value)
            elif kind is bool:
                key.append(_TRUE if value else _FALSE)
            elif kind is float:
                key.append((value,) if value == value else "nan")  # 1.0 and 1 are equal as keys, and not to an op
            elif kind is list and value and type(value[0]) is int and not op.mixes:
                key.append(tuple(value))
            else:
                key.append(self._key(value, tensors, reads))
        if kwargs:
            for name, value in kwargs.items():
                key.append(name)
                key.append(self._key(value, tensors, reads))
        if op.context is not None:
            key.append(op.context())
        if op.looks_closer:
            key += self._look_closer(op.schema, key, args, kwargs or {})
        if op.writes and len(tensors) > 1 and len({*map(id, tensors)}) < len(tensors):
            places = [*map(id, tensors)]
            key.append(("one tensor", *map(places.index, places)))
        outcome = outcomes.get(tuple(key))
        if outcome is None:
            if special is not None:
                return special(self, func, op, args, kwargs or {}, reads, tuple(key))
            outcome = self._learn(func, op, args, kwargs or {}, tensors, tuple(key))
        fresh = outcome.fresh
        if fresh is not None:
            recorder = self.recorder
            storages = recorder.storages
            index = len(storages)
            storages.append(outcome.row)
            result: Any = make(fresh, OwnedStorage(self, recorder, index))
            self._note(outcome, reads, (index,))
            return result
        source = outcome.source
        if source is not None and type(tensor := tensors[source]) is ShapeTensor:
            self._note(outcome, reads, (reads[source],))
            return tensor if outcome.view is None else make(outcome.view, tensor.home)
        if outcome.promoted is not None and outcome.promoted is not torch.get_default_dtype():
            outcome = self._learn(func, op, args, kwargs or {}, tensors, tuple(key))
        if outcome.concrete or (self._counts_on(op, outcome, tensors) and not op.needs_others(args, kwargs or {})):
            return self._compute(func, op, args, kwargs or {}, reads, outcome)
        return self._make_results(func, op, args, kwargs or {}, tensors, reads, outcome)

    def _learn(
        self,
        func: Any,
        op: OpCache,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        tensors: list[torch.Tensor],
        key: tuple[Any, ...],
    ) -> CachedResult:
        """Return the outcome of a call that is not remembered, or is with another default dtype."""
        try:
            return self._learner.infer(func, op, args, kwargs, tensors, key)
        except Exception as error:  # the model may catch it, and take another path than it would have
            self.recorder.fail(op.schema.name, error)
            raise

    def _look_closer(
        self, schema: OpSchema, key: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[Any]:
        """Return what a call depends on beside its arguments' metadata: a group's ranks, and numbers of its tensors."""
        more: list[Any] = []
        if schema.group is not None:
            more += [describe_group(value) for value in key if type(value) is str]  # a name may mean another group now
        if schema.valued:
            more.append(self._learner.values.read(schema.valued, args, kwargs))
        return more

    def _counts_on(self, op: OpCache, outcome: CachedResult, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether a call changes a counter, such as a buffer that says how many batches there were."""
        written = [tensors[index] for index in outcome.written if type(tensors[index]) is not ShapeTensor]
        small = written and not outcome.grown and all(tensor.numel() <= _COUNTER for tensor in written)
        return bool(small) and self.reals.have_values(tensors)

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
        """Return what a call gives by its outcome, whatever that is."""
        for index in outcome.written:
            if type(tensors[index]) is not ShapeTensor:
                self.reals.invalidate(tensors[index])
        for index, grown in outcome.grown:
            self._resize(op, tensors[index], grown)
        results: list[Any] = []
        writes: list[int] = []
        real: list[Any] = []
        for metadata, source, same, value, row in outcome.outputs:
            if metadata is None:
                results.append(completed_work(results) if is_work(value) else value)
                if isinstance(value, torch.Tensor):
                    writes.append(self.recorder.storage_of(value, "op"))
            elif source is None:
                index = self._new_storage(row)
                writes.append(index)
                results.append(make(metadata, OwnedStorage(self, self.recorder, index)))
            else:
                tensor = tensors[source]
                writes.append(reads[source])
                if same:
                    results.append(tensor)
                elif type(tensor) is ShapeTensor:
                    results.append(make(metadata, tensor.home))
                else:
                    # A view of a real tensor is made for real: it costs nothing and aliases.
                    real = real or self._view(func, args, kwargs, tensors, outcome)
                    results.append(real[len(results)])
        result = results[0] if outcome.build is None else outcome.build(results)
        self._note(outcome, reads, writes)
        return result

    def _answer_apart(self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Answer a call, unseen by the shape run around this one."""
        args, kwargs = substitute((tuple(args), dict(kwargs)), self._adopt, lambda device: device)
        self._nested = False
        try:
            with disable_dispatch_modes():
                return self.__torch_dispatch__(func, types, args, kwargs)
        finally:
            self._nested = True

    def _answer_traced(self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Answer a call through the tracer of a graph, which notes it and asks this mode for the result."""
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
        """Return the results of a view op, real views of the tensors that are real; None stands for the others."""
        if not any(type(tensor) is ShapeTensor for tensor in tensors):
            return take_apart(func(*args, **kwargs))[0]
        # Ops that make views of several tensors at once, as broadcast_tensors, begin where their argument begins.
        return [
            None
            if metadata is None or source is None or type(tensors[source]) is ShapeTensor
            else tensors[source].as_strided(metadata.shape, metadata.stride)
            for metadata, source, *_ in outcome.outputs
        ]

    def _new_storage(self, row: Any) -> int:
        storages = self.recorder.storages
        storages.append(row)
        return len(storages) - 1

    def _note(self, outcome: CachedResult, reads: Sequence[int], writes: Sequence[int]) -> None:
        recorder = self.recorder
        number = self._numbers.get(id(outcome))
        if number is None:
            assert outcome.signature is not None
            number = recorder.number(outcome.signature)
            if outcome.remembered:
                self._numbers[id(outcome)] = number
        if recorder.backward or recorder.has_threads:
            recorder.add(number, reads, writes)
        else:
            recorder.events.append(("op", number, recorder.stack, "forward", 0, reads, writes))
        if self._inside is not None:
            self._inside.append((outcome, reads, writes))

    def _plan(self, func: Any) -> _Plan:
        op = op_cache(func)
        plan: _Plan = op.outcomes.setdefault(self._settings, {}), op, None, func
        if op.schema.composite and op.schema.name not in self.recorder.stops_at:
            self.recorder.decompose(op.schema.name)
            expansions = op.expansions.setdefault((self._settings, self.recorder.stops_at), {})
            plan = expansions, op, ShapeMode._decompose, func
        self._plans[id(func)] = plan
        return plan

    def _decompose(
        self,
        func: Any,
        op: OpCache,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        reads: list[int],
        key: tuple[Any, ...],
    ) -> Any:
        """Look into a composite op; if that comes down to one new tensor of one op, remember that."""
        self.recorder.decompose(op.schema.name)
        args, kwargs = substitute((tuple(args), dict(kwargs)), self._off_meta, self.reals.device_for)
        outer, self._inside = self._inside, []
        try:
            with self:
                result = func.decompose(*args, **kwargs)
            inside = self._inside
        finally:
            self._inside = outer
            if outer is not None:
                outer += inside
        if len(inside) == 1:
            outcome, inner_reads, writes = inside[0]
            same = type(result) is ShapeTensor and result.home.index in writes and inner_reads == reads
            if same and outcome.fresh is not None and outcome.remembered and self._expands_always(op, outcome):
                op.expansions[self._settings, self.recorder.stops_at][key] = outcome
        return result

    def _expands_always(self, op: OpCache, outcome: CachedResult) -> bool:
        """Return whether a composite op comes down to the same whatever else is set: autocast, a kernel's switch."""
        assert outcome.signature is not None
        inner = outcome.signature.op
        if (context := context_of(inner)) is not None and op.context is not context:
            return False
        return not is_autocast(inner) or is_autocast(op.schema.name)

    def _off_meta(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what stands for a tensor inside a composite op, which may look at devices."""
        if type(tensor) is not ShapeTensor and tensor.device.type == "meta":
            return self.stand_in(tensor)
        return tensor

    def _adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this run's stand-in for a shape tensor of the run around it."""
        if type(tensor) is not ShapeTensor or tensor.home.run is self:
            return tensor
        if id(tensor) not in self._adopted:
            metadata = tensor.metadata
            home = OwnedStorage(self, self.recorder, self._new_storage(metadata.row))
            self._adopted[id(tensor)] = tensor, make(metadata, home, tensor.requires_grad)
        return self._adopted[id(tensor)][1]

    def _key(self, value: Any, tensors: list[torch.Tensor], reads: list[int]) -> Any:
        """Return the part of a call's key that an argument makes, and note the tensors in it."""
        kind = type(value)
        if kind is ShapeTensor:
            tensors.append(value)
            reads.append(value.home.index)
            return value.metadata
        if kind in _PLAIN:
            return value
        if kind is bool:
            return _TRUE if value else _FALSE
        if kind is float:
            return (value,) if value == value else "nan"
        if kind is torch.device:
            return self.reals.device_for(value)
        if isinstance(value, (list, tuple)):
            return tuple([item if type(item) is int else self._key(item, tensors, reads) for item in value])
        if isinstance(value, torch.Tensor):
            _, metadata, index = self.reals.resolve(value)
            tensors.append(value)
            reads.append(index)
            return metadata
        described = describe(value)
        return described if described is not value else (kind.__qualname__, value)

    def _compute(
        self,
        func: Any,
        op: OpCache,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        reads: list[int],
        outcome: CachedResult,
    ) -> Any:
        """Run an op for real, on tensors that are known and small."""
        self._undo_log.before(op.schema, args, kwargs, self.recorder.fresh)
        real_args, real_kwargs = substitute((tuple(args), dict(kwargs)), lambda tensor: tensor, self.reals.place_of)
        try:
            result = func(*real_args, **real_kwargs)
        except RuntimeError:
            together = _bring_together(op.schema, real_args, real_kwargs)
            if together is None:
                raise
            result = func(*together[0], **together[1])
        items, build = take_apart(result)
        writes = [self.recorder.storage_of(item, "op") for item in items if isinstance(item, torch.Tensor)]
        signature = outcome.signature
        if signature is None:
            outputs = [
                Output(self.reals.metadata_of(item)) if isinstance(item, torch.Tensor) else Output(None, value=item)
                for item in items
            ]
            signature = self._learner.sign(op, args, kwargs, outputs, build)
        self.recorder.add(self.recorder.number(signature), reads, writes)
        if self._inside is not None:
            self._inside.append((outcome, reads, writes))
        return result

    def _resize(self, op: OpCache, tensor: torch.Tensor, metadata: Metadata) -> None:
        """Give an argument the metadata that the op gives it."""
        if type(tensor) is not ShapeTensor:
            raise self.needs_value(op.schema.name)
        with disable_torch_dispatch():
            torch.Tensor.set_(tensor, make(metadata, tensor.home))  # type: ignore[call-overload]
        tensor.metadata = metadata


def _bring_together(schema: OpSchema, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any] | None:
    """Return arguments with their real tensors, which the run takes to be on one device, on one; None if they are."""
    tensors = list(tensors_of((tuple(args), dict(kwargs))))
    if len({tensor.device for tensor in tensors}) < 2:
        return None
    written = [tensor for value in written_arguments(schema, args, kwargs) for tensor in tensors_of(value)]
    place = written[0].device if written else torch.device("cpu")
    # Of a tensor that is there already this is the tensor itself.
    return substitute((tuple(args), dict(kwargs)), lambda tensor: tensor.to(place), lambda device: device)
