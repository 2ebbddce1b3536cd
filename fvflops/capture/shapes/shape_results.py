"""Make the results of op calls in shape execution from their outcomes: shape tensors, views, or computed values."""

from __future__ import annotations

from collections.abc import Sequence
from threading import get_ident
from typing import Any

import torch

from fvflops.capture.lazy_values.lazy_expressions import Expression
from fvflops.capture.lazy_values.run_values import COUNTS, LazyMemory, LazyValue, LazyValues, base_name, is_dense
from fvflops.capture.real_mode import SubclassAwareMode
from fvflops.capture.recorder.recorder import Recorder
from fvflops.capture.recorder.run_position import append_row
from fvflops.capture.recorder.tensor_specs import tensors_of
from fvflops.capture.restore.restore import UndoLog, written_arguments
from fvflops.capture.shapes.concrete_tensors import ConcreteTensors, without_values
from fvflops.capture.shapes.metadata import as_lazy, is_available
from fvflops.capture.shapes.rules.data_dependent import tensors_read
from fvflops.capture.shapes.rules.missing_rules import completed_work, is_work
from fvflops.capture.shapes.rules.shape_rules import ShapeRules
from fvflops.capture.shapes.shape_cache import CachedResult, Output, ShapeCall, settings_of, unpack_result
from fvflops.capture.shapes.shape_inference import OpInference
from fvflops.capture.shapes.shape_tensor import (
    DataDependentError,
    OwnedStorage,
    ShapeTensor,
    StorageRef,
    UnsupportedError,
    make_shape_tensor,
)
from fvflops.torch_internals import disable_torch_dispatch, has_computed_kernel_for_key

# Number of elements up to which a real buffer that the run updates, such as a batch counter, is computed.
_MAX_COUNTER_NUMEL = 1 << 10


class ShapeResults(SubclassAwareMode):
    """The part of ShapeMode that makes the results of calls, and records them."""

    def __init__(self, recorder: Recorder, undo_log: UndoLog, concrete: ConcreteTensors, rules: ShapeRules) -> None:
        super().__init__()
        self.device = concrete.device
        self.recorder = recorder
        self.concrete = concrete
        self.settings = settings_of(self.device)
        self._undo_log = undo_log
        self._rules = rules
        self._lazy_values = LazyValues()
        self._inference = OpInference(self.device, self.settings, rules, concrete)
        self._indices: dict[CachedResult, int] = {}
        # The op calls inside the composite op that is being decomposed, with the storages they read and write.
        self._inner_calls: list[tuple[CachedResult, Sequence[int], Sequence[int]]] | None = None
        # By id: storages of other runs that still record, such as another thread's, and their indices in this one.
        self._shared: dict[int, tuple[StorageRef, int]] = {}
        # The outcome of the last call.
        self.last_outcome: CachedResult | None = None

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

    def has_values(self, tensors: list[Any]) -> bool:
        return self.concrete.have_values(tensors)

    def index_of(self, outcome: CachedResult) -> int:
        """Return the index of an outcome's signature in the run."""
        index = self._indices.get(outcome)
        if index is None:
            assert outcome.signature is not None
            index = self.recorder.index_of(outcome.signature)
            if outcome.cacheable:
                self._indices[outcome] = index
        return index

    def shape_tensor_for(self, tensor: torch.Tensor) -> ShapeTensor:
        """Return a shape tensor for a real tensor, a leaf that requires grad if the tensor does."""
        _, metadata, index = self.concrete.resolve(tensor)
        shape_copy = make_shape_tensor(metadata, StorageRef(self, index), tensor.requires_grad)
        if isinstance(tensor, torch.nn.Parameter):
            shape_copy._is_param = True
        return shape_copy

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

    def _infer(self, call: ShapeCall) -> CachedResult:
        """Infer the outcome of a call that is not cached, or cached for another default dtype."""
        begun = self._begin_op()
        try:
            outcome = self._inference.infer(call)
            if call.op.reads_values and not outcome.concrete:
                self.recorder.python_reads.record(tensors_read(call.op.schema.name, call.args, call.kwargs))
            return outcome
        except Exception as error:  # record it: the model may catch it and take another branch
            self.recorder.fail(call.op.schema.name, error)
            raise
        finally:
            self._end_op(begun)

    def _results(self, call: ShapeCall, outcome: CachedResult) -> Any:
        if outcome.promoted is not None and outcome.promoted is not torch.get_default_dtype():
            outcome = self._infer(call)
        if outcome.concrete or (
            self._updates_counter(outcome, call.tensors) and not call.op.needs_other_ranks(call.args, call.kwargs)
        ):
            return self._compute(call, outcome)
        return self._make_lazy_results(call, outcome) if outcome.lazy else self._make_results(call, outcome)

    def _updates_counter(self, outcome: CachedResult, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether a call updates a counter, such as a buffer with the number of batches."""
        written = [tensors[index] for index in outcome.written if type(tensors[index]) is not ShapeTensor]
        is_small = written and not outcome.resized and all(tensor.numel() <= _MAX_COUNTER_NUMEL for tensor in written)
        return bool(is_small) and self.concrete.have_values(tensors)

    def _make_results(self, call: ShapeCall, outcome: CachedResult) -> Any:
        tensors, reads = call.tensors, call.reads
        if outcome.resized and call.op.changes_view and not any(type(tensor) is ShapeTensor for tensor in tensors):
            return self._change_view(call, outcome)
        for index in outcome.written:
            if type(tensors[index]) is not ShapeTensor:
                self.concrete.invalidate(tensors[index])
        for index, resized in outcome.resized:
            tensor, name = tensors[index], call.op.schema.name
            if type(tensor) is not ShapeTensor:
                raise UnsupportedError(f"{name} changes the shape of a tensor that exists outside the run")
            with disable_torch_dispatch():
                torch.Tensor.set_(tensor, make_shape_tensor(resized, tensor.storage_ref))  # type: ignore[call-overload]
            tensor.metadata = resized
        results: list[Any] = []
        writes: list[int] = []
        real_views: list[Any] = []
        for metadata, source, same, value, row, _ in outcome.outputs:
            if metadata is None:
                results.append(completed_work(results) if is_work(value) else value)
                if isinstance(value, torch.Tensor):
                    writes.append(self.recorder.storage_of(value, "op"))
            elif source is None:
                index = append_row(self.recorder.storages, (*row,))
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
                    real_views = real_views or _view(call, outcome)
                    results.append(real_views[len(results)])
        result = results[0] if outcome.build is None else outcome.build(results)
        self._record(outcome, reads, writes)
        return result

    def _make_lazy_results(self, call: ShapeCall, outcome: CachedResult) -> Any:
        """Return the results of a call, with the values of tensors that it returns or writes to as expressions."""
        name, args, kwargs = call.op.schema.name, call.args, call.kwargs
        if base_name(name) in COUNTS and (counted := self._lazy_values.count(name, args, kwargs)) is not None:
            self._record(outcome, call.reads, [self.recorder.storage_of(counted, "op")])
            return counted
        outputs = outcome.outputs
        value = None
        if len(outputs) == 1 and outputs[0].metadata is not None and (outputs[0].source is None or outputs[0].same):
            metadata = outputs[0].metadata
            value = self._lazy_values.result(call.func, name, args, kwargs, metadata.shape, metadata.dtype)
        result = self._make_results(call, outcome)
        for index in outcome.written:
            self._forget_values(call.tensors[index], value)
        for item, output in zip(unpack_result(result)[0], outputs, strict=True):
            if type(item) is not ShapeTensor or output.same:
                continue
            lazy = None
            if output.source is None:
                dense = is_dense(item.metadata.shape, item.metadata.stride)
                lazy = LazyValue(LazyMemory(value, item.metadata.stride), 0) if value is not None and dense else None
            elif (base := getattr(call.tensors[output.source], "lazy", None)) is not None:
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

    def _change_view(self, call: ShapeCall, outcome: CachedResult) -> Any:
        """Return a real tensor with the shape and strides that an op gives it; they are restored with the model."""
        if call.op.schema.name.startswith("aten::resize"):  # it may allocate
            self._undo_log.before(call.op.schema, call.args, call.kwargs, self.recorder.fresh)
        begun = self._begin_op(call.reads)
        try:
            result = call.func(*call.args, **call.kwargs)
        finally:
            self._end_op(begun, call.reads)
        self.concrete.refresh(call.args[0])
        self._record(outcome, call.reads, [self.recorder.storage_of(call.args[0], "op")])
        return result

    def _compute(self, call: ShapeCall, outcome: CachedResult) -> Any:
        """Compute an op on known and small tensors."""
        op, reads = call.op, call.reads
        if op.reads_values:
            self.recorder.python_reads.record(tensors_read(op.schema.name, call.args, call.kwargs))
        elif op.random:
            self.recorder.python_reads.has_draws = True
        self._undo_log.before(op.schema, call.args, call.kwargs, self.recorder.fresh)
        real_args, real_kwargs = call.with_replaced(lambda tensor: tensor, self.concrete.creation_device)
        begun = self._begin_op(reads)
        try:
            result = call.func(*real_args, **real_kwargs)
        except RuntimeError as error:
            # A kernel that this machine lacks. One that refuses its arguments raises in a real run too.
            if isinstance(error, NotImplementedError) or "not implemented for" in str(error):  # torch 2.6 only says so
                # On the CPU it may be a kernel of the GPU whose kernels a plan chooses.
                has_kernel = self.device.type != "cpu" or has_computed_kernel_for_key(call.func.name(), "CPU")
                if (is_available(self.device) and has_kernel) or outcome.written or not outcome.outputs:
                    raise
                args, kwargs = call.with_replaced(self._without_values, self.concrete.device_for)
                with self:
                    return call.func(*args, **kwargs)
            moved = _move_to_one_device(call._replace(args=real_args, kwargs=real_kwargs))
            if moved is None:
                raise
            result = call.func(*moved[0], **moved[1])
        finally:
            self._end_op(begun, reads)
        if op.changes_view:
            self.concrete.refresh(call.args[0])
        items, build = unpack_result(result)
        writes = [self.recorder.storage_of(item, "op") for item in items if isinstance(item, torch.Tensor)]
        signature = outcome.signature
        if signature is None:
            outputs = [
                Output(self.concrete.metadata_of(item)) if isinstance(item, torch.Tensor) else Output(None, value=item)
                for item in items
            ]
            signature = self._inference.sign(call, outputs, build)
        self.recorder.add(self.recorder.index_of(signature), reads, writes)
        if self._inner_calls is not None:
            self._inner_calls.append((outcome, reads, writes))
        return result

    def _without_values(self, tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) is ShapeTensor:
            return tensor
        _, metadata, index = self.concrete.resolve(tensor)
        return make_shape_tensor(without_values(metadata), StorageRef(self, index), tensor.requires_grad)

    def _begin_op(self, reads: Sequence[int] = ()) -> bool:
        """Attribute work outside the dispatcher, and new tensors, to the op that is running, if it is the outermost.

        `reads`: the memory on which its kernel runs.
        """
        unseen_work = self.recorder.unseen
        if unseen_work is None:
            return False
        unseen_work.exported.check(reads)
        if unseen_work.in_op:
            return False
        unseen_work.busy.add(get_ident())
        return True

    def _end_op(self, begun: bool, reads: Sequence[int] = ()) -> None:
        unseen_work = self.recorder.unseen
        if unseen_work is not None:
            unseen_work.exported.accept(reads)  # the kernel's writes are the op's, even undeclared ones
            if begun:
                unseen_work.busy.discard(get_ident())


def _view(call: ShapeCall, outcome: CachedResult) -> list[Any]:
    """Return the results of a view op: real views of real tensors, None for others."""
    tensors = call.tensors
    if not any(type(tensor) is ShapeTensor for tensor in tensors):
        return unpack_result(call.func(*call.args, **call.kwargs))[0]
    # Ops that return views of several tensors, such as broadcast_tensors, do not change storage offsets.
    return [
        None
        if metadata is None or source is None or type(tensors[source]) is ShapeTensor
        else tensors[source].as_strided(metadata.shape, metadata.stride)
        for metadata, source, *_ in outcome.outputs
    ]


def _move_to_one_device(call: ShapeCall) -> tuple[Any, Any] | None:
    """Return arguments with tensors moved to one device, None if they are on one; the run reports one for all."""
    tensors = list(tensors_of((call.args, call.kwargs)))
    if len({tensor.device for tensor in tensors}) < 2:
        return None
    written = written_arguments(call.op.schema, call.args, call.kwargs)
    target = next((tensor.device for value in written for tensor in tensors_of(value)), torch.device("cpu"))
    # `to` returns the tensor itself if it is there already.
    return call.with_replaced(lambda tensor: tensor.to(target), lambda device: device)
