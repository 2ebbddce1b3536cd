"""The dispatch mode of a real run: it sees every op, and looks into the composite ones that are no stop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fvflops.capture.real.signature_cache import SignatureCache, have_values
from fvflops.capture.recorder.recorder import Recorder
from fvflops.capture.recorder.signature import OpSchema, describe_tensor, known_schema, normalise, tensors_of
from fvflops.capture.restore.interrupts import deferred
from fvflops.capture.restore.restore import UndoLog
from fvflops.capture.shapes.shape_tensor import ShapeTensor
from fvflops.capture.unseen.fake_tensors import is_reasoning
from fvflops.torch_internals import OpOverload, TorchDispatchMode, disable_dispatch_modes, is_wrapper_subclass_type
from fvflops.trace import Signature

# What a FakeTensor or a wrapper is asked by torch, and is no op of the model's.
_QUESTIONS = frozenset({"prim::device", "prim::layout"})


def has_wrapper_subclass(types: Sequence[type]) -> bool:
    """Return whether a wrapper (DTensor, a quantised weight) is to run its own rule."""
    return any(cls is not ShapeTensor and is_wrapper_subclass_type(cls) for cls in types)


class SubclassAwareMode(TorchDispatchMode):
    """A dispatch mode that leaves wrappers to themselves, and sees the ops inside."""

    supports_higher_order_operators = True
    recorder: Recorder

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would wrap the handler, at 1 µs a call, against a compiler that does not run while a recording lasts.
        return False

    def defer_to_subclass(
        self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Return what makes torch ask the wrapper; of a DTensor's composite op the parts are asked for.

        For a composite op DTensor has no rule, and would try its parts out at the global shape, in sight of this mode.
        """
        if known_schema(func).composite and any(cls.__name__ == "DTensor" for cls in types):
            with self:
                return func.decompose(*args, **kwargs)
        return NotImplemented


class RecordingMode(SubclassAwareMode):
    """A dispatch mode that hands every op call to a recorder, and what it overwrites to an undo log if there is one."""

    def __init__(self, recorder: Recorder, undo_log: UndoLog | None = None) -> None:
        super().__init__()
        self.recorder = recorder
        self._undo_log = undo_log
        self._calls = SignatureCache(recorder)
        # What is known of an op, whether it is looked into, what makes the call, and the op.
        self._plans: dict[int, tuple[OpSchema, bool, Any, Any]] = {}
        self._lift = torch.ops.aten.lift_fresh.default

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        recorder = self.recorder
        meter = recorder.probe
        came = 0 if meter is None else meter.clock()
        if types:
            if recorder.unseen is not None:
                recorder.unseen.met_subclass()
            if has_wrapper_subclass(types):
                return self.defer_to_subclass(func, types, args, kwargs)
        if recorder.paused or not recorder.recording or is_reasoning(types):
            return func(*args, **kwargs)
        plan = self._plans.get(id(func))  # an op hashes itself in Python, and lives as long as its plan
        if plan is None:
            schema = known_schema(func)
            # Of most ops torch's own function, without the frame that does nothing but call it.
            run = func._op if type(func) is OpOverload else func
            if schema.name in _QUESTIONS:
                run = None
            plan = schema, schema.composite and schema.name not in recorder.stops_at, run, func
            self._plans[id(func)] = plan
        schema, looks_inside, run, _ = plan
        if run is None:
            return func(*args, **kwargs)
        if looks_inside and _all_strided(args, kwargs):
            recorder.decompose(schema.name)
            with self:
                if meter is not None:
                    meter.overhead_ns += meter.clock() - came + meter.dispatch_ns
                return func.decompose(*args, **kwargs)
        if self._undo_log is not None:
            self._undo_log.before(schema, args, kwargs, recorder.fresh)
        unseen = recorder.unseen
        if unseen is None:
            noted = self._calls.note(schema, args, kwargs)
        else:
            is_constant = func is self._lift
            if is_constant:
                unseen.lifting(True)
            noted = self._calls.note(schema, args, kwargs)
            unseen.before(schema, args, kwargs, noted[2])
            if is_constant:
                unseen.lifting(False)
        if meter is None:
            if unseen is None:
                result = run(*args, **kwargs)
            else:
                unseen.in_op = True
                try:
                    result = run(*args, **kwargs)
                finally:
                    unseen.in_op = False
            number, writes = self._calls.spec_key(schema, noted, result)
            recorder.add(number, noted[2], writes)
            if unseen is not None:
                unseen.after(schema, args, kwargs, noted[2], result, writes)
            return result
        begun, clock = meter.begin(), meter.clock
        begun.ns = clock()
        result = run(*args, **kwargs)
        ended = clock()
        duration = meter.end(begun, ended)
        number, writes = self._calls.spec_key(schema, noted, result)
        recorder.add(number, noted[2], writes, meter.columns(begun, duration))
        if unseen is not None:
            unseen.after(schema, args, kwargs, noted[2], result, writes)
        meter.sample()
        meter.overhead_ns += begun.ns - came + clock() - ended + meter.dispatch_ns
        return result

    def for_thread(self) -> RecordingMode:
        """Return a mode that does the same in another thread of the run."""
        return RecordingMode(self.recorder, self._undo_log)

    def has_values(self, tensors: list[Any]) -> bool:
        """Return whether tensors hold their numbers: those on the meta device do not."""
        return have_values(tensors)

    def assume_outcome(self, op: str, what: str, *, bound: bool) -> None:
        """Raise RuntimeError: with numbers nothing is to be supposed."""
        raise RuntimeError(f"{op} was to be taken for {what} in a run that has numbers")

    def launch(self, schema: OpSchema, kwargs: Mapping[str, Any], run: Callable[[], Any], source: str) -> Any:
        """Record a launch of a kernel, which may write to all of its tensors, and make it."""
        if self._undo_log is not None:
            self._undo_log.before(schema, (), kwargs, self.recorder.fresh)
        inputs = normalise(schema, (), kwargs)
        outputs = tuple(map(describe_tensor, self.recorder.uninitialised(tensors_of(kwargs))))
        with deferred(), disable_dispatch_modes():
            result = run()
        signature = Signature(schema.name, schema.names, inputs, outputs, schema.text, source)
        self.recorder.append_call(signature, self.recorder.storages_of(kwargs.values()), ())
        if self.recorder.unseen is not None:
            self.recorder.unseen.wrote(kwargs)
        return result


def _all_strided(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether the composite kernel is the one that would run: sparse and nested tensors have their own."""
    return all(tensor.layout is torch.strided and not tensor.is_nested for tensor in tensors_of((args, kwargs)))
