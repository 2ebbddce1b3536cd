"""Detect work that bypasses the dispatcher, by its effects on tensors.

Kernels called by pointer (ctypes, pybind11), NumPy and other processes compute without op calls. Their results are
detected when a recorded op reads, or a module returns,

- memory that an op such as `aten::empty` left uninitialised and no recorded op wrote to;
- a tensor that no recorded op created, if it is freed during the run or was created after an export of tensor data;
- contents that have changed since the last recorded op.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

import torch

from fvflops.capture.recorder.caller_lines import SourceLine, find_source_line, source_line_of
from fvflops.capture.recorder.tensor_specs import PLAIN_TENSORS, OpSchema, describe_tensor, tensors_of
from fvflops.capture.restore.restore import writes_to_arguments, written_arguments
from fvflops.capture.unseen.exported_memory import (
    MEMORY,
    SAMPLE_BYTES,
    ExportedMemory,
    Sample,
    address_of,
    find_address,
    read_bytes,
    read_fewer,
    read_sample,
    with_storages,
)
from fvflops.capture.unseen.op_kinds import COPIES, METADATA_ONLY, SET_STORAGE, UNINITIALISED
from fvflops.capture.unseen.unfinished_work import UnfinishedWork, address_of_array, describe_array
from fvflops.capture.unseen.unseen_reporter import Site, UnseenReporter, is_called_by_torch
from fvflops.torch_internals import peek_interpreter
from fvflops.trace import TensorSpec


class UnseenWork(UnseenReporter):
    """Detects unseen work in one run.

    `has_values`: tensors have values, so that the contents of strided tensors in CPU memory can be compared. In shape
    execution (`is_real` false) only inputs, buffers, constants and small integer tensors have memory to access: of
    these, memory that was exported is compared.
    """

    def __init__(
        self, recorder: Any, *, is_real: bool = True, has_values: bool = True, runs_results: bool = False
    ) -> None:
        super().__init__(recorder)
        self.is_real = is_real
        self._has_values = has_values
        # Whether data of the run was exported; new tensors may then be results computed from it.
        self._was_exported = False
        self.exported = ExportedMemory(self._report_exported)
        # Where arrays were last exported, from which a result that is an array may have been computed.
        self._array_site: Site | None = None
        # Tensors that no recorded op created; a result is freed during the run, a constant is not.
        self._suspects: dict[int, tuple[Site, TensorSpec]] = {}
        # Where memory was left uninitialised, and its contents: if unchanged, nothing was computed there.
        self._uninitialised: dict[int, tuple[Site, Sample | None]] = {}
        self._has_subclasses = False
        # By address: the storage's index and a sample of its contents.
        self._contents: dict[int, tuple[int, Sample]] = {}
        # An op call is creating a constant, such as `torch.tensor([1, 2])`.
        self.is_lifting = False
        # The function whose arguments or results are checked.
        self._owner: Any = None
        self._preexisting: list[weakref.ref[torch.UntypedStorage]] = []
        self.unfinished = UnfinishedWork(self, recorder, runs_results=runs_results)

    def record_subclass(self) -> None:
        """Record that tensor subclasses are in use, which may contain pre-existing tensors."""
        self._has_subclasses = True
        self._suspects.clear()

    def record_export(self, tensor: torch.Tensor, frame: FrameType | None, *, is_array: bool = False) -> None:
        """Record an access to a tensor's data from outside torch; `frame` runs the accessing code."""
        if tensor.numel() < 2 or not self.is_accessible(frame):
            return
        self._was_exported = True
        site = self.site(find_source_line(frame))
        if is_array:
            self._array_site = site
        for strided, storage in with_storages(tensor):
            self._check_contents(strided)
            self._export(self._index(strided), storage, describe_tensor(strided), site)

    def record_storage_export(self, storage: torch.UntypedStorage, frame: FrameType | None) -> None:
        """Record an access to a storage's data from outside torch."""
        index = self._recorder.storage_indices.get(id(storage))
        if index is not None and storage.nbytes() > 1 and self.is_accessible(frame):
            self._was_exported = True
            spec = TensorSpec((storage.nbytes(),), "uint8", str(storage.device))
            self._export(index, storage, spec, self.site(find_source_line(frame)))

    def _export(self, index: int, storage: torch.UntypedStorage, spec: TensorSpec, site: Site) -> None:
        if self._has_values or not self.is_real:
            self.exported.add(index, storage, spec, site)

    def record_elsewhere(self, frame: FrameType | None) -> None:
        """Record that code at a frame has another process or thread compute; tensors created later may be results."""
        if self.unfinished.record_elsewhere(frame):
            self._was_exported = True

    def record_import(self, tensor: torch.Tensor) -> None:
        """Record a tensor created on foreign memory, which may be a constant."""
        self.is_lifting = True
        self._index(tensor)
        self.is_lifting = False

    def check_new(self, tensor: torch.Tensor, storage: torch.UntypedStorage, index: int) -> None:
        """Check a tensor that no recorded op created, at its first use."""
        if self.in_op or type(tensor) not in PLAIN_TENSORS:
            return
        self._contents.pop(find_address(storage), None)
        if tensor.numel() < 2 or not self.is_inside() or peek_interpreter() is not None:
            return
        is_view = storage.device.type == "cpu" and self.exported.contains_address(find_address(storage))
        if not storage.resizable():  # an array's memory, or another program's
            self._export(index, storage, describe_tensor(tensor), self.site())
        if is_view or (not self._was_exported and (self.is_lifting or self._has_subclasses)):
            return  # of exported memory, whose contents are compared, or a constant
        site = self._current_site()
        if self.is_lifting:
            self._report(site, describe_tensor(tensor), index)
        else:
            self._suspects[index] = site, describe_tensor(tensor)

    def before(
        self,
        schema: OpSchema,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        reads: Sequence[int],
        storages: Sequence[torch.UntypedStorage] | None,
    ) -> None:
        """Check the storages `reads` of an op call, also given as objects if all belong to plain tensors."""
        if self._uninitialised and not self._uninitialised.keys().isdisjoint(reads):
            self._check_initialised(schema, args, kwargs)
        if not self._has_values:
            return
        if storages is None or self._uninitialised or not self._are_unchanged(reads, storages):
            for tensor in tensors_of((args, kwargs)):
                if type(tensor) in PLAIN_TENSORS:
                    self._check_contents(tensor)

    def _are_unchanged(self, indices: Sequence[int], storages: Sequence[torch.UntypedStorage]) -> bool:
        """Return whether storages of plain tensors have the contents of their last samples; make first samples."""
        contents, rows = self._contents, self._recorder.storages
        if self.exported and not self.exported.keys().isdisjoint(indices):
            return False
        for index, storage in zip(indices, storages, strict=True):
            nbytes = storage.nbytes()
            if not nbytes or rows[index][1] != "cpu":
                continue
            try:
                address = address_of(storage)
            except RuntimeError:  # a functional or fake tensor's
                continue
            if not address:
                continue
            # As in _read, without a call.
            if nbytes < 2 * SAMPLE_BYTES:
                sample = read_fewer[nbytes](MEMORY, address)
            else:
                sample = read_bytes(MEMORY, address) + read_bytes(MEMORY, address + (nbytes >> 1))
            previous = contents.get(address)
            if previous is None:
                contents[address] = index, sample
            elif previous[1] != sample or previous[0] != index:
                return False
        return True

    def after(
        self,
        schema: OpSchema,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        reads: Sequence[int],
        result: Any,
        writes: Sequence[int],
    ) -> None:
        """Record the writes of an op call."""
        site = None
        if schema.name in UNINITIALISED:
            site = None if is_called_by_torch(sys._getframe(1)) else self.site()
        elif self._uninitialised and schema.name in COPIES:
            site = next((self._uninitialised[index][0] for index in reads if index in self._uninitialised), None)
        if schema.name in UNINITIALISED and site is None:
            for _, storage in with_storages(result):
                self._contents.pop(find_address(storage), None)
        elif site is not None:
            self._uninitialised.update((index, (site, None)) for index in writes)
            for tensor, storage in with_storages(result) if self._has_values else ():
                index = self._index(tensor)
                self._uninitialised[index] = site, self._sample(storage, index)
        elif schema.name.startswith(SET_STORAGE):
            for tensor, storage in with_storages(result):
                index = self._index(tensor)
                if index == len(self._recorder.storages) - 1:  # a storage that did not exist before
                    self.check_new(tensor, storage, index)
        elif self._has_values:
            if writes and not (len(writes) == 1 and writes[0] in reads and not schema.written):
                self._store_contents(result)
            if writes_to_arguments(schema):
                self._store_contents(tuple(written_arguments(schema, args, kwargs)))

    def store(self, indices: Sequence[int], storages: Sequence[torch.UntypedStorage]) -> None:
        """Record that an op call, of an op without `is_special`, may have written to storages of plain tensors."""
        if self._has_values:
            self.exported.accept(indices)
            contents, rows = self._contents, self._recorder.storages
            for index, storage in zip(indices, storages, strict=True):
                nbytes = storage.nbytes()
                if nbytes and rows[index][1] == "cpu" and (address := find_address(storage)):
                    contents[address] = index, read_sample(address, nbytes)

    def record_write(self, values: Any) -> None:
        """Record that a kernel launch wrote to tensors."""
        for tensor, _ in with_storages(values):
            self._uninitialised.pop(self._index(tensor), None)
        self._store_contents(values)

    def accept_constants(self, indices: Iterable[int]) -> None:
        """Accept storages that an op has lifted as constants, unless they may contain data exported before."""
        if not self._was_exported:
            for index in indices:
                self._suspects.pop(index, None)

    def enter(self, values: Any) -> None:
        """Check the arguments of a module or function."""
        if self.in_op:
            return
        if not self.is_inside():
            self.forget_contents()  # work between two calls of the model is not the model's
            indices = self._recorder.storage_indices
            alive = [storage for reference in self._preexisting if (storage := reference()) is not None]
            known = [storage for storage in alive if id(storage) in indices]
            self.store([indices[id(storage)] for storage in known], known)
            self._recorder.storages_of(tensors_of(values))
            if any(type(tensor) not in PLAIN_TENSORS for tensor in tensors_of(values)):
                self.record_subclass()
        elif self._has_values or self._uninitialised:
            self._check_values(values, None)

    def leave(self, values: Any, owner: Any) -> None:
        """Check the results of a module or function `owner`, whose region is still open."""
        if not self.in_op and (self._has_values or self._uninitialised or self._was_exported):
            self._check_values(values, owner)

    def finish(self, result: Any, owner: Any) -> None:
        """Check the result of the outermost call of the model, to the function `owner`; its region is still open."""
        arrays = self.unfinished.finish(result, owner)
        self._owner = owner
        self.exported.check()
        self._owner = None
        for tensor, _ in with_storages(result):
            index = self._index(tensor)
            if self._was_exported and index in self._suspects:  # a recorded program may keep the result
                self._report(*self._suspects.pop(index), index)
        is_view = self.exported.contains_address
        own = [array for array in arrays if not (address := address_of_array(array)) or not is_view(address)]
        if self._array_site is not None and own:
            self.report(self._array_site, (describe_array(own[0]),))
            self._array_site = None

    def report_array(self, array: Any, stack: int) -> None:
        """Report an array that existed before the run and was changed, unless that was seen already."""
        if stack not in self.reported and not self.exported.contains_address(address_of_array(array)):
            self.report(Site(stack, "forward", SourceLine("", type(array).__name__)), (describe_array(array),))

    def forget_storage(self, index: int) -> None:
        """Discard a freed storage; report a tensor on it that no recorded op created."""
        suspect = self._suspects.pop(index, None)
        if suspect is not None:
            self._report(*suspect, index)
        self._uninitialised.pop(index, None)
        self.exported.pop(index, None)

    def forget_contents(self) -> None:
        """Discard all samples of contents, after work that is not recorded."""
        self._contents.clear()
        self.exported.accept()

    def _report_exported(self, site: Site | None, spec: TensorSpec, index: int) -> None:
        if index not in self._uninitialised and self.is_inside():
            self._report(self._current_site() if site is None else site, spec, index)

    def _current_site(self) -> Site:
        return self.site(None if self._owner is None else source_line_of(self._owner))

    def watch(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Compare storages that exist before the run from the beginning of each call of the model on."""
        self._preexisting = list(map(weakref.ref, storages))

    def watch_inputs(self, inputs: Any) -> None:
        """Compare floating-point inputs before a kernel runs on them in shape execution, and when the call ends."""
        for tensor, storage in with_storages(inputs):
            if tensor.is_floating_point():
                self.exported.add(self._index(tensor), storage, describe_tensor(tensor), None)

    def _check_values(self, values: Any, owner: Any) -> None:
        if type(values) is torch.Tensor and self._has_values and not self._uninitialised:
            with suppress(RuntimeError):  # a sparse or functorch tensor has no storage
                storage = values.untyped_storage()
                index = self._recorder.storage_indices.get(id(storage))
                if index is not None and self._are_unchanged((index,), (storage,)):
                    return
        if not self._has_subclasses and any(type(tensor) not in PLAIN_TENSORS for tensor in tensors_of(values)):
            self.record_subclass()
        self._owner = owner
        # The model's result is read outside.
        state = self._recorder.thread_state()
        is_final = owner is not None and len(state.opened) == 1 and not state.thread_number
        for tensor, _ in with_storages(values):
            index = self._index(tensor)
            # Uninitialised memory that a module returns may be written to later.
            if index in self._uninitialised and owner is not None and (is_final or index in self.exported):
                self._report_uninitialised(tensor, index)
            self._check_contents(tensor)
        self._owner = None

    def _check_initialised(self, schema: OpSchema, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        written = {id(tensor) for value in written_arguments(schema, args, kwargs) for tensor in tensors_of(value)}
        reads_contents = not (schema.is_view or schema.name in METADATA_ONLY or schema.name in COPIES)
        for tensor, _ in with_storages((*args, *kwargs.values())):
            index = self._index(tensor)
            if index not in self._uninitialised:
                continue
            if id(tensor) in written:
                if schema.name not in METADATA_ONLY:
                    del self._uninitialised[index]
            elif reads_contents:
                self._report_uninitialised(tensor, index)

    def _report_uninitialised(self, tensor: torch.Tensor, index: int) -> None:
        site, before = self._uninitialised.pop(index)
        sample = self._sample(tensor.untyped_storage(), index) if self._has_values else None
        is_unchanged = sample is not None and sample == before and index not in self.exported
        if tensor.numel() and not is_unchanged:
            export = self.exported.get(index)
            self._report(site if export is None else export.site or site, describe_tensor(tensor), index)
            self.exported.accept((index,))

    def _check_contents(self, tensor: torch.Tensor) -> None:
        """Report a tensor whose contents have changed since the last recorded op."""
        if not self._has_values:
            return
        try:
            storage = tensor.untyped_storage()
        except RuntimeError:  # sparse or functorch
            return
        recorder = self._recorder
        index = self._index(tensor)
        if index in self.exported:
            self.exported.check((index,))
            self._contents.pop(find_address(storage), None)
            return
        sample = self._sample(storage, index)
        if sample is None or index in self._uninitialised:
            return
        address = find_address(storage)
        previous = self._contents.get(address)
        self._contents[address] = index, sample
        if previous is None or previous[1] == sample or not self.is_inside():
            return
        # Two storages at one address are one array imported twice, or the address was reused.
        if previous[0] != index and "op" in (recorder.storages[previous[0]][2], recorder.storages[index][2]):
            return
        self._report(self._current_site(), describe_tensor(tensor), index)

    def _store_contents(self, values: Any) -> None:
        found = list(with_storages(values))
        self.store([self._index(tensor) for tensor, _ in found], [storage for _, storage in found])

    def _sample(self, storage: torch.UntypedStorage, index: int) -> Sample | None:
        if self._recorder.storages[index][1] != "cpu":
            return None
        address, nbytes = find_address(storage), storage.nbytes()
        return read_sample(address, nbytes) if address and nbytes else None

    def _index(self, tensor: torch.Tensor) -> int:
        return self._recorder.storage_of(tensor, "outside")

    def _report(self, site: Site, output: TensorSpec, index: int) -> None:
        self.report(site, (output,), (index,))
