"""The dispatch mode of a shape run: ops are answered from the memo, with tensors that have no numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from fvflops.capture.dispatch import WrapperAware, is_fake, is_foreign
from fvflops.capture.infer import META, Inference, substitute, take_apart
from fvflops.capture.memo import KnownOp, Outcome, Output, intern_signature, known_op
from fvflops.capture.metadata import Metadata, intern, is_here, metadata_of
from fvflops.capture.recorder import Recorder
from fvflops.capture.restore import UndoLog
from fvflops.capture.rules import ShapeRules
from fvflops.capture.rules.quick import quickly
from fvflops.capture.shape_tensor import Home, Place, ShapeTensor, ValueNeeded, make
from fvflops.capture.signature import describe, describe_result, describe_tensor, normalise
from fvflops.trace import Signature, TensorSpec

# Tensors of up to this many elements keep their numbers, if they are of integers or bools (ids, positions, masks,
# lengths) or made of nothing but such and constants.
CONCRETE_LIMIT = 1 << 20

# A buffer of up to this many elements that is changed by known numbers is a counter, and keeps counting.
_COUNTER = 1 << 10

_PLAIN = frozenset({int, type(None), str, torch.dtype, torch.layout, torch.memory_format, complex})
_WHOLE = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
_REAL = frozenset({torch.Tensor, torch.nn.Parameter})
_TRUE, _FALSE = object(), object()  # True and 1 are equal as keys, and not to an op

_OURS = (ShapeTensor,)

# An op's outcomes, what is known of it, what to do instead of looking there, and the op.
_Plan = tuple[dict[tuple[Any, ...], Outcome], KnownOp, Callable[..., Any] | None, Any]
_Seen = tuple[torch.Tensor, Metadata, int]


class ShapeMode(WrapperAware):
    """A dispatch mode that computes shapes instead of numbers, and hands every op call to a recorder.

    Parameters, buffers and inputs of floating point count as unknown, and so does what comes of them; what is made of
    small integer and bool tensors and constants alone is computed. Every tensor answers for `device`, where `homes` are
    the real devices of the model and its inputs. `nested` says that another shape run goes on around this one.
    `failure` is the first thing that a shape run could not do: the op's name, the module's, and the error.
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
        self.rules = rules
        self.failure: tuple[str, str, Exception] | None = None
        self._recorder = recorder
        recorder.describe = self._spec
        self._undo_log = undo_log
        self._devices = {META: device, **dict.fromkeys(homes, device)}
        if not is_here(device):
            self._devices[torch.device("cpu")] = device
        self._plans: dict[int, _Plan] = {}
        self._seen: dict[int, _Seen] = {}
        self._lost: set[int] = set()
        self._held = 0
        self._numbers: dict[int, int] = {}
        # The ops seen inside the composite op that is being looked into, and the storages they read and write.
        self._inside: list[tuple[Outcome, Sequence[int], Sequence[int]]] | None = None
        self._mine: dict[Metadata, Metadata] = {}
        self._nested = nested
        self._adopted: dict[int, tuple[torch.Tensor, ShapeTensor]] = {}

    def know(
        self,
        tensors: Sequence[torch.Tensor],
        metadata: Sequence[Metadata],
        storages: Sequence[torch.UntypedStorage],
        rows: Sequence[tuple[Any, ...]],
    ) -> None:
        """Take down the storages of tensors that exist before the run, and throughout it."""
        numbers = self._recorder.know(storages, rows)
        mine = self._mine
        for item in set(metadata):
            mine.get(item) or self._adapt(item)
        self._held = len(self._recorder.storages)
        adapted = map(mine.__getitem__, metadata)
        self._seen.update(zip(map(id, tensors), zip(tensors, adapted, numbers, strict=True), strict=True))

    def close(self) -> None:
        """Let go of the recorder, which holds this mode: a cycle would keep the model's tensors alive for a while."""
        self._recorder.describe = describe_tensor

    def _adapt(self, metadata: Metadata) -> Metadata:
        """Return the metadata that a real tensor has in this run: on its device, known if small and whole."""
        known = metadata.dtype in _WHOLE and _could_stay(metadata)
        device = self._devices.get(metadata.device, metadata.device)
        adapted = intern(metadata.shape, metadata.stride, metadata.dtype, device, known, metadata.bits)
        self._mine[metadata] = adapted
        return adapted

    def stand_in(self, tensor: torch.Tensor) -> ShapeTensor:
        """Return a shape tensor for a tensor that exists before the run: a leaf that wants a gradient where it does."""
        _, metadata, index = self._seen.get(id(tensor)) or self._look(tensor)
        twin = make(metadata, Place(self, index), tensor.requires_grad)
        if isinstance(tensor, torch.nn.Parameter):
            twin._is_param = True
        return twin

    def needs_value(self, name: str) -> ValueNeeded:
        """Return the error of an op that asks for a number which is not there."""
        error = ValueNeeded(f"{name} needs numbers, and this run has only shapes")
        self._fail(name, error)
        return error

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if self._nested:
            return self._answer_apart(func, types, args, kwargs or {})
        plan = self._plans.get(id(func))  # an op hashes itself in Python, and lives as long as its plan
        if plan is None:
            plan = self._plan(func)
        outcomes, op, special, _ = plan
        if types != _OURS:
            if is_foreign(types):
                return self.leave_to_wrapper(func, types, args, kwargs or {})
            if is_fake(types):
                return func(*args, **(kwargs or {}))
        known = self._seen
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
        if op.factory:
            key.append(self.device)
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
            recorder = self._recorder
            storages = recorder.storages
            index = len(storages)
            storages.append(fresh.row)
            result: Any = make(fresh, Home(self, recorder, index))
            self._note(outcome, reads, (index,))
            return result
        source = outcome.same
        if source is not None and type(tensors[source]) is ShapeTensor and not outcome.concrete:
            self._note(outcome, reads, (reads[source],))
            return tensors[source]
        if outcome.concrete:
            return self._compute(func, op, args, kwargs or {}, reads, outcome)
        for index in outcome.written:
            if type(tensors[index]) is not ShapeTensor:
                if not outcome.grown and tensors[index].numel() <= _COUNTER and self._values_at_hand(tensors):
                    return self._compute(func, op, args, kwargs or {}, reads, outcome)
                self._lose(tensors[index])
        for index, grown in outcome.grown:
            self._grow(func, args, kwargs or {}, tensors[index], grown)
        results: list[Any] = []
        writes: list[int] = []
        real: list[Any] = []
        for metadata, source, same, value in outcome.outputs:
            if metadata is None:
                results.append(value)
                if isinstance(value, torch.Tensor):
                    writes.append(self._recorder.storage_of(value, "op"))
            elif source is None:
                index = self._new_storage(metadata)
                writes.append(index)
                results.append(make(metadata, Home(self, self._recorder, index)))
            else:
                tensor = tensors[source]
                writes.append(reads[source])
                if same:
                    results.append(tensor)
                elif type(tensor) is ShapeTensor:
                    results.append(make(metadata, tensor.home))
                else:
                    # A view of a real tensor is made for real: it costs nothing and aliases.
                    real = real or self._view(func, args, kwargs or {}, tensors, outcome)
                    results.append(real[len(results)])
        result = results[0] if outcome.build is None else outcome.build(results)
        self._note(outcome, reads, writes)
        return result

    def _answer_apart(self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Answer a call, unseen by the shape run around this one."""
        args, kwargs = substitute((tuple(args), dict(kwargs)), self._adopt, lambda device: device)
        self._nested = False
        try:
            with _disable_current_modes():
                return self.__torch_dispatch__(func, types, args, kwargs)
        finally:
            self._nested = True

    def _view(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        tensors: Sequence[torch.Tensor],
        outcome: Outcome,
    ) -> list[Any]:
        """Return the results of a view op, real views of the tensors that are real; None stands for the others."""
        if not any(type(tensor) is ShapeTensor for tensor in tensors):
            return take_apart(func(*args, **kwargs))[0]
        # Ops that make views of several tensors at once, as broadcast_tensors, begin where their argument begins.
        return [
            None
            if metadata is None or source is None or type(tensors[source]) is ShapeTensor
            else tensors[source].as_strided(metadata.shape, metadata.stride)
            for metadata, source, _, _ in outcome.outputs
        ]

    def _new_storage(self, metadata: Metadata) -> int:
        storages = self._recorder.storages
        storages.append(metadata.row)
        return len(storages) - 1

    def _note(self, outcome: Outcome, reads: Sequence[int], writes: Sequence[int]) -> None:
        recorder = self._recorder
        number = self._numbers.get(id(outcome))
        if number is None:
            assert outcome.signature is not None
            number = recorder.number(outcome.signature)
            if outcome.remembered:
                self._numbers[id(outcome)] = number
        if recorder.backward:
            recorder.add(number, reads, writes)
        else:
            recorder.events.append(("op", number, recorder.stack, "forward", 0, reads, writes))
        if self._inside is not None:
            self._inside.append((outcome, reads, writes))

    def _plan(self, func: Any) -> _Plan:
        op = known_op(func)
        plan: _Plan = op.outcomes, op, None, func
        if op.schema.composite and op.schema.name not in self._recorder.stops_at:
            self._recorder.decompose(op.schema.name)
            expansions = op.expansions.setdefault(self._recorder.stops_at, {})
            plan = expansions, op, ShapeMode._decompose, func
        self._plans[id(func)] = plan
        return plan

    def _decompose(
        self,
        func: Any,
        op: KnownOp,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        reads: list[int],
        key: tuple[Any, ...],
    ) -> Any:
        """Look into a composite op; if that comes down to one new tensor of one op, remember that."""
        self._recorder.decompose(op.schema.name)
        args, kwargs = substitute((tuple(args), dict(kwargs)), self._off_meta, self._stands_for)
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
            if same and outcome.fresh is not None and outcome.remembered:
                op.expansions[self._recorder.stops_at][key] = outcome
        return result

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
            home = Home(self, self._recorder, self._new_storage(metadata))
            self._adopted[id(tensor)] = tensor, make(metadata, home, tensor.requires_grad)
        return self._adopted[id(tensor)][1]

    def _stands_for(self, device: torch.device) -> torch.device:
        return self._devices.get(device, device)

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
            return self._devices.get(value, value)
        if isinstance(value, (list, tuple)):
            return tuple([item if type(item) is int else self._key(item, tensors, reads) for item in value])
        if isinstance(value, torch.Tensor):
            seen = self._seen.get(id(value))
            _, metadata, index = self._look(value) if seen is None else seen
            tensors.append(value)
            reads.append(index)
            return metadata
        described = describe(value)
        return described if described is not value else (kind.__qualname__, value)

    def _look(self, tensor: torch.Tensor) -> _Seen:
        """Return a real tensor with its metadata and the number of its storage."""
        if tensor.layout is not torch.strided or tensor.is_nested:
            error = NotImplementedError(f"a tensor of layout {tensor.layout} has no shape rules here")
            self._fail("", error)
            raise error
        real = metadata_of(tensor)
        metadata = self._mine.get(real) or self._adapt(real)
        number = self._recorder.storage_of(tensor, "outside")
        if tensor.untyped_storage()._cdata in self._lost:
            metadata = _unknown(metadata)
        elif not metadata.known and number >= self._held and _could_stay(real):
            # A constant that the model makes, or keeps apart from its parameters, buffers and inputs.
            metadata = intern(real.shape, real.stride, real.dtype, metadata.device, True, real.bits)
        return tensor, metadata, number

    def _learn(
        self,
        func: Any,
        op: KnownOp,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        tensors: list[torch.Tensor],
        key: tuple[Any, ...],
    ) -> Outcome:
        """Return the outcome of a call that the memo does not hold, and remember it."""
        name = op.schema.name
        metadata = [self._metadata_of(tensor) for tensor in tensors]
        known = all(item.known for item in metadata)
        inference = Inference(op.schema, tensors, metadata, self.device, self._stands_for)
        rule = quickly(name, self.rules.instead(name) or func)
        remember = True
        try:
            try:
                outcome = inference.run(rule, args, kwargs)
            except Exception as error:
                computable = known and tensors and isinstance(func, torch._ops.OpOverload)
                if computable or (self.rules.needs_values(name) and self._values_at_hand(tensors)):
                    outcome, remember = Outcome(None, concrete=True), bool(computable)
                else:
                    outcome, remember = self._learn_by_values(name, inference, rule, args, kwargs, error), False
        except Exception as error:
            self._fail(name, error)
            raise
        if known and all(item.metadata is None or _stays(item.metadata, op) for item in outcome.outputs):
            outcome.run_for_real()
        if outcome.signature is None and not (outcome.concrete and not outcome.outputs):
            outcome.signature = self._signature(op, args, kwargs, outcome.outputs, outcome.build)
        outcome.remembered = remember
        if remember:
            op.outcomes[key] = outcome
        return outcome

    def _learn_by_values(
        self,
        name: str,
        inference: Inference,
        rule: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        error: Exception,
    ) -> Outcome:
        """Return the outcome of a call that looks at numbers: those that are known, or those that are assumed."""
        if any(item.known for item in inference.metadata):
            try:
                return inference.run(rule, args, kwargs, keep_known=True)
            except Exception as second:
                error = second
        sized = self.rules.sized(name)
        if sized is not None:
            return inference.run(sized, args, kwargs)
        if self.rules.needs_values(name) and not isinstance(error, ValueNeeded):
            raise ValueNeeded(f"{name} needs numbers, and this run has only shapes") from error
        raise error

    def _signature(
        self,
        op: KnownOp,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        outputs: Sequence[Output],
        build: Callable[[list[Any]], Any] | None,
    ) -> Signature:
        schema = op.schema
        plain_args, plain_kwargs = substitute((tuple(args), dict(kwargs)), self._spec, self._stands_for)
        results = [item.value if item.metadata is None else item.metadata.spec for item in outputs]
        results = [self._spec(item) if isinstance(item, torch.Tensor) else item for item in results]
        return intern_signature(
            Signature(
                schema.name,
                schema.names,
                normalise(schema, plain_args, plain_kwargs),
                describe_result(results[0] if build is None else build(results)),
                schema.text,
            )
        )

    def _spec(self, tensor: torch.Tensor) -> TensorSpec:
        plain = tensor.layout is torch.strided and not tensor.is_nested
        return self._metadata_of(tensor).spec if plain else describe_tensor(tensor)

    def _metadata_of(self, tensor: torch.Tensor) -> Metadata:
        if type(tensor) is ShapeTensor:
            return tensor.metadata
        seen = self._seen.get(id(tensor))
        return (self._look(tensor) if seen is None else seen)[1]

    def _values_at_hand(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether all tensors are real and hold the numbers that a real run would see."""
        return bool(tensors) and all(
            type(tensor) is not ShapeTensor
            and tensor.device.type != "meta"
            and tensor.untyped_storage()._cdata not in self._lost
            for tensor in tensors
        )

    def _compute(
        self,
        func: Any,
        op: KnownOp,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        reads: list[int],
        outcome: Outcome,
    ) -> Any:
        """Run an op for real, on tensors that are known and small."""
        self._undo_log.before(op.schema, args, kwargs, self._recorder.fresh)
        here = torch.device("cpu")
        real_args, real_kwargs = substitute(
            (tuple(args), dict(kwargs)),
            lambda tensor: tensor,
            lambda device: here if device in self._devices else device,
        )
        result = func(*real_args, **real_kwargs)
        items, build = take_apart(result)
        signature = outcome.signature
        if signature is None:
            outputs = [
                Output(self._metadata_of(item)) if isinstance(item, torch.Tensor) else Output(None, value=item)
                for item in items
            ]
            signature = self._signature(op, args, kwargs, outputs, build)
        writes = [self._recorder.storage_of(item, "op") for item in items if isinstance(item, torch.Tensor)]
        self._recorder.add(self._recorder.number(signature), reads, writes)
        if self._inside is not None:
            self._inside.append((outcome, reads, writes))
        return result

    def _lose(self, tensor: torch.Tensor) -> None:
        """Note that a real storage was to be written to: what it holds is not what a real run would see there."""
        storage = tensor.untyped_storage()._cdata
        if storage not in self._lost:
            self._lost.add(storage)
            for key, (seen, metadata, number) in list(self._seen.items()):
                if metadata.known and seen.untyped_storage()._cdata == storage:
                    self._seen[key] = seen, _unknown(metadata), number

    def _grow(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tensor: torch.Tensor, metadata: Metadata
    ) -> None:
        """Give an argument the metadata that the op gives it."""
        if type(tensor) is not ShapeTensor:
            raise self.needs_value(known_op(func).schema.name)
        with torch._C._DisableTorchDispatch():
            torch.Tensor.set_(tensor, make(metadata, tensor.home))  # type: ignore[call-overload]
        tensor.metadata = metadata

    def _fail(self, name: str, error: Exception) -> None:
        if self.failure is None:
            self.failure = name, self._recorder.where(), error


class OnThisMachine(TorchFunctionMode):
    """A function mode that asks for the CPU where a model asks for a device that this machine has not.

    torch would refuse before any op is dispatched.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._kind = device.type

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") == self._kind and args:  # Tensor.cuda()
            return args[0]
        here = torch.device("cpu")
        args, kwargs = substitute(
            (tuple(map(self._parse, args)), {name: self._parse(value) for name, value in (kwargs or {}).items()}),
            lambda tensor: tensor,
            lambda device: here if device.type == self._kind else device,
        )
        return func(*args, **kwargs)

    def _parse(self, value: Any) -> Any:
        return torch.device(value) if isinstance(value, str) and value.partition(":")[0] == self._kind else value


def _could_stay(metadata: Metadata) -> bool:
    return metadata.device.type != "meta" and metadata.numel <= CONCRETE_LIMIT


def _stays(metadata: Metadata, op: KnownOp) -> bool:
    """Return whether what an op makes of known numbers is computed: random activations, as for a trial, are not."""
    return metadata.numel <= (1 if op.random and metadata.dtype not in _WHOLE else CONCRETE_LIMIT)


def _unknown(metadata: Metadata) -> Metadata:
    return intern(metadata.shape, metadata.stride, metadata.dtype, metadata.device, False, metadata.bits)
