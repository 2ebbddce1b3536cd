"""The dispatch mode of a real run: it sees every op, and looks into the composite ones that are no stop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    is_traceable_wrapper_subclass_type,
)

from fvflops.capture.interrupts import deferred
from fvflops.capture.real_calls import RealCalls
from fvflops.capture.recorder import Recorder
from fvflops.capture.restore import UndoLog
from fvflops.capture.shape_tensor import ShapeTensor
from fvflops.capture.signature import OpSchema, known_schema, normalise, tensors_of

_mode_of_kind, _FAKE = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.FAKE


def is_foreign(types: Sequence[type]) -> bool:
    """Return whether a wrapper (DTensor, a quantised weight) is to run its own rule."""
    return any(cls is not ShapeTensor and is_traceable_wrapper_subclass_type(cls) for cls in types)


class WrapperAware(TorchDispatchMode):
    """A dispatch mode that leaves wrappers to themselves, and sees the ops inside."""

    supports_higher_order_operators = True
    recorder: Recorder

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would wrap the handler, at 1 µs a call, against a compiler that does not run while a recording lasts.
        return False

    def leave_to_wrapper(self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what makes torch ask the wrapper; of a DTensor's composite op the parts are asked for.

        For a composite op DTensor has no rule, and would try its parts out at the global shape, in sight of this mode.
        """
        if known_schema(func).composite and any(cls.__name__ == "DTensor" for cls in types):
            with self:
                return func.decompose(*args, **kwargs)
        return NotImplemented


def is_fake(types: Sequence[type]) -> bool:
    """Return whether a call is torch's own reasoning about shapes (DTensor's sharding rules), not the model's work."""
    if types:
        return FakeTensor in types
    return _mode_of_kind(_FAKE) is not None


class RecordingMode(WrapperAware):
    """A dispatch mode that hands every op call to a recorder, and what it overwrites to an undo log if there is one."""

    def __init__(self, recorder: Recorder, undo_log: UndoLog | None = None) -> None:
        super().__init__()
        self.recorder = recorder
        self._undo_log = undo_log
        self._calls = RealCalls(recorder)
        # What is known of an op, whether it is looked into, what makes the call, and the op.
        self._plans: dict[int, tuple[OpSchema, bool, Any, Any]] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        recorder = self.recorder
        meter = recorder.meter
        came = 0 if meter is None else meter.clock()
        if types and is_foreign(types):
            return self.leave_to_wrapper(func, types, args, kwargs)
        if recorder.paused or is_fake(types):
            return func(*args, **kwargs)
        plan = self._plans.get(id(func))  # an op hashes itself in Python, and lives as long as its plan
        if plan is None:
            schema = known_schema(func)
            # Of most ops torch's own function, without the frame that does nothing but call it.
            run = func._op if type(func) is torch._ops.OpOverload else func
            plan = schema, schema.composite and schema.name not in recorder.stops_at, run, func
            self._plans[id(func)] = plan
        schema, looks_inside, run, _ = plan
        if looks_inside and _all_strided(args, kwargs):
            recorder.decompose(schema.name)
            with self:
                if meter is not None:
                    meter.lost += meter.clock() - came + meter.per_op
                return func.decompose(*args, **kwargs)
        if self._undo_log is not None:
            self._undo_log.before(schema, args, kwargs, recorder.fresh)
        noted = self._calls.note(schema, args, kwargs)
        if meter is None:
            result = run(*args, **kwargs)
            number, writes = self._calls.look(schema, noted, result)
            recorder.add(number, noted[2], writes)
            return result
        begun, clock = meter.begin(), meter.clock
        begun.ns = clock()
        result = run(*args, **kwargs)
        ended = clock()
        duration = meter.end(begun, ended)
        number, writes = self._calls.look(schema, noted, result)
        recorder.add(number, noted[2], writes, meter.columns(begun, duration))
        meter.sample()
        meter.lost += begun.ns - came + clock() - ended + meter.per_op
        return result

    def knows(self, tensors: list[Any]) -> bool:
        """Return whether tensors hold their numbers: those on the meta device do not."""
        return all(tensor.device.type != "meta" for tensor in tensors)

    def suppose(self, op: str, what: str, *, bound: bool) -> None:
        """Raise RuntimeError: with numbers nothing is to be supposed."""
        raise RuntimeError(f"{op} was to be taken for {what} in a run that has numbers")

    def launch(self, schema: OpSchema, kwargs: Mapping[str, Any], run: Callable[[], Any]) -> None:
        """Take down a call of what no mode sees into, which may write to all of its tensors, and make it."""
        if self._undo_log is not None:
            self._undo_log.before(schema, (), kwargs, self.recorder.fresh)
        inputs = normalise(schema, (), kwargs)
        with deferred(), _disable_current_modes():
            run()
        self.recorder.call(schema, inputs, (), kwargs, None)


def _all_strided(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether the composite kernel is the one that would run: sparse and nested tensors have their own."""
    return all(tensor.layout is torch.strided and not tensor.is_nested for tensor in tensors_of((args, kwargs)))
